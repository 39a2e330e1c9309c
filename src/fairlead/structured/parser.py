"""Divides the text of an answer into its pieces while it arrives.

Text is returned as soon as no continuation can make it part of a mark. What begins like a call but is not one
is returned as content, unless its name was returned already.
"""

from collections.abc import Mapping
from typing import Any

import regex

from fairlead.structured.call_parsers import CallParser, call_parser
from fairlead.structured.json_stream import BLANK
from fairlead.structured.mark import MAX_CHARS, Mark
from fairlead.structured.parsed import Call
from fairlead.structured.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from fairlead.structured.wire_format import Marks, WireFormat


class AnswerParser:
    """Parses one answer.

    `tools`: the schemas of the arguments by function; None: calls are not parsed. `in_reasoning`: the prompt
    has opened the reasoning.
    """

    def __init__(
        self, wire_format: WireFormat, *, tools: Mapping[str, Any] | None, in_reasoning: bool = False
    ) -> None:
        self._format = wire_format
        self._tools = tools or {}
        self._openings: list[tuple[str, Mark]] = []
        for kind, marks in (("reasoning", wire_format.reasoning), ("content", wire_format.content)):
            if marks is not None:
                self._openings.append((kind, Mark(marks.open, takes_blanks=True)))
        if wire_format.calls is not None and tools is not None:
            self._openings.append(("call", Mark(wire_format.calls.marks.open)))
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._region = ""  # "reasoning" or "content", between their marks
        self._close: Mark | None = None
        self._skips_blanks = False
        self._has_answer = False  # where texts have no marks, the reasoning precedes the answer
        self._call: CallParser | None = None
        self._calls = 0
        self._held: list[str] | None = None  # the texts of a call since its mark, until its name was returned
        self._opening = ""  # the mark of that call
        if in_reasoning:
            self._enter("reasoning", wire_format.reasoning)

    @property
    def is_reasoning(self) -> bool:
        """Whether what follows is reasoning."""
        return self._region == "reasoning"

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._calls

    def push(self, text: str) -> list[Piece]:
        """Add text; return what is decided now."""
        return self._parse(text, is_end=False)

    def finish(self) -> list[Piece]:
        """Return the rest."""
        return self._parse("", is_end=True)

    def _parse(self, text: str, *, is_end: bool) -> list[Piece]:
        self._buffer += text
        self._pieces = []
        while self._advance(is_end=is_end):
            pass
        return self._pieces

    def _advance(self, *, is_end: bool) -> bool:
        """Parse up to the next mark; return whether it was found."""
        if self._call is not None:
            return self._advance_call(self._call, is_end=is_end)
        if self._region:
            return self._advance_region(is_end=is_end)
        kind, start, match = "", len(self._buffer), None
        for other, mark in self._openings:
            if other == "reasoning" and self._has_answer:
                continue
            at, found = mark.find(self._buffer, is_end=is_end)
            if other == "reasoning" and self._format.content is None and self._buffer[:at].strip():
                continue
            if at < start or (at == start and match is None):
                kind, start, match = other, at, found
        self._add_text(self._buffer[:start])
        if match is None:
            self._buffer = self._buffer[start:]
            return False
        self._opening, self._buffer = self._buffer[start : match.end()], self._buffer[match.end() :]
        if kind == "call":
            self._begin_call(match)
        else:
            self._enter(kind, self._format.reasoning if kind == "reasoning" else self._format.content)
        return True

    def _enter(self, region: str, marks: Marks | None) -> None:
        assert marks is not None
        self._region = region
        self._skips_blanks = region == "reasoning"
        self._close = Mark(marks.close, takes_blanks=self._skips_blanks) if marks.close else None

    def _advance_region(self, *, is_end: bool) -> bool:
        if self._region == "call end":
            return self._advance_call_end(is_end=is_end)
        end, match = len(self._buffer), None
        if self._close is not None:
            end, match = self._close.find(self._buffer, is_end=is_end)
        self._add_text(self._buffer[:end])
        self._buffer = self._buffer[end if match is None else match.end() :]
        if match is None:
            return False
        self._has_answer = self._format.content is None
        self._skips_blanks, self._region, self._close = self._region == "reasoning", "", None
        return True

    def _advance_call_end(self, *, is_end: bool) -> bool:
        """Skip the mark that closes a call, if the model has written it."""
        assert self._close is not None
        is_possible, match = self._close.match(self._buffer, is_end=is_end)
        if is_possible and match is None:
            return False
        self._region, self._close = "", None
        if match is not None:
            self._buffer = self._buffer[match.end() :]
        return True

    def _add_text(self, text: str) -> None:
        if self._skips_blanks:
            text = text.lstrip(BLANK)
            self._skips_blanks = not text
        if text.strip() and not self._region:
            self._has_answer = self._format.content is None
        if text:
            self._pieces.append(Reasoning(text) if self._region == "reasoning" else Content(text))

    def _begin_call(self, match: "regex.Match[str]") -> None:
        syntax = self._format.calls
        assert syntax is not None
        name = match["name"].strip() if syntax.name is None else ""
        self._call = call_parser(syntax, name, self._tools.get(name))
        self._held = []
        self._has_answer = self._format.content is None

    def _advance_call(self, call: CallParser, *, is_end: bool) -> bool:
        text, self._buffer = self._buffer, ""
        parsed = call.feed(text, is_end=is_end)
        if self._held is not None:
            self._held.append(text)
        for one in parsed.calls:
            self._add_call(one)
        if parsed.rest is None and not is_end:
            return False
        self._call = None
        if self._held is not None and (parsed.is_faulty or parsed.rest is None):
            self._release("".join(self._held), parsed.rest)
            return True
        self._buffer, self._held = parsed.rest or "", None
        syntax = self._format.calls
        assert syntax is not None
        if syntax.marks.close and not parsed.is_faulty:
            self._region, self._close = "call end", Mark(syntax.marks.close)
        return True

    def _release(self, held: str, rest: str | None) -> None:
        """Return what is not a call as content; `rest`: from its fault on, None if it is unfinished.

        The text after its mark is parsed again, unless it is so long that this could be repeated for ever.
        """
        text = self._opening + held
        end = len(text) - len(rest or "")
        if rest is not None and end <= MAX_CHARS:
            end = max(1, len(self._opening))
        self._add_text(text[:end])
        self._buffer, self._held = text[end:], None

    def _add_call(self, call: Call) -> None:
        if call.name is not None:
            self._pieces.append(CallBegin(self._calls, call.name))
            self._calls += 1
            self._held = None
        if call.arguments:
            self._pieces.append(CallArguments(self._calls - 1, call.arguments))
