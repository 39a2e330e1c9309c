"""Detects regular expressions that can take more than linear time in the length of the text.

The expression becomes a nondeterministic automaton without empty moves (Glushkov's construction), with one
state per character of the expression. A backtracking matcher follows every path through it before it fails.
The number of paths is unbounded exactly if there are two states p ≠ q and one text that leads from p to p,
from p to q and from q to q (A. Weber, H. Seidl: On the degree of ambiguity of finite automata, 1991). A state
that follows another in two ways, as in (a*)*, is reported as ambiguous too.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from re import _constants as kinds
from re import _parser
from typing import Any, NamedTuple

# A sufficient sample of all characters: ASCII, and one letter and one symbol beyond it.
_ALL = frozenset(map(chr, [*range(128), 0xE9, 0x20AC]))
_CATEGORIES = {
    kinds.CATEGORY_DIGIT: r"\d",
    kinds.CATEGORY_NOT_DIGIT: r"\D",
    kinds.CATEGORY_SPACE: r"\s",
    kinds.CATEGORY_NOT_SPACE: r"\S",
    kinds.CATEGORY_WORD: r"\w",
    kinds.CATEGORY_NOT_WORD: r"\W",
}
_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT)
_ATOMS = (kinds.ATOMIC_GROUP, kinds.POSSESSIVE_REPEAT)  # the matcher never retries them in a second way
_MOST_COPIES = 3  # of a part that is repeated a bounded number of times


class _Part(NamedTuple):
    """A part of an expression: the states that it can begin and end with, and whether it can be empty."""

    first: frozenset[int]
    last: frozenset[int]
    is_nullable: bool


class _Automaton:
    def __init__(self) -> None:
        self.takes: list[frozenset[str]] = []
        self.follows: list[set[int]] = []
        self.is_double = False

    def sequence(self, items: Sequence[Any]) -> _Part:
        part = _Part(frozenset(), frozenset(), is_nullable=True)
        for item in items:
            part = self._joined(part, self._part(item))
        return part

    def _part(self, item: tuple[Any, Any]) -> _Part:
        kind, value = item
        if kind in _REPEATS:
            least, most, content = value
            return self._repeated(content, least, most)
        if kind is kinds.SUBPATTERN:
            return self.sequence(value[-1])
        if kind is kinds.BRANCH:
            parts = [self.sequence(branch) for branch in value[1]]
            first, last = (
                frozenset().union(*ends)
                for ends in zip(*((one.first, one.last) for one in parts), strict=True)
            )
            return _Part(first, last, any(part.is_nullable for part in parts))
        if kind in _ATOMS or kind in (kinds.AT, kinds.ASSERT, kinds.ASSERT_NOT):
            return _Part(frozenset(), frozenset(), is_nullable=True)
        return self._character(_characters(kind, value))

    def _character(self, taken: frozenset[str]) -> _Part:
        self.takes.append(taken)
        self.follows.append(set())
        state = frozenset([len(self.takes) - 1])
        return _Part(state, state, is_nullable=False)

    def _repeated(self, content: Sequence[Any], least: int, most: int) -> _Part:
        part = _Part(frozenset(), frozenset(), is_nullable=True)
        for _ in range(min(least, _MOST_COPIES)):
            part = self._joined(part, self.sequence(content))
        if most == kinds.MAXREPEAT:
            loop = self.sequence(content)
            self._connect(loop.last, loop.first)
            return self._joined(part, loop._replace(is_nullable=True))
        for _ in range(min(most - least, _MOST_COPIES)):
            part = self._joined(part, self.sequence(content)._replace(is_nullable=True))
        return part

    def _joined(self, one: _Part, other: _Part) -> _Part:
        self._connect(one.last, other.first)
        first = one.first | other.first if one.is_nullable else one.first
        last = one.last | other.last if other.is_nullable else other.last
        return _Part(first, last, one.is_nullable and other.is_nullable)

    def _connect(self, before: frozenset[int], after: frozenset[int]) -> None:
        for state in before:
            self.is_double |= bool(self.follows[state] & after)
            self.follows[state] |= after

    def is_ambiguous(self) -> bool:
        """Return whether the number of ways to match a text grows without bound."""
        loops = [state for state in range(len(self.takes)) if state in self._reachable(state)]
        pairs = ((one, other) for one in loops for other in loops if one != other)
        return self.is_double or any(
            other in self._reachable(one) and self._meet(one, other) for one, other in pairs
        )

    def _reachable(self, state: int) -> set[int]:
        found: set[int] = set()
        unvisited = [state]
        while unvisited:
            new = self.follows[unvisited.pop()] - found
            found |= new
            unvisited += new
        return found

    def _meet(self, one: int, other: int) -> bool:
        """Return whether one text leads from `one` to itself, on to the `other`, and from that to itself."""
        goal = (one, other, other)
        seen: set[tuple[int, ...]] = set()
        unvisited = deque([(one, one, other)])
        while unvisited:
            for after in self._steps(unvisited.popleft()):
                if after == goal:
                    return True
                if after not in seen:
                    seen.add(after)
                    unvisited.append(after)
        return False

    def _steps(self, states: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for after in product(*(self.follows[state] for state in states)):
            if frozenset.intersection(*(self.takes[state] for state in after)):
                yield after


def is_ambiguous(expression: str | bytes, flags: int = 0) -> bool:
    """Return whether matching the expression from a text's beginning can take more than linear time."""
    if isinstance(expression, bytes):
        expression = expression.decode("latin-1")
    automaton = _Automaton()
    automaton.sequence(list(_parser.parse(expression, flags)))
    return automaton.is_ambiguous()


def _characters(kind: Any, value: Any) -> frozenset[str]:
    if kind is kinds.ANY:
        return _ALL
    if kind is kinds.LITERAL:
        return frozenset(chr(value))
    if kind is kinds.NOT_LITERAL:
        return _ALL - {chr(value)}
    if kind is kinds.RANGE:
        return frozenset(char for char in _ALL if value[0] <= ord(char) <= value[1])
    if kind is kinds.CATEGORY:
        return frozenset(char for char in _ALL if re.fullmatch(_CATEGORIES[value], char))
    if kind is kinds.IN:
        is_negated = value[0][0] is kinds.NEGATE
        taken = frozenset().union(*(_characters(*one) for one in value[is_negated:]))
        return _ALL - taken if is_negated else taken
    raise NotImplementedError(f"{kind} in a regular expression")
