"""Which wire format a model has: its own record, or the one that its chat template's rendering fits."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fairlead.base.wire_formats import formats, pattern, wire_format
from fairlead.base.wire_formats.formats import FORMATS, GENERIC, FormatRecord
from fairlead.base.wire_formats.wire_format import Marks, Slip, WireFormat
from fairlead.language.structured.grammar import ReasoningState
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin

Render = Callable[..., str]
"""Renders messages, with the keyword `tools`; raises any error for messages that the template refuses."""
Source = Literal["configuration", "response_template", "chat template", "default"]

_NAME, _KEY, _VALUE = "probe_function", "probe_key", "probe value"
_USER = {"role": "user", "content": "probe question"}
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "probe description", "parameters": _PARAMETERS},
}
# Mistral's templates accept ids of nine letters only.
_CALL = {"id": "probecall", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}


@dataclass(frozen=True)
class DetectedFormat:
    """A model's wire format.

    wire_format: how it writes its answers.
    source: how that was found.
    explains_tools: whether a system message explains tools, because the template ignores them, or writes
        calls in an unknown format.
    shown: the format in which a template writes calls that ignores tools.
    fault: why the model's own `response_template` is not used.
    """

    wire_format: WireFormat
    source: Source
    explains_tools: bool = False
    shown: str = ""
    fault: str = ""


def detect(
    render: Render,
    literals: Collection[str],
    *,
    record: Any = None,
    configured: str | Mapping[str, Any] | None = None,
) -> DetectedFormat:
    """Return a model's wire format. Raises `ValueError` for a faulty configuration.

    render: renders a conversation with the chat template.
    literals: the texts in the template.
    record: the model's own `response_template`.
    configured: the name of a known format, or a record, which has precedence; None: neither.
    """
    if configured is not None:
        return _declared(formats.configured(configured), "configuration", render)
    fault = ""
    if record is not None:
        try:
            return _declared(wire_format.read("response_template", record), "response_template", render)
        except ValueError as error:
            fault = str(error)
    call = _rendered_call(render)
    shown = next((one for one in FORMATS if call and _shows(call, one) and _reads_back(call, one)), None)
    if shown is None:
        return DetectedFormat(_of(GENERIC, literals), "default", explains_tools=True, fault=fault)
    if not _ignores_tools(render):
        return DetectedFormat(_of(shown, literals), "chat template", fault=fault)
    # The model learns the format from the explanation, which is the generic one. It may remember its own.
    syntax = shown.wire_format.calls
    assert syntax is not None
    generic = _of(GENERIC, literals)
    explained = replace(generic, slips=(*generic.slips, Slip(syntax)))
    return DetectedFormat(explained, "default", explains_tools=True, shown=shown.name, fault=fault)


def reasoning_state(marks: Marks | None, prompt_end: str) -> ReasoningState:
    """Return the state of the reasoning at the end of a prompt; some tens of characters suffice."""
    if marks is None:
        return "closed"
    end = prompt_end.rstrip()
    if end.endswith(_last_text(marks.close)):
        return "closed"
    return "opened" if end.endswith(_last_text(marks.open).rstrip()) else "not opened"


def _declared(found: WireFormat, source: Source, render: Render) -> DetectedFormat:
    """Return a format that was not probed. Only calls of the format `json` can be explained."""
    explainable = found.calls == formats.configured(GENERIC.name).calls
    return DetectedFormat(found, source, explainable and _ignores_tools(render))


def _ignores_tools(render: Render) -> bool:
    return _NAME not in _rendered(render, [_USER], tools=[_TOOL])


def _of(candidate: FormatRecord, literals: Collection[str]) -> WireFormat:
    """Return the format, without reasoning if the template never writes its mark."""
    found = candidate.wire_format
    if found.reasoning is None:
        return found
    mark = _last_text(found.reasoning.close).strip()
    return found if any(mark in text for text in literals) else replace(found, reasoning=None)


def _shows(call: str, candidate: FormatRecord) -> bool:
    at = 0
    for text in candidate.shows:
        wanted = text.replace("NAME", _NAME).replace("KEY", _KEY)
        at = call.find(wanted, at)
        if at < 0:
            return False
        at += len(wanted)
    return True


def _reads_back(call: str, candidate: FormatRecord) -> bool:
    """Return whether a format's parser reads a rendered call; other formats may have the texts of `shows`."""
    parser = AnswerParser(replace(candidate.wire_format, slips=()), tools={_NAME: _PARAMETERS})
    pieces = [*parser.push(call), *parser.finish()]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    return names == [_NAME] and _VALUE in arguments


def _rendered_call(render: Render) -> str:
    """Return how the template writes a call; empty if it does not, or refuses calls."""
    before = _rendered(render, [_USER], tools=[_TOOL])
    message = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    text = _rendered(render, [_USER, message], tools=[_TOOL])
    if _VALUE not in text:
        return ""
    start = _shared(before, text)
    # Some templates write the tools at the end, after the call.
    end = _shared(before[start:][::-1], text[start:][::-1])
    return text[start : len(text) - end]


def _shared(one: str, other: str) -> int:
    """Return the length of the beginning that two texts share."""
    differing = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(other)))


def _rendered(render: Render, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]]) -> str:
    try:
        return render(messages, tools=tools, add_generation_prompt=False)
    except Exception:  # noqa: BLE001  a template that refuses these messages has no call to show
        return ""


def _last_text(elements: pattern.Elements) -> str:
    """Return the last text that a mark has."""
    texts = [one.text for one in elements if isinstance(one, pattern.Literal)]
    return texts[-1] if texts else "\0"
