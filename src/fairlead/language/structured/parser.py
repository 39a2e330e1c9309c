"""Divides the text of an answer into its pieces while it arrives.

Text is returned as soon as no continuation can make it part of a mark. What begins like a call but is not one
is returned as content, unless its name was returned already.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from fairlead.base.wire_formats.wire_format import CallSyntax, Marks, WireFormat
from fairlead.language.structured.call_parsers import CallParser, call_parser
from fairlead.language.structured.json_stream import BLANK
from fairlead.language.structured.mark import MAX_CHARS, Mark, before_blanks
from fairlead.language.structured.parsed import Call, Parsed
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Piece, Reasoning

_QUOTES = tuple("`'\"“”‘’«»([<")  # before a mark that the text is about


class _Opening(NamedTuple):
    """What may begin in a text.

    `kind`: "reasoning", "content" or "call"; "stray": the mark that closes reasoning, without its opening;
    "mention": the mark that opens reasoning, where it is text.
    `mark`: what is searched for.
    `syntax`: that of the call.
    `is_slip`: it is a call only of a function that the request has.
    `is_first`: it counts only where no text precedes it.
    """

    kind: str
    mark: Mark
    syntax: CallSyntax | None = None
    is_slip: bool = False
    is_first: bool = False


@lru_cache(maxsize=64)
def _openings(wire_format: WireFormat, has_calls: bool) -> tuple[_Opening, ...]:
    """Return what may begin in a text of this format, in the order of precedence."""
    reasoning, content, calls = wire_format.reasoning, wire_format.content, wire_format.calls
    found = []
    if reasoning is not None:
        found.append(_Opening("reasoning", Mark(reasoning.open, takes_blanks=True), is_first=content is None))
    if content is not None:
        found.append(_Opening("content", Mark(content.open, takes_blanks=True)))
    if calls is not None and has_calls:
        for slip in wire_format.slips:
            mark = Mark(slip.syntax.marks.open)
            found.append(_Opening("call", mark, slip.syntax, is_slip=True, is_first=slip.at_start))
        found.append(_Opening("call", Mark(calls.marks.open), calls))
    if reasoning is not None and content is None:
        found.append(_Opening("stray", Mark(reasoning.close)))
        found.append(_Opening("mention", Mark(reasoning.open)))
    return tuple(found)


class _Expected:
    """What may begin next in a text."""

    def __init__(self, openings: Iterable[_Opening]) -> None:
        self.openings = tuple(openings)
        firsts = [one.mark.first for one in self.openings]
        self._firsts = None if None in firsts else frozenset().union(*filter(None, firsts))
        self._takes_blanks = any(one.mark.takes_blanks for one in self.openings)

    def none_begins(self, text: str) -> bool:
        """Return whether the text has no character that any of them begins with."""
        return self._firsts is not None and self._firsts.isdisjoint(text)

    def before_blanks(self, text: str) -> int:
        """Return where the blanks at the end begin that may belong to one of them."""
        return before_blanks(text, len(text)) if self._takes_blanks else len(text)


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
        self._openings = _openings(wire_format, tools is not None)
        self._state: tuple[bool, ...] = ()  # on which depends what may begin
        self._expected = _Expected(())
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._region = ""  # "reasoning" or "content", between their marks
        self._close: Mark | None = None
        self._skips_blanks = False
        self._has_answer = False  # where texts have no marks, the reasoning precedes the answer
        self._has_reasoned = in_reasoning  # or cannot any more: the answer has its opening mark as text
        self._has_content = False
        self._last = ""  # the last character of the content
        self._call: CallParser | None = None
        self._written_as: _Opening | None = None  # the syntax of that call
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
        opening, start, match = self._next_opening(is_end=is_end)
        if opening is None or match is None:
            self._add_text(self._buffer[:start])
            self._buffer = self._buffer[start:]
            return False
        if opening.kind == "stray":
            return self._advance_stray(start, match.end(), is_end=is_end)
        if opening.kind == "mention":
            self._has_reasoned, start = True, match.end()
        self._add_text(self._buffer[:start])
        self._opening, self._buffer = self._buffer[start : match.end()], self._buffer[match.end() :]
        if opening.kind == "call":
            self._begin_call(opening, match)
        elif opening.kind != "mention":
            kind = opening.kind
            self._enter(kind, self._format.reasoning if kind == "reasoning" else self._format.content)
        return True

    def _next_opening(self, *, is_end: bool) -> "tuple[_Opening | None, int, regex.Match[str] | None]":
        """Return what begins next, where, and the match of its mark if no later text changes it."""
        state = (self._has_answer, self._has_reasoned, self._has_content)
        if state != self._state:
            self._state, self._expected = state, _Expected(filter(self._is_expected, self._openings))
        opening, start, match = None, len(self._buffer), None
        if self._expected.none_begins(self._buffer):  # as in most texts, and a search takes microseconds
            return None, start if is_end else self._expected.before_blanks(self._buffer), None
        for other in self._expected.openings:
            at, found = other.mark.find(self._buffer, is_end=is_end)
            if other.is_first and self._buffer[:at].strip():
                continue
            # Of several at one place the first is meant, also if it is not whole yet.
            if at < start:
                opening, start, match = other, at, found
        return opening, start, match

    def _is_expected(self, opening: _Opening) -> bool:
        match opening.kind:
            case "reasoning":
                return not self._has_answer
            case "stray" | "mention":
                return not self._has_reasoned
        return not (opening.is_first and self._has_content)

    def _advance_stray(self, start: int, end: int, *, is_end: bool) -> bool:
        """Drop a mark that closes reasoning which was not opened, unless the text is about such marks.

        The text before it may have been returned already, and remains content. A mark that closes reasoning
        stands at a line's end or right behind the last word; a mark that the text mentions does not.
        """
        before = self._buffer[:start]
        after = self._buffer[end : end + 1]
        if not after and not is_end:
            self._add_text(before)
            self._buffer = self._buffer[start:]
            return False
        self._add_text(before)
        self._has_reasoned = True
        is_mark = after == "\n" if self._last in (" ", "\t") else self._last not in _QUOTES
        if not is_mark:
            self._add_text(self._buffer[start:end])
        self._buffer, self._skips_blanks = self._buffer[end:], is_mark
        return True

    def _enter(self, region: str, marks: Marks | None) -> None:
        assert marks is not None
        self._region = region
        self._has_reasoned |= region == "reasoning"
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
        if text and not self._region:
            self._last = text[-1]
        if text.strip() and not self._region:
            self._has_answer, self._has_content = self._format.content is None, True
        if text:
            self._pieces.append(Reasoning(text) if self._region == "reasoning" else Content(text))

    def _begin_call(self, opening: "_Opening", match: "regex.Match[str]") -> None:
        syntax = opening.syntax
        assert syntax is not None
        name = match["name"].strip() if syntax.name is None else ""
        self._call, self._written_as = call_parser(syntax, name, self._tools.get(name)), opening
        self._held = []
        self._has_answer = self._format.content is None

    def _advance_call(self, call: CallParser, *, is_end: bool) -> bool:
        text, self._buffer = self._buffer, ""
        parsed = call.feed(text, is_end=is_end)
        if self._held is not None:
            self._held.append(text)
        opening = self._written_as
        assert opening is not None
        if opening.is_slip and any(one.name not in (None, *self._tools) for one in parsed.calls):
            rest = "" if parsed.rest is None else parsed.rest
            parsed = Parsed(rest=rest, is_faulty=True)
        for one in parsed.calls:
            self._add_call(one)
        if parsed.rest is None and not is_end:
            return False
        self._call = None
        if self._held is not None and (parsed.is_faulty or parsed.rest is None):
            self._release("".join(self._held), parsed.rest)
            return True
        self._buffer, self._held = parsed.rest or "", None
        syntax = opening.syntax
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
