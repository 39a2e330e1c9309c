"""Translates arguments in a dialect of JSON to JSON while they arrive."""

import json
import re

from fairlead.base.wire_formats.wire_format import JsonDialect
from fairlead.language.structured.json_stream import BLANK
from fairlead.language.structured.parsed import Call, Parsed, escaped

_MAX_KEY_CHARS = 1024
_CLOSING = {"{": "}", "[": "]"}
_WORD = re.compile(r"[\w.+-]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class DialectArguments:
    """The arguments of one call; its opening mark has the name."""

    def __init__(self, name: str, dialect: JsonDialect) -> None:
        self._name: str | None = name
        self._opening, self._ending = dialect.string_delimiters or ('"', '"')
        self._has_bare_keys = dialect.unquoted_keys
        self._text, self._at = "", 0  # what was not translated yet begins at `_at`
        self._open: list[str] = []  # the brackets that close what is open
        self._before_key = self._in_string = self._is_faulty = False
        self._written: list[str] = []

    def feed(self, text: str, *, is_end: bool) -> Parsed:
        """Return what `text` adds; see `CallParser`."""
        self._text, self._at = self._text[self._at :] + text, 0
        calls = []
        if self._name is not None:
            self._text = self._text.lstrip(BLANK)
            if not self._text:
                return Parsed()
            if self._text[0] != "{":
                return Parsed(rest=self._text, is_faulty=True)
            calls.append(Call(self._name))
            self._name = None
        is_over = False
        while not is_over and self._step(is_end=is_end):
            is_over = self._is_faulty or not self._open
        calls.append(Call(arguments="".join(self._written)))
        self._written.clear()
        return Parsed(calls, self._text[self._at :] if is_over else None, self._is_faulty)

    def _step(self, *, is_end: bool) -> bool:
        """Translate what comes next; return whether there is more that does not depend on later text."""
        if self._in_string:
            return self._read_string()
        text = self._text
        while self._at < len(text) and text[self._at] in BLANK:
            self._at += 1
        if self._at == len(text):
            return False
        if text.startswith(self._opening, self._at):
            self._written.append('"')
            self._in_string, self._before_key = True, False
            self._at += len(self._opening)
            return True
        if not is_end and self._opening.startswith(text[self._at :]):
            return False
        if self._before_key and self._has_bare_keys and text[self._at] not in "},":
            return self._read_key()
        if text[self._at] in "{}[],:":
            self._read_bracket(text[self._at])
            return True
        return self._read_scalar(is_end=is_end)

    def _read_string(self) -> bool:
        text = self._text
        end = text.find(self._ending, self._at)
        if end < 0:
            end = len(text) - _overlap(text, self._at, self._ending)
            self._written.append(escaped(text[self._at : end]))
            self._at = end
            return False
        self._written.append(escaped(text[self._at : end]) + '"')
        self._at = end + len(self._ending)
        self._in_string = False
        return True

    def _read_key(self) -> bool:
        end = self._text.find(":", self._at, self._at + _MAX_KEY_CHARS)
        if end < 0:
            self._is_faulty = len(self._text) - self._at >= _MAX_KEY_CHARS
            return self._is_faulty
        self._written.append(json.dumps(self._text[self._at : end].rstrip(BLANK), ensure_ascii=False))
        self._at, self._before_key = end, False
        return True

    def _read_bracket(self, mark: str) -> None:
        if mark in _CLOSING:
            self._open.append(_CLOSING[mark])
        elif mark in "}]" and self._open.pop() != mark:
            self._is_faulty = True
            return
        self._before_key = mark == "{" or (mark == "," and self._open[-1] == "}")
        self._written.append(mark)
        self._at += 1

    def _read_scalar(self, *, is_end: bool) -> bool:
        found = _WORD.match(self._text, self._at, self._at + _MAX_KEY_CHARS)
        assert found is not None
        if found.end() == len(self._text) and not is_end:
            return False
        if _SCALAR.fullmatch(found[0]) is None:
            self._is_faulty = True
            return True
        self._written.append(found[0])
        self._at = found.end()
        return True


def _overlap(text: str, start: int, mark: str) -> int:
    """Return how many characters at the end of `text`, from `start` on, may begin `mark`."""
    longest = min(len(mark) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
