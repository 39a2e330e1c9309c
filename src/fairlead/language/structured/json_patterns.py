"""The `pattern` of a schema as a regular expression over the JSON writing of strings.

It is read as ECMAScript reads it. What an automaton cannot match (lookarounds, references to groups, word
boundaries) and anchors within an expression are refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from fairlead.language.structured import json_strings
from fairlead.language.structured.json_strings import Ranges, complement, ranges

_MOST_KEPT = 64
"""Patterns that are kept as written: all formats, and a few of clients, each of up to 400 kB."""

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ranges(
    [
        *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
        *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ]
)
_DOT = complement(ranges([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B, "f": 0x0C, "0": 0}
_ANY_TEXT = f"{json_strings.CHARACTER}*"


class PatternFault(ValueError):
    """A regular expression that is not valid, or that cannot be matched here."""


@dataclass(frozen=True)
class _Set:
    """One of these characters."""

    ranges: Ranges


@dataclass(frozen=True)
class _Anchor:
    """The begin of the text, or its end."""

    is_begin: bool


@dataclass(frozen=True)
class _Sequence:
    items: "tuple[_Node, ...]"


@dataclass(frozen=True)
class _Choice:
    options: "tuple[_Sequence, ...]"


@dataclass(frozen=True)
class _Repeat:
    """`most` None: without a bound."""

    item: "_Node"
    least: int
    most: int | None


_Node = _Set | _Anchor | _Sequence | _Choice | _Repeat


@lru_cache(maxsize=_MOST_KEPT)
def written_pattern(source: str) -> str:
    """Return what matches the writings in JSON, between quotation marks, of texts in which `source` is found.

    Raises `PatternFault`.
    """
    try:
        tree = _Parser(source).parse()
        found = list(_edges(tree))
        plain = all(
            begins and ends and all(map(json_strings.is_plain, _sets(body))) for begins, body, ends in found
        )
        ways = [
            f"{'' if begins else _ANY_TEXT}{_rendered(body, plain)}{'' if ends else _ANY_TEXT}"
            for begins, body, ends in found
        ]
    except RecursionError:
        raise PatternFault("has groups that are nested too deeply") from None
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


@lru_cache(maxsize=_MOST_KEPT)
def lengths(source: str) -> tuple[int, int | None]:
    """Return the least and the most characters of texts in which `source` is found. Raises `PatternFault`."""
    least, most = [], []
    for begins, body, ends in _edges(_Parser(source).parse()):
        low, high = _lengths(body)
        least.append(low)
        most.append(high if begins and ends else None)
    return min(least), None if None in most else max(one for one in most if one is not None)


def _lengths(node: _Node) -> tuple[int, int | None]:
    match node:
        case _Sequence(items):
            found = list(map(_lengths, items))
            is_bounded = all(most is not None for _, most in found)
            return sum(least for least, _ in found), sum(
                most or 0 for _, most in found
            ) if is_bounded else None
        case _Choice(options):
            found = list(map(_lengths, options))
            is_bounded = all(most is not None for _, most in found)
            return min(least for least, _ in found), max(
                most or 0 for _, most in found
            ) if is_bounded else None
        case _Repeat(item, least, most):
            low, high = _lengths(item)
            return low * least, None if most is None or high is None else high * most
    return 1, 1


def _edges(node: _Node) -> Iterator[tuple[bool, _Sequence, bool]]:
    """Yield the alternatives without their anchors, each with whether it begins and ends with one."""
    items = node.items if isinstance(node, _Sequence) else (node,)
    for place in (0, -1):
        if items and isinstance(edge := items[place], _Choice | _Sequence) and _has_anchor(edge):
            for option in edge.options if isinstance(edge, _Choice) else (edge,):
                rest = (*option.items, *items[1:]) if place == 0 else (*items[:-1], *option.items)
                yield from _edges(_Sequence(rest))
            return
    begins, ends = _Anchor(is_begin=True), _Anchor(is_begin=False)
    first, last = 0, len(items)
    while first < last and items[first] == begins:
        first += 1
    while first < last and items[last - 1] == ends:
        last -= 1
    inner = items[first:last]
    if first and any(isinstance(one, _Choice) and _has_anchor(one) for one in (*inner[:1], *inner[-1:])):
        for _, body, is_end in _edges(_Sequence(inner)):
            yield True, body, is_end or last < len(items)
        return
    if any(map(_has_anchor, inner)):
        raise PatternFault("has an anchor that is not supported here")
    yield first > 0, _Sequence(inner), last < len(items)


def _has_anchor(node: _Node) -> bool:
    match node:
        case _Anchor():
            return True
        case _Sequence(items):
            return any(map(_has_anchor, items))
        case _Choice(options):
            return any(map(_has_anchor, options))
        case _Repeat(item):
            return _has_anchor(item)
    return False


def _sets(node: _Node) -> Iterator[Ranges]:
    match node:
        case _Set(found):
            yield found
        case _Sequence(items):
            for one in items:
                yield from _sets(one)
        case _Choice(options):
            for option in options:
                yield from _sets(option)
        case _Repeat(item):
            yield from _sets(item)


def _rendered(node: _Node, plain: bool) -> str:
    match node:
        case _Set(found):
            return json_strings.written(found, plain=plain)
        case _Sequence(items):
            return "".join(_rendered(one, plain) for one in items)
        case _Choice(options):
            return f"(?:{'|'.join(_rendered(one, plain) for one in options)})"
        case _Repeat(item, least, most):
            return f"(?:{_rendered(item, plain)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(node)


class _Parser:
    """Reads a regular expression of ECMAScript."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def parse(self) -> _Node:
        found = self._choice()
        if self._at < len(self._source):
            self._refuse("has a ) without its (")
        return found

    def _choice(self) -> _Choice:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return _Choice(tuple(options))

    def _sequence(self) -> _Sequence:
        items: list[_Node] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            item = self._atom()
            items.append(self._repeated(item))
        return _Sequence(tuple(items))

    def _atom(self) -> _Node:
        character = self._next()
        match character:
            case "^" | "$":
                return _Anchor(character == "^")
            case ".":
                return _Set(_DOT)
            case "[":
                return _Set(self._class())
            case "(":
                return self._group()
            case "\\":
                return _Set(self._escape())
            case "*" | "+" | "?":
                self._refuse(f"has a {character} after nothing")
        return _Set(ranges([(ord(character), ord(character))]))

    def _group(self) -> _Node:
        if self._take("?"):
            if self._take("<") or self._take("P<"):
                if self._source[self._at : self._at + 1] in ("=", "!"):
                    self._refuse("has a lookbehind, which is not supported")
                end = self._source.find(">", self._at)
                if end < 0:
                    self._refuse("has a group whose name does not end")
                self._at = end + 1
            elif not self._take(":"):
                what = "a lookahead" if self._source[self._at : self._at + 1] in ("=", "!") else "flags"
                self._refuse(f"has {what}, which is not supported")
        found = self._choice()
        if not self._take(")"):
            self._refuse("has a ( without its )")
        return found

    def _repeated(self, item: _Node) -> _Node:
        counts = self._counts()
        if counts is None:
            return item
        if isinstance(item, _Anchor):
            self._refuse("repeats an anchor")
        self._take("?")  # a lazy repetition matches the same texts
        if self._counts() is not None:
            self._refuse("has two repetitions of one thing")
        least, most = counts
        if most is not None and most < least:
            self._refuse("has a repetition whose numbers are out of order")
        return _Repeat(item, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        end = self._source.find("}", self._at)
        if not self._source.startswith("{", self._at) or end < 0:
            return None
        least, comma, most = self._source[self._at + 1 : end].partition(",")
        if not (least.isascii() and least.isdecimal()) or (
            most and not (most.isascii() and most.isdecimal())
        ):
            return None
        self._at = end + 1
        return int(least), int(most) if most else None if comma else int(least)

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._class_atom()
            if self._source.startswith("-", self._at) and self._source[self._at + 1 : self._at + 2] not in (
                "]",
                "",
            ):
                self._at += 1
                high = self._class_atom()
                if len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                    if low[0][0] > high[0][0]:
                        self._refuse("has a range of characters that is out of order")
                    found.append((low[0][0], high[0][0]))
                else:
                    found += [*low, (0x2D, 0x2D), *high]
            else:
                found += low
        kept = ranges(found)
        return complement(kept) if is_negated else kept

    def _class_atom(self) -> Ranges:
        character = self._next()
        if character != "\\":
            return ((ord(character), ord(character)),)
        return ((0x08, 0x08),) if self._take("b") else self._escape()

    def _escape(self) -> Ranges:
        name = self._next()
        if name.lower() in _CLASSES:
            found = _CLASSES[name.lower()]
            return found if name.islower() else complement(found)
        if name == "0" and self._source[self._at : self._at + 1].isdigit():
            self._refuse("has an octal escape")
        if name in _CONTROLS:
            code = _CONTROLS[name]
        elif name == "x":
            code = self._hexadecimal(2)
        elif name == "u":
            code = self._unicode()
        elif name == "c" and (letter := self._source[self._at : self._at + 1]).isascii() and letter.isalpha():
            self._at += 1
            code = ord(letter) % 32
        elif name.isalnum():
            self._refuse(f"has \\{name}, which is not supported")
        else:
            code = ord(name)
        return ((code, code),)

    def _unicode(self) -> int:
        if self._take("{"):
            end = self._source.find("}", self._at)
            digits, self._at = self._source[self._at : end], end + 1
            try:
                code = int(digits, 16) if end > 0 else -1
            except ValueError:
                code = -1
            if not 0 <= code <= 0x10FFFF:
                self._refuse("has an escape that is no character")
            return code
        code = self._hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self._source.startswith("\\u", self._at):
            before, self._at = self._at, self._at + 2
            low = self._hexadecimal(4)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
            self._at = before
        return code

    def _hexadecimal(self, digits: int) -> int:
        found = self._source[self._at : self._at + digits]
        if len(found) < digits or any(one not in "0123456789abcdefABCDEF" for one in found):
            self._refuse("has an escape that is not complete")
        self._at += digits
        return int(found, 16)

    def _next(self) -> str:
        if self._at >= len(self._source):
            self._refuse("ends too early")
        self._at += 1
        return self._source[self._at - 1]

    def _take(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _refuse(self, reason: str) -> NoReturn:
        raise PatternFault(reason)
