"""The bodies that `bodies.py` sends: ordinary and hostile ones."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from bodies_parts import CONTEXT

MILLION = 1_000_000
_CHAT = b'"messages":[{"role":"user","content":"hello"}]'
# An output limit that is refused only after all other processing of the request.
_REST = b'"max_tokens":131072'


class Case(NamedTuple):
    """A body and the path it is sent to."""

    path: str
    make: Callable[[], bytes]


def _chat(**fields: bytes) -> bytes:
    members = b"".join(b',"%s":%s' % (name.encode(), value) for name, value in fields.items())
    return b'{"model":"near",' + _REST + b"," + _CHAT + members + b"}"


def chat_of(content: bytes, model: bytes = b"near") -> bytes:
    """Return a chat of one message."""
    message = b'{"role":"user","content":"' + content + b'"}'
    return b'{"model":"%s",%s,"messages":[%s]}' % (model, _REST, message)


def _called(arguments: str) -> bytes:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    return json.dumps({"model": "near", "max_tokens": CONTEXT, "messages": messages}).encode()


def _agent() -> bytes:
    """Return an agent's long conversation: 200 tools, 1,000 messages."""
    properties = {f"property_{n}": {"type": "string", "description": "What it is."} for n in range(3)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "d", "parameters": schema}}
        for n in range(200)
    ]
    call = {
        "type": "function",
        "function": {"name": "tool_1", "arguments": '{"property_1": "a", "n": [1, 2]}'},
    }
    messages: list[dict[str, Any]] = []
    for n in range(500):
        messages.append({"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{n}", **call}]})
        messages.append({"role": "tool", "tool_call_id": f"call_{n}", "content": "The result. " * 3})
    return json.dumps({"model": "near", "max_tokens": CONTEXT, "messages": messages, "tools": tools}).encode()


def _members(count: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % n for n in range(count)) + b"}"


