"""Explains tools in a system message, in the format `json`, where a chat template ignores them."""

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_EXPLANATION = """\
You can call functions. Their signatures are:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between these tags, once for each call:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>
Results follow between <tool_response> and </tool_response>."""


def explained(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Return the messages with an explanation of the tools, if any, and with calls and results as text."""
    written = [_as_text(message) for message in messages]
    if not tools:
        return written
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    explanation = _EXPLANATION.format(tools=listed)
    if written and written[0]["role"] == "system":
        first = written[0]
        return [{**first, "content": f"{_text(first.get('content'))}\n\n{explanation}"}, *written[1:]]
    return [{"role": "system", "content": explanation}, *written]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [_text(message.get("content"))] if message.get("content") else []
    texts += [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}


def _call(function: Message) -> str:
    called = {"name": function["name"], "arguments": argument_object(function.get("arguments"))}
    return json.dumps(called, ensure_ascii=False)


def argument_object(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Text that is no JSON, such as a call that was cut off, and JSON that is no object, becomes the only
    argument, `arguments`.
    """
    if isinstance(arguments, str):
        arguments = json_or_text(arguments) if arguments.strip() else None
        if isinstance(arguments, str):  # some clients encode twice
            arguments = json_or_text(arguments)
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments is None else {"arguments": arguments}


def json_or_text(text: str) -> Any:
    """Return the value of JSON text; for other text, the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] if isinstance(part, dict) else part for part in content)
    return content or ""
