"""Finds what a chat template cannot take, by rendering short conversations when it is loaded.

Each probe is a conversation and a limit. If the template does not show the conversation's texts, other values
of the limit are tried, and the first with which it shows them is kept. Later probes are written with the
limits that are known already. A template that fails for another reason has no limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fairlead.language.text.template_limits import Message, TemplateLimits, Tools

Render = Callable[[Sequence[Message], Tools | None], str]
"""Renders messages and tools as they are; returns an empty text if the template refuses them."""

_BLANKS = (" ", "…")
_ONE, _TWO, _THREE, _FOUR = (f"fairlead probe {number}" for number in ("one", "two", "three", "four"))
_NAME: Final = "probe_function"


def _message(role: str, content: Any, **members: Any) -> Message:
    return {"role": role, "content": content, **members}


def _calling(*texts: str, ids: Sequence[str] = ("probecall", "probenext"), **members: Any) -> Message:
    """Return a message with a call for each of these texts, its argument. Nine letters fit any template."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": {"a": text}}}
        for call_id, text in zip(ids, texts, strict=False)
    ]
    return {"role": "assistant", "tool_calls": calls, **members}


def _result(content: Any, call_id: str | None = "probecall") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _tool(**members: Any) -> list[Message]:
    return [{"type": "function", "function": {"name": _NAME, **members}}]


_USER, _ANSWER = _message("user", "a"), _message("assistant", "b")
_PROPERTY: Final = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_DESCRIBED: Final = {
    **_PROPERTY,
    "properties": {"a": {"type": "string", "description": "c"}},
}
_NULLABLE: Final = {
    **_PROPERTY,
    "properties": {"a": {"type": ["string", "null"], "description": "c"}},
}
_OBJECT: Final = {**_PROPERTY, "properties": {"a": {"type": "object", "description": "c"}}}
_TOOL = _tool(description="b", parameters=_DESCRIBED)
_FOREIGN_ID: Final = "call_0123456789abcdefABCDEF"


@dataclass(frozen=True, slots=True)
class _Probe:
    """A conversation that shows whether a limit holds.

    Attributes:
        limit: The name of the limit.
        values: Its values, tried in this order if the template does not show the conversation without it.
        messages: The conversation.
        texts: What the template must show of it.
        tools: The tools of the conversation.
    """

    limit: str
    values: Sequence[Any]
    messages: Sequence[Message]
    texts: Sequence[str]
    tools: Tools | None = None


# In this order: a later conversation is written with the limits that are known already.
_OF_MESSAGES = (
    _Probe("system", ["never"], [_message("system", _ONE), _message("user", _TWO)], [_ONE, _TWO]),
    _Probe(
        "merges_neighbours",
        [True],
        [
            *(_message("user", _ONE), _message("user", _TWO)),
            *(_message("assistant", _THREE), _message("assistant", _FOUR), _USER),
        ],
        [_ONE, _TWO, _THREE, _FOUR],
    ),
    _Probe(
        "system",
        ["first"],
        [_message("system", _ONE), _USER, _ANSWER, _message("system", _TWO), _message("user", _THREE)],
        [_ONE, _TWO, _THREE],
    ),
    _Probe(
        "system",
        ["first"],
        [
            *(_message("system", _ONE), _message("system", _TWO), _USER),
            *(_message("system", _THREE), _message("user", _FOUR)),
        ],
        [_ONE, _TWO, _THREE, _FOUR],
    ),
    _Probe("user", ["always"], [_message("system", _ONE)], [_ONE]),
    _Probe("user", ["with_tools"], [_message("system", _ONE)], [_ONE], _TOOL),
    _Probe("user", ["first"], [_message("assistant", _ONE), _message("user", _TWO)], [_ONE, _TWO]),
    _Probe(
        "blank_answer",
        _BLANKS,
        [_message("user", _ONE), _message("assistant", ""), _message("user", _TWO)],
        [_ONE, _TWO],
    ),
)
_OF_CALLS = (
    _Probe(
        "short_ids",
        [True],
        [_USER, _calling(_ONE, ids=[_FOREIGN_ID]), _result(_TWO, _FOREIGN_ID)],
        [_ONE, _TWO],
        _TOOL,
    ),
    _Probe(
        "one_call",
        [True],
        [_USER, _calling(_ONE, _TWO), _result(_THREE), _result(_FOUR, "probenext")],
        [_ONE, _TWO, _THREE, _FOUR],
        _TOOL,
    ),
    _Probe(
        "closes_turns",
        [True],
        [_USER, _calling(_ONE), _result(_TWO), _message("user", _THREE)],
        [_ONE, _TWO, _THREE],
        _TOOL,
    ),
    _Probe(
        "results",
        ["after_calls"],
        [
            *(_USER, _result(_ONE), _result(_TWO)),
            *(_message("assistant", _THREE), _result(_FOUR), _ANSWER, _USER),
        ],
        [_ONE, _TWO, _THREE, _FOUR],
        _TOOL,
    ),
    _Probe(
        "results",
        ["never"],
        [_USER, _calling("a"), _result(_ONE), _message("user", _TWO)],
        [_ONE, _TWO],
        _TOOL,
    ),
    _Probe("text_apart", [True], [_USER, _calling(_ONE, content="c"), _result(_TWO)], [_ONE, _TWO], _TOOL),
    _Probe(
        "joins_reasoning",
        [True],
        [_USER, _calling(_ONE, content="c", reasoning="d"), _result(_TWO)],
        [_ONE, _TWO],
        _TOOL,
    ),
)
_MEMBERS = [frozenset(names.split()) for names in ("description", "parameters", "description parameters")]
_OF_TOOLS = (
    _Probe("tool_members", _MEMBERS, [_USER], [_NAME], _tool()),
    _Probe(
        "tool_members",
        [frozenset({"properties"}), *(members | {"properties"} for members in _MEMBERS)],
        [_USER],
        [_NAME],
        _tool(description="b", parameters=_PROPERTY),
    ),
    _Probe(
        "tool_members",
        [frozenset({"types"})],
        [_USER],
        [_NAME],
        _tool(description="b", parameters=_NULLABLE),
    ),
    _Probe(
        "tool_members",
        [frozenset({"objects"})],
        [_USER],
        [_NAME],
        _tool(description="b", parameters=_OBJECT),
    ),
)