def _list(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def _ids(count: int) -> bytes:
    return b"[" + b",".join(b"%d" % (n % 1500) for n in range(count)) + b"]"


def _floats(count: int) -> bytes:
    return b"[" + b",".join(b"0.%d" % (10**16 + 7919 * n) for n in range(count)) + b"]"


CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

CASES = {
    # ordinary bodies
    "chat of 2 KB": Case(CHAT, lambda: chat_of(b"Hello there. " * 150)),
    "agent": Case(CHAT, _agent),
    "text of the whole context": Case(
        "/tokenize", lambda: b'{"model":"near","prompt":"%s"}' % (b"hello " * 40_000)
    ),
    "ids of the whole context": Case("/detokenize", lambda: b'{"model":"near","tokens":%s}' % _ids(CONTEXT)),
    "relayed image of 12 MB": Case(CHAT, lambda: chat_of(b"A" * 12 * MILLION, b"far")),
    # many values
    "1.3 M keys": Case(CHAT, lambda: _chat(chat_template_kwargs=_members(1_300_000))),
    "[[1]] x 4 M": Case(CHAT, lambda: _chat(chat_template_kwargs=b'{"a":%s}' % _list(b"[1]", 4 * MILLION))),
    "[[1]] x 4 M, ignored": Case(CHAT, lambda: _chat(ignored=_list(b"[1]", 4 * MILLION))),
    "5 M tools": Case(CHAT, lambda: _chat(tools=_list(b"{}", 5 * MILLION))),
    "tools of 5 M {}": Case(
        CHAT,
        lambda: _chat(
            tools=b'[{"type":"function","function":{"name":"f","parameters":{"a":%s}}}]'
            % _list(b"{}", 5 * MILLION)
        ),
    ),
    "arguments of 4 M [1]": Case(CHAT, lambda: _called("[" + ",".join(["[1]"] * 3 * MILLION) + "]")),
    "arguments of 12 MB": Case(CHAT, lambda: _called(json.dumps({"text": "x" * 12 * MILLION}))),
    "500,000 messages": Case(
        CHAT,
        lambda: (
            b'{"model":"near","max_tokens":131072,"messages":%s}'
            % _list(b'{"role":"user","content":""}', 500_000)
        ),
    ),
    "8 M ids": Case(
        COMPLETIONS, lambda: b'{"model":"near","max_tokens":131072,"prompt":%s}' % _ids(3_200_000)
    ),
    "8 M ids, relayed": Case(COMPLETIONS, lambda: b'{"model":"far","prompt":%s}' % _list(b"1", 7 * MILLION)),
    "5 M prompts, relayed": Case(
        COMPLETIONS, lambda: b'{"model":"far","prompt":%s}' % _list(b'""', 5 * MILLION)
    ),
    "8 M ids to text": Case(
        "/detokenize", lambda: b'{"model":"near","tokens":%s}' % _list(b"1", 8 * MILLION)
    ),
    "2 M numbers, relayed": Case(EMBEDDINGS, lambda: b'{"model":"far","input":%s}' % _floats(700_000)),
    # as many values as the limits allow, of the most expensive kinds
    "120,000 keys": Case(CHAT, lambda: _chat(chat_template_kwargs=b'{"a":%s}' % _members(120_000))),
    "120,000 lists in tools": Case(
        CHAT,
        lambda: _chat(
            tools=b'[{"type":"function","function":{"name":"f","parameters":{"a":%s}}}]'
            % _list(b"[]", 120_000)
        ),
    ),
    "30,000 fractions in tools": Case(
        CHAT,
        lambda: _chat(
            tools=b'[{"type":"function","function":{"name":"f","parameters":{"a":%s}}}]' % _floats(30_000)
        ),
    ),
    "4,000 messages": Case(
        CHAT,
        lambda: (
            b'{"model":"near","max_tokens":131072,"messages":%s}'
            % _list(b'{"role":"user","content":"a"}', 4_000)
        ),
    ),
    "1 M ids": Case(COMPLETIONS, lambda: b'{"model":"near","max_tokens":131072,"prompt":%s}' % _ids(MILLION)),
    "1 M ids, relayed": Case(COMPLETIONS, lambda: b'{"model":"far","prompt":%s}' % _ids(MILLION)),
    # long strings
    "words of 16 MB": Case(CHAT, lambda: chat_of(b"Hello there. " * 1_200_000)),
    "blanks of 16 MB": Case(CHAT, lambda: chat_of(b" " * 16 * MILLION)),
    "emoji of 16 MB": Case(CHAT, lambda: chat_of("😀".encode() * 4 * MILLION)),
    "line breaks of 16 MB": Case(CHAT, lambda: chat_of(b"\\n" * 8 * MILLION)),
    "escapes of 16 MB": Case(CHAT, lambda: chat_of(b"\\u00e9" * 2_600_000)),
    "role of 16 MB": Case(
        CHAT, lambda: b'{"messages":[{"content":"","role":"%s"}]}' % (b" - at " * 2_600_000)
    ),
    "user of 16 MB": Case(CHAT, lambda: _chat(user=b'"%s"' % (b"u" * 15 * MILLION))),
    "model of 16 MB": Case(CHAT, lambda: chat_of(b"a", b"m" * 15 * MILLION)),
    "words of 16 MB, counted": Case(
        "/tokenize", lambda: b'{"model":"near","prompt":"%s"}' % (b"hello " * 2_600_000)
    ),
    "words of 16 MB, relayed": Case(CHAT, lambda: chat_of(b"Hello there. " * 1_200_000, b"far")),
    # not valid requests
    "broken at its end": Case(CHAT, lambda: chat_of(b"Hello there. " * 1_200_000)[:-1]),
    "[ x 16 M": Case(CHAT, lambda: b"[" * 16 * MILLION),
    "a number of 16 MB": Case(CHAT, lambda: _chat(seed=b"1" * 15 * MILLION)),
    "not UTF-8 at its end": Case(CHAT, lambda: chat_of(b"x" * 15 * MILLION + b"\xff")),
    "paths of 64 KB": Case(
        CHAT, lambda: b'{"a":NaN,"%s":[%s]}' % (b"k" * 30_000, b",".join([b"1"] * 17_000))
    ),
}
