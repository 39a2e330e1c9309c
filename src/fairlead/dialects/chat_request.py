"""A request of any dialect as the body of an OpenAI chat completion, for servers that speak nothing else."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fairlead.base.errors import InvalidRequest
from fairlead.dialects.dialect import GenerationRequest
from fairlead.dialects.fields import CommonFields, SamplingParameters
from fairlead.language.structured.grammar import JsonAnswer
from fairlead.language.structured.request import AnswerSpec

_SAMPLING = tuple(
    name for name in SamplingParameters.__struct_fields__ if name not in CommonFields.__struct_fields__
)
_ANY_OBJECT = {"type": "object"}

_encode = msgspec.json.Encoder().encode


def chat_request(
    request: GenerationRequest, *, model: str, stream: bool, user: str | None = None
) -> bytes | None:
    """Return the body; None if no field of a chat has a part of the request. Raises `InvalidRequest`.

    `model` is the name in the request, and `user` the client's own user.
    """
    spec = request.answer or AnswerSpec()
    has_others = request.logprobs is not None or request.prompt_logprobs is not None
    begins_anew = request.add_generation_prompt and not (request.continuation or request.continues_last)
    if (
        request.messages is None
        or has_others
        or not begins_anew
        or not isinstance(spec.answer, JsonAnswer | None)
    ):
        return None
    variables = dict(request.template_variables or {})
    members = {
        "model": model,
        "messages": _messages(request.messages),
        **_tools(request.tools or [], spec),
        "response_format": _response_format(spec.answer),
        **{name: getattr(request.sampling, name) for name in _SAMPLING},
        "max_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
        "n": request.n if request.n > 1 else None,
        "stream": stream or None,
        "stream_options": {"include_usage": True} if stream else None,
        "user": user,
        "reasoning_effort": variables.pop("reasoning_effort", None),
        "chat_template_kwargs": variables or None,
        "thinking_token_budget": request.reasoning_tokens,
    }
    try:
        return _encode({name: value for name, value in members.items() if value is not None})
    except RecursionError as error:
        raise InvalidRequest("the request is nested too deeply to be translated") from error


def _messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's clients write them. Calls without ids get some, and so do their results."""
    written = []
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [_call(call, f"call_{number}_{at}") for at, call in enumerate(calls)]
            unanswered = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}  # noqa: PLW2901
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or (unanswered[0] if unanswered else f"call_{number}")
            unanswered = [one for one in unanswered if one != call_id]
            message = {**message, "tool_call_id": call_id}  # noqa: PLW2901
        written.append(message)
    return written


def _call(call: dict[str, Any], otherwise: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    return {
        "id": call.get("id") or otherwise,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools(tools: Sequence[dict[str, Any]], spec: AnswerSpec) -> dict[str, Any]:
    """Return the members about tools: only those that may be called, which every server understands."""
    allowed = {tool.name: tool for tool in spec.tools}
    written = []
    for tool in tools:
        function = tool["function"]
        if (known := allowed.get(function["name"])) is not None:
            strict = {"strict": True} if known.is_strict else {}
            written.append({"type": "function", "function": {**function, **strict}})
    if not written:
        return {}
    choice: Any = "required" if spec.choice == "required" else "auto"
    if spec.named is not None:
        choice = {"type": "function", "function": {"name": spec.named}}
    parallel = {} if spec.parallel else {"parallel_tool_calls": False}
    return {"tools": written, "tool_choice": choice, **parallel}


def _response_format(answer: JsonAnswer | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    if answer.schema == _ANY_OBJECT:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer.schema, "strict": True}}
