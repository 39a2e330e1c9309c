"""One client for each dialect: the SDK, and the same requests as plain bodies, which can be left."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.real_server import TIMEOUT_S
from peers.backend import ARGUMENTS, MODEL, TOOL

ASK = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [ARGUMENTS["city"]]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": TOOL, "description": "The weather of a city.", "parameters": SCHEMA}
TOKENS = 16
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Dialect:
    """How a client asks.

    `path`: the route of its chats.
    `chat`, `stream`: ask the server at a URL with a key by the SDK; return the text.
    `call`: ask it with a tool; return the call.
    """

    path: str
    chat: Callable[[str, str], str]
    stream: Callable[[str, str], str]
    call: Callable[[str, str], Call]

    def body(self, *, stream: bool = True, tokens: int = TOKENS, content: str = "hello") -> dict[str, Any]:
        """Return a request whose answer has up to `tokens` tokens; engines ignore the end of the text."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": stream}
        if self.path == "/api/chat":
            return body | {"options": {"num_predict": tokens}}
        return body | {"max_tokens": tokens, **({} if self.path == "/v1/messages" else {"ignore_eos": True})}


# OpenAI --------------------------------------------------------------------------------------------------


@contextmanager
def _openai(url: str, key: str) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S) as client:
        yield client.chat.completions


def _openai_chat(url: str, key: str) -> str:
    with _openai(url, key) as chats:
        answer = chats.create(model=MODEL, messages=ASK, max_tokens=TOKENS)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens > 0
    return answer.choices[0].message.content


def _openai_stream(url: str, key: str) -> str:
    with _openai(url, key) as chats:
        answer = chats.create(model=MODEL, messages=ASK, max_tokens=TOKENS, stream=True)
        chunks = [chunk for chunk in answer if chunk.choices]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert reasons in (["stop"], ["length"])
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def _openai_call(url: str, key: str) -> Call:
    tools = [{"type": "function", "function": FUNCTION}]
    asked = {"model": MODEL, "messages": ASK, "tools": tools, "max_tokens": 200}
    with _openai(url, key) as chats:
        answer = chats.create(**asked, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls[:1]
    return call.function.name, json.loads(call.function.arguments)


# Anthropic -----------------------------------------------------------------------------------------------


@contextmanager
def _anthropic(url: str, key: str) -> Iterator[Any]:
    from anthropic import Anthropic

    with Anthropic(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_S) as client:
        yield client.messages


def _anthropic_chat(url: str, key: str) -> str:
    with _anthropic(url, key) as messages:
        answer = messages.create(model=MODEL, messages=ASK, max_tokens=TOKENS)
    assert answer.stop_reason == "end_turn"
    return answer.content[0].text


def _anthropic_stream(url: str, key: str) -> str:
    asked = {"model": MODEL, "messages": ASK, "max_tokens": TOKENS}
    with _anthropic(url, key) as messages, messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"
    return text


def _anthropic_call(url: str, key: str) -> Call:
    tools = [{"name": TOOL, "input_schema": SCHEMA}]
    with _anthropic(url, key) as messages:
        answer = messages.create(model=MODEL, messages=ASK, tools=tools, max_tokens=TOKENS)
    assert answer.stop_reason == "tool_use"
    return answer.content[-1].name, answer.content[-1].input


# Ollama --------------------------------------------------------------------------------------------------


@contextmanager
def _ollama(url: str, key: str) -> Iterator[Any]:
    from ollama import Client

    with Client(host=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S) as client:
        yield client


def _ollama_chat(url: str, key: str) -> str:
    with _ollama(url, key) as client:
        answer = client.chat(model=MODEL, messages=ASK)
    assert answer.done
    return answer.message.content


def _ollama_stream(url: str, key: str) -> str:
    with _ollama(url, key) as client:
        *lines, last = client.chat(model=MODEL, messages=ASK, stream=True)
    assert (last.done, last.done_reason) == (True, "stop")
    return "".join(line.message.content for line in lines)


def _ollama_call(url: str, key: str) -> Call:
    tools = [{"type": "function", "function": FUNCTION}]
    with _ollama(url, key) as client:
        (call,) = client.chat(model=MODEL, messages=ASK, tools=tools).message.tool_calls
    return call.function.name, dict(call.function.arguments)


OPENAI = Dialect("/v1/chat/completions", _openai_chat, _openai_stream, _openai_call)
DIALECTS = {
    "anthropic": Dialect("/v1/messages", _anthropic_chat, _anthropic_stream, _anthropic_call),
    "ollama": Dialect("/api/chat", _ollama_chat, _ollama_stream, _ollama_call),
}
