"""Reads the events of Anthropic's streams as its clients do, and checks the rules that those rely on.

Where Anthropic's package is installed, its models read every event, too, strictly.
"""

import json
from functools import cache
from typing import Any

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
# The types of deltas, and the members of their blocks that they extend.
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
MESSAGE = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "tool_use": {"type": "tool_use", "input": {}},
}


@cache
def _models() -> dict[str, Any]:
    try:  # here, because it takes seconds, and each worker of a test run imports this file
        from anthropic.types import RawMessageStreamEvent
        from anthropic.types.shared import ErrorResponse
        from pydantic import TypeAdapter
    except ImportError:
        return {}
    return {"error": TypeAdapter(ErrorResponse), "others": TypeAdapter(RawMessageStreamEvent)}


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; each has a name, which is its type."""
    *blocks, rest = body.split(b"\n\n")
    assert rest == b""
    events = []
    for block in blocks:
        name, data = block.decode().split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if (models := _models()) and event["type"] != "ping":
            kind = "error" if event["type"] == "error" else "others"
            models[kind].validate_json(data.removeprefix("data: "), strict=True)
        events.append(event)
    return events


def read(events: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the message of complete events, and the types of its blocks' deltas without repetitions."""
    first, *inner, delta, last = [event for event in events if event["type"] != "ping"]
    assert set(first) == {"type", "message"}
    assert first["type"] == "message_start"
    message = first["message"]
    assert set(message) == MESSAGE
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    assert message["usage"]["output_tokens"] == 0
    kinds: list[str] = []
    is_open, arguments = False, ""
    for event in inner:
        block = message["content"][-1] if message["content"] else {}
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert set(event) == {"type", "index", "content_block"}
                assert event["index"] == len(message["content"])
                begun = event["content_block"]
                assert begun.items() >= BLOCKS[begun["type"]].items()
                assert set(begun) - set(BLOCKS[begun["type"]]) in (set(), {"id", "name"})
                message["content"].append(begun)
                is_open, arguments = True, ""
                kinds.append(begun["type"])
            case "content_block_delta":
                assert is_open
                assert set(event) == {"type", "index", "delta"}
                assert event["index"] == len(message["content"]) - 1
                kind, member = DELTAS[event["delta"]["type"]]
                assert set(event["delta"]) == {"type", member}
                assert kind == block["type"]
                assert event["delta"][member] != ""
                assert not block.get("signature")  # it comes last
                if kind == "tool_use":
                    arguments += event["delta"][member]
                else:
                    block[member] += event["delta"][member]
                if kinds[-1] != event["delta"]["type"]:
                    kinds.append(event["delta"]["type"])
            case "content_block_stop":
                assert is_open
                assert set(event) == {"type", "index"}
                assert event["index"] == len(message["content"]) - 1
                assert block["type"] != "thinking" or block["signature"]
                if block["type"] == "tool_use" and arguments:
                    block["input"] = parsed(arguments)
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    assert set(delta) == {"type", "delta", "usage"}
    assert delta["type"] == "message_delta"
    assert set(delta["delta"]) == {"stop_reason", "stop_sequence"}
    assert last == {"type": "message_stop"}
    assert delta["usage"].items() >= {**message["usage"], "output_tokens": 0}.items() - {("output_tokens", 0)}
    return {**message, **delta["delta"], "usage": delta["usage"]}, kinds


def parsed(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; empty if they are cut, as in a whole message."""
    try:
        read: dict[str, Any] = json.loads(arguments)
    except ValueError:
        return {}
    return read


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what is new in every answer."""
    content = [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in message["content"]
    ]
    return {**message, "id": None, "content": content}
