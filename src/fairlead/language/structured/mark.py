"""Marks in a text that arrives in pieces. How the text is cut does not change what is found."""

import regex

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.pattern import Class, Elements

MAX_CHARS = 2048
"""A longer match is not a mark; otherwise a text that only begins like one would be held back forever."""
MAX_BLANKS = 64
"""Blanks before a mark, or at one place in it, that belong to it."""
# A mark is a few words; a match that takes longer than this is an attack on the pattern.
_TIMEOUT_S = 1.0


class Mark:
    """A mark that is searched for in a text which arrives in pieces.

    `takes_blanks`: blanks before it belong to it, as they do if its pattern begins with `\\s*`. `first`: the
    characters that it begins with after them; None: any.
    """

    def __init__(self, elements: Elements, *, takes_blanks: bool = False) -> None:
        self.takes_blanks = takes_blanks
        while elements and elements[0] == Class(r"\s*"):
            self.takes_blanks, elements = True, elements[1:]
        self._compiled = regex.compile(pattern.to_regex(pattern.bounded(elements, MAX_BLANKS)), regex.DOTALL)
        self._may_grow = pattern.may_grow(elements)
        self.first = pattern.first_characters(elements)

    def find(self, text: str, *, is_end: bool) -> "tuple[int, regex.Match[str] | None]":
        """Return where the mark or its possible beginning is, and its match if no later text changes it.

        `is_end`: there is no later text. Without the mark, the position is where text may be part of it.
        """
        at = 0
        if self.first is not None and not any(character in text for character in self.first):
            at = len(text)  # most texts have no mark, and a search takes microseconds
        while at < len(text) and (found := self._search(text, at, is_end=is_end)) is not None:
            at = found.start()
            if found.end() - at <= MAX_CHARS:
                match = None if found.partial or self._grows(text, at, is_end=is_end) else found
                return self._before_blanks(text, at), match
            at += 1
        return len(text) if is_end else self._before_blanks(text, len(text)), None

    def match(self, text: str, *, is_end: bool) -> "tuple[bool, regex.Match[str] | None]":
        """Return whether the text may begin with the mark, and its match as `find` does."""
        start = len(text) - len(text.lstrip()) if self.takes_blanks else 0
        if start > MAX_BLANKS:
            return False, None
        found = self._compiled.match(text, start, partial=not is_end, timeout=_TIMEOUT_S)
        if found is None or found.end() - start > MAX_CHARS:
            return False, None
        is_open = found.partial or self._grows(text, start, is_end=is_end)
        return True, None if is_open else found

    def _search(self, text: str, at: int, *, is_end: bool) -> "regex.Match[str] | None":
        return self._compiled.search(text, at, partial=not is_end, timeout=_TIMEOUT_S)

    def _before_blanks(self, text: str, at: int) -> int:
        return before_blanks(text, at) if self.takes_blanks else at

    def _grows(self, text: str, start: int, *, is_end: bool) -> bool:
        """Return whether later text may make the match longer that begins at `start`."""
        if is_end or not self._may_grow:
            return False
        return self._compiled.fullmatch(text, start, partial=True, timeout=_TIMEOUT_S) is not None


def before_blanks(text: str, at: int) -> int:
    """Return where the blanks before `at` begin, of which only so many belong to a mark."""
    first = max(0, at - MAX_BLANKS)
    return first + len(text[first:at].rstrip())
