"""The lines of Ollama's streams, each checked against its type."""

import json
from typing import Any

import msgspec

from fairlead.dialects.ollama.shapes import OllamaChatAnswer, OllamaText
from server.routes.conftest import Reply

CHAT, GENERATE = "/api/chat", "/api/generate"
COUNTS = {"prompt_eval_count", "eval_count"}
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
ENDING = {"done_reason", *COUNTS, *DURATIONS}


def checked(text: bytes, kind: type) -> dict[str, Any]:
    """Return an object that has exactly the members of its type, those of its end only with `done`."""
    read: Any = msgspec.json.decode(text, type=kind, strict=True)
    document: dict[str, Any] = json.loads(text)
    assert document == without_nulls(json.loads(msgspec.json.encode(read)))
    assert document["created_at"].endswith("Z")
    assert (ENDING & document.keys()) == (ENDING if document["done"] else set())
    if document["done"]:
        assert all(document[name] >= 0 for name in ENDING - {"done_reason"})
        assert document["total_duration"] >= document["eval_duration"]
    return document


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def lines_of(reply: Reply, kind: type | None = None) -> list[dict[str, Any]]:
    """Return the lines of a complete stream; only the last one is done."""
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson"), reply.body
    assert reply.is_complete
    *lines, rest = reply.body.split(b"\n")
    assert rest == b""
    kind = kind or (OllamaChatAnswer if b'"message"' in lines[0] else OllamaText)
    documents = [checked(line, kind) for line in lines]
    assert [document["done"] for document in documents] == [False] * (len(lines) - 1) + [True]
    return documents


def merged(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of the lines of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        piece = line["message"]
        assert piece["role"] == "assistant"
        for name in ("content", "thinking", "tool_calls"):
            if name in piece:
                message[name] = message[name] + piece[name] if name in message else piece[name]
    return message
