"""Explains tools in a system message, in the format `json`, where a chat template ignores them."""

import json
from collections.abc import Sequence
from contextlib import suppress
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
    called = {"name": function["name"], "arguments": _object(function.get("arguments"))}
    return json.dumps(called, ensure_ascii=False)


def _object(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as the object that the explanation asks for.

    It is empty for none. What is no object, such as a text that was cut off, is its only member, `arguments`.
    """
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments in (None, "") else {"arguments": arguments}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] if isinstance(part, dict) else part for part in content)
    return content or ""