def probe(render: Render) -> TemplateLimits:
    """Return what a template cannot take."""
    limits = _refine(render, TemplateLimits(), _Probe("tool_list", [True], [_message("user", _ONE)], [_ONE]))
    limits = _probe_content(render, limits, "user", [])
    limits = _probe_content(render, limits, "assistant", [_USER])
    limits = _probe_content(render, limits, "system", [])
    for one in _OF_MESSAGES:
        limits = _refine(render, limits, one)
    limits = _probe_calls(render, limits)
    limits = _probe_content(render, limits, "tool", [_USER, _calling("a")])
    for one in (*_OF_CALLS, *_OF_TOOLS):
        limits = _refine(render, limits, one)
    return limits


def _refine(render: Render, limits: TemplateLimits, one: _Probe) -> TemplateLimits:
    """Return the limits with which the template shows a conversation, or the given ones if there are none."""
    known = getattr(limits, one.limit)
    values = [known | value if isinstance(known, frozenset) else value for value in one.values]
    for candidate in (limits, *(replace(limits, **{one.limit: value}) for value in values)):
        text = render(*candidate.rewrite(one.messages, one.tools))
        if all(wanted in text for wanted in one.texts):
            return candidate
    return limits


def _probe_content(
    render: Render, limits: TemplateLimits, role: str, before: Sequence[Message]
) -> TemplateLimits:
    """Probe whether a template takes the content of a role as parts, as text, or as both.

    `before`: the messages before one of this role. A system message has a user message after it.
    """

    def shows(content: Any, texts: Sequence[str]) -> bool:
        message = _result(content) if role == "tool" else _message(role, content)
        after = [_USER] if role == "system" else []
        text = render(*limits.rewrite([*before, message, *after], _TOOL if role == "tool" else None))
        is_notation = not isinstance(content, str) and any(
            f"{one!r}" in text or f'"{one}"' in text for one in texts
        )
        return all(one in text for one in texts) and not is_notation

    parts = [{"type": "text", "text": text} for text in (_ONE, _TWO)]
    if not shows(parts, [_ONE, _TWO]):
        return replace(limits, parts_as_text=limits.parts_as_text | {role})
    if not shows(_ONE, [_ONE]):
        return replace(limits, text_as_parts=limits.text_as_parts | {role})
    return limits


def _probe_calls(render: Render, limits: TemplateLimits) -> TemplateLimits:
    """Probe the arguments of calls and the content of messages that have nothing else.

    Null is used only if the text is shorter with it: some templates then leave out an empty turn, and others
    write the word None.
    """
    messages = [_USER, _calling(_ONE), _result("a")]
    shown: list[tuple[int, TemplateLimits]] = []
    for encodes in (False, True):
        for null in (False, True):
            candidate = replace(limits, encodes_arguments=encodes, null_content=null)
            text = render(*candidate.rewrite(messages, _TOOL))
            if _ONE in text:
                shown.append((len(text), candidate))
        if shown:
            break
    return min(shown, key=lambda one: one[0], default=(0, limits))[1]
