"""Ollama's chats: `POST /api/chat`."""

from collections import deque
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fairlead.base.config import Limits
from fairlead.base.job import Delta
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, GenerationRequest, StreamingDialect
from fairlead.dialects.ollama import shapes
from fairlead.dialects.ollama.fields import (
    DOCUMENTED_CHAT,
    OllamaEnvelope,
    OllamaRequest,
    OllamaTools,
    check_served,
    parser_of,
    tools_of,
    unread_options,
)
from fairlead.dialects.ollama.reader import LineReader
from fairlead.dialects.ollama.writer import LINES, EmptyParts, OllamaAnswer, OllamaErrors
from fairlead.dialects.openai.messages import template_tools


class OllamaFunctionCall(msgspec.Struct, frozen=True):
    """An assistant's call of a function; `arguments` is an object."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct, frozen=True):
    """One call in an assistant's message."""

    function: OllamaFunctionCall
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message.

    role: Whose it is; that of a `tool` is its result.
    content: Its text.
    thinking: The reasoning before the text.
    images: Not served.
    tool_calls: The calls of an assistant's message.
    tool_name: The tool of a result; None: that of the first call without a result.
    tool_call_id: The call of a result; None: the first call of the tool without one.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=1024)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """`POST /api/chat`. Without messages, the model is loaded, or with a `keep_alive` of 0 unloaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=16_384)] | None = None
    tools: OllamaTools | None = None


_parse = parser_of(OllamaChatRequest, {})


class OllamaChatDialect(OllamaErrors, StreamingDialect):
    """Chats."""

    name = "ollama"
    path = "/api/chat"
    body_type = OllamaChatRequest
    answer_type = shapes.OllamaChatAnswer
    refused_fields = DOCUMENTED_CHAT
    stream_type = LINES
    job_prefix = "chat"
    read_envelope = BodyParser(OllamaEnvelope)
    reader = LineReader()
    waiting_events = EmptyParts(chat=True)

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        check_served(request, {})
        options, tools = request.given_options, tools_of(request.tools)
        return GenerationRequest(
            messages=_template_messages(request.messages or []),
            tools=template_tools(tools),
            template_variables=request.template_variables,
            is_chat=True,
            answer=request.answer(tools),
            sampling=options.sampling(),
            max_tokens=options.max_tokens,
            stop=options.stop_strings,
            logprobs=request.listed_logprobs,
        )

    def unread(self, body: bytes) -> tuple[str, ...]:
        """Return the names of the fields and options of a decoded body that nothing reads."""
        return super().unread(body) + unread_options(body)

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        return OllamaAnswer(context, chat=True).whole(deltas)

    def stream_writer(self, context: AnswerContext) -> OllamaAnswer:
        """Return the writer of a streamed response."""
        return OllamaAnswer(context, chat=True)


def _template_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them. Calls and results without ids get ids that fit.

    Mistral's chat templates refuse ids which do not have nine letters or digits.
    """
    unanswered: deque[tuple[str, str]] = deque()  # the names and ids of calls
    count = 0
    written = []
    for index, message in enumerate(messages):
        if message.images:
            raise invalid_field(f"messages[{index}].images", "is not served")
        fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:  # templates read one of the two
            fields["reasoning_content"] = fields["reasoning"] = message.thinking
        calls = []
        for call in message.tool_calls or ():
            call_id, count = call.id or f"{count:09d}", count + 1
            unanswered.append((call.function.name, call_id))
            function = {"name": call.function.name, "arguments": call.function.arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        if calls:
            fields["tool_calls"] = calls
        if message.role == "tool":
            fields |= _result_of(message, unanswered)
        written.append(fields)
    return written


def _result_of(message: OllamaMessage, unanswered: deque[tuple[str, str]]) -> dict[str, str]:
    """Return the name and id of a result's call: the named one, else the first without a result."""
    call = next(
        (
            (name, call_id)
            for name, call_id in unanswered
            if message.tool_name in (None, name) and message.tool_call_id in (None, call_id)
        ),
        None,
    )
    if call is not None:
        unanswered.remove(call)
    name, call_id = call or (message.tool_name, message.tool_call_id)
    found = {"name": message.tool_name or name, "tool_call_id": message.tool_call_id or call_id}
    return {member: value for member, value in found.items() if value is not None}
