"""Reads JSON that arrives in pieces: where a value ends, and the members of an object that calls need.

Nothing is decoded but keys: what a model writes as arguments is passed on as it is. A reader `is_faulty` from
the first character that is not valid JSON.
"""

import json
import re
from typing import NamedTuple

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[,}\]\s]")
BLANK = " \t\r\n"


class ValueEnd:
    """Finds the end of one JSON value, which is not checked otherwise."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._kind = ""

    def feed(self, text: str, at: int = 0) -> int | None:
        """Return the index after the value in `text`, which continues earlier texts; None if it goes on.

        The value begins at `at` of the first text. A number or a word ends before what follows it.
        """
        if not self._kind:
            if at == len(text):
                return None
            self._kind = text[at]
        if self._kind not in '{["':
            found = _AFTER_SCALAR.search(text, at)
            return None if found is None else found.start()
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            mark = found[0]
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
            if not self._depth and not self._in_string and not self._is_escaped:
                return at
        return None


class Member(NamedTuple):
    """A piece of the value of an object's member, `is_last` with its last one."""

    key: str
    text: str
    is_last: bool


class ObjectReader:
    """Reads one object's members. Keys are decoded, values are not."""

    def __init__(self) -> None:
        self.is_faulty = False
        self._expects = "{"
        self._key = ""
        self._written_key: list[str] = []
        self._value: ValueEnd | None = None

    def feed(self, text: str, at: int = 0) -> tuple[list[Member], int | None]:
        """Return the pieces of members in `text` from `at`, and where the object ends or is faulty.

        None instead of an index: it goes on.
        """
        pieces: list[Member] = []
        while True:
            if self._value is not None:
                end = self._read_value(self._value, text, at, pieces)
                if end is None:
                    return pieces, None
                if self.is_faulty:
                    return pieces, end
                at = end
            at = _after_blanks(text, at)
            if at == len(text):
                return pieces, None
            if text[at] == "}" and self._expects in (",}", '"}'):
                return pieces, at + 1
            if not self._accepts(text[at]):
                self.is_faulty = True
                return pieces, at
            at += self._value is None

    def _read_value(self, value: ValueEnd, text: str, at: int, pieces: list[Member]) -> int | None:
        """Read a key or a value; return the index after it, None if it goes on."""
        end = value.feed(text, at)
        piece = text[at:end]
        if self._expects == "key":
            self._written_key.append(piece)
        elif piece or end is not None:
            pieces.append(Member(self._key, piece, end is not None))
        if end is None:
            return None
        self._value = None
        if self._expects == "key":
            self._expects = ":"
            try:
                self._key = json.loads("".join(self._written_key))
            except ValueError:
                self.is_faulty = True
            self._written_key.clear()
        else:
            self._expects = ",}"
        return end

    def _accepts(self, mark: str) -> bool:
        """Return whether `mark` is expected between values, and change what is expected after it."""
        if self._expects == "value":
            self._value = ValueEnd()
            return mark not in ",:}]"
        if mark not in self._expects:
            return False
        if mark == '"':
            self._value = ValueEnd()
        self._expects = {"{": '"}', ":": "value", ",": '"', '"': "key"}[mark]
        return True


class ListReader:
    """Reads the objects of a list, one after another."""

    def __init__(self) -> None:
        self.is_faulty = False
        self._expects = "["
        self._object: ObjectReader | None = None

    def feed(self, text: str) -> tuple[list[tuple[list[Member], bool]], int | None]:
        """Return the pieces of each object in `text`, with whether it has ended; and where the list ends.

        None instead of an index: it goes on.
        """
        objects: list[tuple[list[Member], bool]] = []
        at = 0
        while True:
            if self._object is not None:
                pieces, end = self._object.feed(text, at)
                self.is_faulty = self._object.is_faulty
                objects.append((pieces, end is not None and not self.is_faulty))
                if end is None or self.is_faulty:
                    return objects, end
                at, self._object, self._expects = end, None, ",]"
            at = _after_blanks(text, at)
            if at == len(text):
                return objects, None
            mark = text[at]
            if mark not in self._expects:
                self.is_faulty = True
                return objects, at
            if mark == "]":
                return objects, at + 1
            if mark == "{":
                self._object = ObjectReader()
            else:
                self._expects, at = {"[": "{]", ",": "{"}[mark], at + 1


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at
