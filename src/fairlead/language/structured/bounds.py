"""What a schema or a regular expression makes llguidance count, found without compiling it. Pure.

llguidance compiles texts and numbers to automata: each character that is counted and each remainder of a
division is a state. Their number can be astronomical although the schema is short.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

_COUNT = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)
_COUNTED = frozenset({"minLength", "maxLength", "pattern"})
_OF_MULTIPLES = frozenset({"multipleOf", "allOf", "anyOf", "oneOf", "$ref"})
_MOST_SIZE = 10**9
_MOST_DEPTH = 200  # of allOf and references; what is deeper takes its time in the trial


class CountedText(NamedTuple):
    """The constraints of a string. Equal ones share their states."""

    min_length: int = 0
    max_length: int = 0
    pattern: str = ""

    @property
    def characters(self) -> int:
        """Return how many characters are counted."""
        repeated = expanded_size(self.pattern) if _COUNT.search(self.pattern) else 0
        return max(self.min_length, self.max_length, repeated)


def counted_text(schema: Any) -> CountedText:
    """Return what a schema counts of a string; nothing if it has no such constraints."""
    if not isinstance(schema, Mapping) or not schema.keys() & _COUNTED:
        return CountedText()
    return CountedText(schema.get("minLength", 0), schema.get("maxLength", 0), schema.get("pattern", ""))


def expanded_size(pattern: str) -> int:
    """Return how many characters a regular expression has with its counted repetitions written out.

    `(ab{3}){2}` is abbbabbb: 8. Bounded by 10⁹. An expression that is not valid has any size.
    """
    sizes = [0]  # of the open groups
    last = 0  # of the latest element of the innermost group
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if found := _COUNT.match(pattern, at):
            times = max(1, *(int(number or 0) for number in found.groups()))
            sizes[-1] += (times - 1) * last
            last *= times
            at = found.end()
        elif character == "(":
            sizes.append(0)
            at += 1
        elif character == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
            at += 1
        elif character in "*+?|^$":
            at += 1
        else:
            last = 1
            sizes[-1] += 1
            found = _CLASS.match(pattern, at)
            at = found.end() if found else at + (2 if character == "\\" else 1)
        if sizes[-1] > _MOST_SIZE:
            return _MOST_SIZE
    return min(sum(sizes), _MOST_SIZE)


class Multiples:
    """The least common multiples of the `multipleOf` that hold for the same number, by schema.

    `target` returns the schema that a `$ref` points to. Numbers above `most` are not computed exactly.
    """

    def __init__(self, target: Callable[[Any], Any], most: int) -> None:
        self._target = target
        self._most = most
        self._found: dict[int, Fraction] = {}

    def remainders(self, schema: Any) -> int:
        """Return how many remainders are told apart: 4 for multiples of 4, 0.4 or 40."""
        if not isinstance(schema, Mapping) or not schema.keys() & _OF_MULTIPLES:
            return 0
        return _coefficient(self._of(schema))

    def _of(self, schema: Any, depth: int = 0) -> Fraction:
        """Return the number of which values of this schema are multiples; 0: of none."""
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH or not schema.keys() & _OF_MULTIPLES:
            return Fraction(0)
        if id(schema) in self._found:
            return self._found[id(schema)]
        self._found[id(schema)] = Fraction(0)  # what a reference to itself adds
        own = schema.get("multipleOf", 0)
        multiple = Fraction(Decimal(repr(own))) if type(own) in (int, float) and own > 0 else Fraction(0)
        parts = [*_list(schema, "allOf"), *([self._target(schema["$ref"])] if "$ref" in schema else [])]
        for part in parts:
            multiple = self._common(multiple, self._of(part, depth + 1))
        for keyword in ("anyOf", "oneOf"):  # one of them holds, too
            choices = [self._common(multiple, self._of(part, depth + 1)) for part in _list(schema, keyword)]
            multiple = max(choices, key=_coefficient, default=multiple)
        self._found[id(schema)] = multiple
        return multiple

    def _common(self, one: Fraction, other: Fraction) -> Fraction:
        if not one or not other or _coefficient(one) > self._most:
            return one or other
        if _coefficient(other) > self._most:
            return other
        denominator = lcm(one.denominator, other.denominator)
        return Fraction(lcm(int(one * denominator), int(other * denominator)), denominator)


def _coefficient(value: Fraction) -> int:
    """Return a decimal number without its point and the zeros at its end."""
    digits: int = value.numerator * 10 ** len(str(value.denominator)) // value.denominator
    while digits and digits % 10 == 0:
        digits //= 10
    return digits


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []
