"""OpenAI's messages and tools in request bodies, and the same as chat templates read them."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead.dialects.body import invalid_field


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message: `text`, or a `refusal` of the assistant. The error for other types names them."""

    type: str
    text: str | None = None
    refusal: str | None = None


_ROLES = {"developer": "system", "function": "tool"}

Content = str | Annotated[list[ContentPart], Meta(max_length=4096)]


class FunctionCall(msgspec.Struct, frozen=True):
    """An assistant's call of a function; `arguments` is JSON in a string.

    Text that is no JSON object, such as a call that was cut off, is the only argument in the prompt.
    """

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call in an assistant's message. Without an `id`, results are those of the calls in their order."""

    id: str | None = None
    function: FunctionCall
    type: str = "function"


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    name: str | None = None


class SystemMessage(_Message, frozen=True, tag="system"):
    """Instructions for the model."""

    content: Content


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    """OpenAI's newer name for a system message."""

    content: Content


class UserMessage(_Message, frozen=True, tag="user"):
    """A message of the user."""

    content: Content


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    """An earlier message of the model: text, calls or both. Its reasoning may have any of three names.

    content: The text.
    refusal: A text in which the model refuses.
    tool_calls: The calls.
    function_call: OpenAI's older form of a call.
    reasoning_content: The reasoning before the text.
    reasoning: The same.
    thinking: The same.
    """

    content: Content | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=1024)] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class ToolMessage(_Message, frozen=True, tag="tool"):
    """The result of a called tool."""

    content: Content | None = None
    tool_call_id: str | None = None


class FunctionMessage(_Message, frozen=True, tag="function"):
    """OpenAI's older form of a result, which names the function instead of the call."""

    content: Content | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=16_384)]


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call.

    name: The name that calls have.
    description: What it does, for the model.
    parameters: The JSON schema of its arguments; None: any object.
    strict: Its arguments follow the schema exactly, or the request is refused.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may use."""

    type: str
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=2048)]


# For chat templates --------------------------------------------------------------------------------


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as chat templates read them."""
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise invalid_field(f"tools[{index}].type", "only 'function' is served")
    return [{"type": tool.type, "function": _given(tool.function)} for tool in tools] if tools else None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them, with their names of OpenAI's other roles."""
    return [_template_message(message, index) for index, message in enumerate(messages)]


def template_variables(effort: str | None, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the variables of the chat template, with the effort under the names that templates read."""
    if effort is None:
        return given
    named = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    return named | (given or {})


def _template_message(message: Message, index: int) -> dict[str, Any]:
    role = str(message.__struct_config__.tag)
    # Few templates support OpenAI's other names, and some refuse unknown roles.
    written = {"role": _ROLES.get(role, role), **_given(message)}
    if isinstance(message.content, list):
        written["content"] = [_template_part(part, index, at) for at, part in enumerate(message.content)]
    return _template_answer(message, written) if isinstance(message, AssistantMessage) else written


def _template_answer(message: AssistantMessage, written: dict[str, Any]) -> dict[str, Any]:
    refusal, only_call = written.pop("refusal", None), written.pop("function_call", None)
    written.pop("tool_calls", None)
    if refusal is not None and not message.content:
        written["content"] = refusal
    reasoning = message.reasoning_content or message.reasoning or message.thinking
    if reasoning is not None:  # other servers read one of the two
        written["reasoning_content"] = written["reasoning"] = reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {**_given(call), "function": _given(call.function)} for call in message.tool_calls
        ]
    elif only_call is not None:
        written["tool_calls"] = [{"type": "function", "function": _given(only_call)}]
    return written


def _template_part(part: ContentPart, index: int, at: int) -> dict[str, str]:
    if part.type not in ("text", "refusal"):
        reason = f"parts of type {part.type[:50]!r} are not served, only 'text'"
        raise invalid_field(f"messages[{index}].content[{at}].type", reason)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid_field(f"messages[{index}].content[{at}].{part.type}", "is missing")
    return {"type": "text", "text": text}


def _given(fields: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are set. Not recursive: JSON schemas may be nested as deep as Python goes."""
    return {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
