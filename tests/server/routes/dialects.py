"""Every dialect as the conformance suite sees it: how requests are built, and answers and errors read.

A rule asks in neutral words (`Ask`), and gets a neutral answer (`Answer`) or failure (`Failure`). To test a
new dialect, give it a row in `DIALECTS`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.routes import message_events, ollama_lines, typed_responses
from server.routes.conftest import Reply
from server.routes.written_answers import merged, tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@dataclass
class Answer:
    """What a client reads. `end`: "stop", "length" or "calls"; some dialects do not tell the last apart.

    - `calls`: the name and the arguments of each call.
    - `ids`: the calls' ids, where the dialect has them.
    - `cached`: tokens of the prompt that were cached; None where the dialect has no such count.
    - `logprobs`: the log-probability of each token.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    end: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    cached: int | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Failure:
    """An error as a client reads it. `code` is empty, and `kind` too, where the dialect has none."""

    message: str
    code: str = ""
    kind: str = ""
    param: str | None = None


Body = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Dialect:
    """A dialect of the API.

    - `good`: the members of the shortest valid request, without the model.
    - `prompt`: sets the text of the prompt in a body.
    - `prompt_field`: the field that is named if the prompt is too long.
    - `whole`, `streamed`: read an answer; `streamed` None: the dialect has no streams.
    - `last_error`: reads the error at the end of a cut stream.
    - `failure`: reads an error response.
    - `names`: neutral names of sampling parameters, and the paths of the dialect's.
    - `formed`, `with_tools`: the members that ask for text of a schema, and for calls.
    - `scored`: the members that ask for log-probabilities.
    - `uncut`: the members by which too long a prompt is refused, where it is cut otherwise; None: it is
      always cut.
    - `options`: what else the dialect has: "cached", "ids", "reasoning", "system", "calls_end".
    """

    name: str
    path: str
    good: Body
    prompt: Callable[[str], Body]
    prompt_field: str
    failure: Callable[[Any], Failure]
    whole: Callable[[Any], Answer] = lambda _document: Answer()
    streamed: Callable[[Reply], Answer] | None = None
    last_error: Callable[[Reply], Failure] = lambda _reply: Failure("")
    stream_type: str = "text/event-stream"
    names: dict[str, str] = field(default_factory=dict)
    formed: Body | None = None
    with_tools: Body | None = None
    scored: Body | None = None
    uncut: Body | None = field(default_factory=dict)
    options: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def is_ollama(self) -> bool:
        return self.path.startswith("/api/")

    def body(self, *, stream: bool = False, **fields: Any) -> Body:
        """Return a request, whole unless it asks for a stream; None removes a field."""
        body = {"model": "small", **self.good, **({"stream": stream} if self.streamed else {}), **fields}
        return {name: value for name, value in body.items() if value is not None}

    def sampled(self, **parameters: Any) -> Body:
        """Return the members with these parameters, by their neutral names."""
        members: Body = {}
        for name, value in parameters.items():
            top, _, below = self.names[name].partition(".")
            if below:
                members.setdefault(top, {})[below] = value
            else:
                members[top] = value
        return members

    def answer(self, reply: Reply, *, stream: bool) -> Answer:
        """Return the answer of a complete response."""
        assert (reply.status, reply.is_complete) == (200, True), reply.body
        if stream:
            assert self.streamed is not None
            assert reply.headers["content-type"] == self.stream_type
            return self.streamed(reply)
        assert reply.headers["content-type"] == "application/json"
        return self.whole(reply.json)


# OpenAI ---------------------------------------------------------------------------------------------


def _openai_failure(document: Any) -> Failure:
    assert set(document) == {"error"}
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if error["param"] is not None and error["code"] == "invalid_request":
        assert error["message"].startswith(error["param"])
    return Failure(error["message"], error["code"], error["type"], error["param"])


def _openai_end(reply: Reply) -> Failure:
    assert b"[DONE]" not in reply.body
    return _openai_failure(json.loads(reply.events[-1]))


def _usage(answer: Answer, usage: Body) -> Answer:
    answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    assert usage["total_tokens"] == answer.prompt_tokens + answer.tokens
    answer.cached = usage.get("prompt_tokens_details", {}).get("cached_tokens")
    return answer


def _message(message: Body, end: str, logprobs: list[Body]) -> Answer:
    calls = message.get("tool_calls") or []
    return Answer(
        message.get("content") or "",
        message.get("reasoning_content") or "",
        [(one["function"]["name"], one["function"]["arguments"]) for one in calls],
        [one["id"] for one in calls],
        {"tool_calls": "calls"}.get(end, end),
        logprobs=[one["logprob"] for one in logprobs],
    )


def _chat(document: Any) -> Answer:
    (choice,) = document["choices"]
    logprobs = (choice["logprobs"] or {}).get("content", [])
    return _usage(_message(choice["message"], choice["finish_reason"], logprobs), document["usage"])


def _chat_stream(reply: Reply) -> Answer:
    message = merged(reply)
    parts = [one["logprobs"] for chunk in reply.chunks for one in chunk["choices"] if one["logprobs"]]
    logprobs = [entry for part in parts for entry in part["content"]]
    assert message.pop("role") == "assistant"
    return _usage(_message(message, message["finish_reason"], logprobs), reply.chunks[-1]["usage"])


def _completion(document: Any) -> Answer:
    (choice,) = document["choices"]
    answer = Answer(choice["text"], end=choice["finish_reason"])
    answer.logprobs = (choice["logprobs"] or {}).get("token_logprobs", [])
    return _usage(answer, document["usage"])


def _completion_stream(reply: Reply) -> Answer:
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
    ends = [choice["finish_reason"] for choice in choices]
    assert not any(ends[:-1])
    answer = Answer("".join(choice["text"] for choice in choices), end=ends[-1])
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    answer.logprobs = [one for part in parts for one in part["token_logprobs"]]
    return _usage(answer, reply.chunks[-1]["usage"])


def _response(document: Any) -> Answer:
    answer = Answer(end="stop" if document["status"] == "completed" else "length")
    for item in document["output"]:
        match item["type"]:
            case "reasoning":
                answer.reasoning += item["content"][0]["text"]
            case "message":
                (part,) = item["content"]
                answer.text += part["text"]
                answer.logprobs += [one["logprob"] for one in part["logprobs"]]
            case "function_call":
                answer.calls.append((item["name"], item["arguments"]))
                answer.ids.append(item["call_id"])
    usage = document["usage"]
    answer.prompt_tokens, answer.tokens = usage["input_tokens"], usage["output_tokens"]
    answer.cached = usage["input_tokens_details"]["cached_tokens"]
    return answer


def _response_end(reply: Reply) -> Failure:
    response = typed_responses.final_response(typed_responses.events_of(reply))
    assert response["status"] == "failed"
    error = response["error"]
    return Failure(error["message"], error["type"], error["code"], error["param"])


# llama.cpp ------------------------------------------------------------------------------------------


def _native(document: Any) -> Answer:
    assert document["stop"]
    return Answer(
        document["content"],
        end={"eos": "stop", "word": "stop", "limit": "length"}[document["stop_type"]],
        prompt_tokens=document["tokens_evaluated"],
        tokens=document["tokens_predicted"],
        cached=document["tokens_cached"],
        logprobs=[one["logprob"] for one in document.get("completion_probabilities", ())],
    )


def _native_stream(reply: Reply) -> Answer:
    *pieces, last = map(json.loads, reply.events)
    assert not any(piece["stop"] for piece in pieces)
    assert (last["content"], last["tokens"]) == ("", [])
    listed = [one for piece in pieces for one in piece.get("completion_probabilities", ())]
    text = "".join(piece["content"] for piece in pieces)
    return _native({**last, "content": text, "completion_probabilities": listed})


def _native_end(reply: Reply) -> Failure:
    return _openai_failure(json.loads(reply.events[-1]))


# Anthropic ------------------------------------------------------------------------------------------


def _anthropic_failure(document: Any) -> Failure:
    assert set(document) == {"type", "error"}
    assert document["type"] == "error"
    error = document["error"]
    return Failure(error["message"], error["code"], error["type"], error["param"])


def _anthropic_message(document: Any) -> Answer:
    answer = Answer()
    for block in document["content"]:
        match block["type"]:
            case "thinking":
                answer.reasoning += block["thinking"]
            case "text":
                answer.text += block["text"]
            case "tool_use":
                answer.calls.append((block["name"], block["input"]))
                answer.ids.append(block["id"])
    ends = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "calls"}
    answer.end = ends[document["stop_reason"]]
    usage = document["usage"]
    answer.cached = usage["cache_read_input_tokens"]
    answer.prompt_tokens, answer.tokens = usage["input_tokens"] + answer.cached, usage["output_tokens"]
    return answer


def _anthropic_stream(reply: Reply) -> Answer:
    return _anthropic_message(message_events.read(message_events.events_of(reply.body))[0])


# Ollama ---------------------------------------------------------------------------------------------


def _ollama_failure(document: Any) -> Failure:
    assert set(document) == {"error"}
    message = document["error"]
    name, colon, _ = message.partition(": ")
    return Failure(message, param=name if colon else None)


def _ollama_end(reply: Reply) -> Failure:
    return _ollama_failure(json.loads(reply.body.splitlines()[-1]))


def _ollama(document: Any) -> Answer:
    said = document.get("message") or {"content": document["response"], "thinking": document.get("thinking")}
    calls = [one["function"] for one in said.get("tool_calls", ())]
    return Answer(
        said["content"],
        said.get("thinking") or "",
        [(one["name"], one["arguments"]) for one in calls],
        end=document["done_reason"],
        prompt_tokens=document["prompt_eval_count"],
        tokens=document["eval_count"],
        logprobs=[one["logprob"] for one in document.get("logprobs", ())],
    )


def _ollama_stream(reply: Reply) -> Answer:
    lines = ollama_lines.lines_of(reply)
    last = lines[-1]
    if "message" in last:
        last = {**last, "message": ollama_lines.merged(lines)}
    else:
        for name in ("response", "thinking"):
            last = {**last, name: "".join(line.get(name) or "" for line in lines)}
    return _ollama({**last, "logprobs": [one for line in lines for one in line.get("logprobs", ())]})


# The rows -------------------------------------------------------------------------------------------

_USER = [{"role": "user", "content": "hello"}]
_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
_TOOLS = [tool("weather"), tool("time", {"type": "object"})]
_FUNCTIONS = [{"type": "function", "strict": None, **one["function"]} for one in _TOOLS]
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
_OPENAI = {name: name for name in (*_SAME, "repetition_penalty", "max_tokens", "stop")}
_OLLAMA = {name: f"options.{name}" for name in (*_SAME, "stop")}
_OLLAMA |= {"repetition_penalty": "options.repeat_penalty", "max_tokens": "options.num_predict"}


def _said(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}]}


def _prompted(text: str) -> Body:
    return {"prompt": text}


def _input(text: str) -> Body:
    return {"input": text}


CHAT = Dialect(
    "chat", "/v1/chat/completions", {"messages": _USER}, _said, "messages", _openai_failure, _chat,
    _chat_stream, _openai_end, names=_OPENAI, formed={"response_format": _FORM}, with_tools={"tools": _TOOLS},
    scored={"logprobs": True, "top_logprobs": 2},
    options=frozenset({"cached", "ids", "reasoning", "calls_end"}),
)  # fmt: skip
COMPLETIONS = Dialect(
    "completions", "/v1/completions", {"prompt": "hello"}, _prompted, "prompt", _openai_failure, _completion,
    _completion_stream, _openai_end, names=_OPENAI, formed={"response_format": _FORM}, scored={"logprobs": 2},
    options=frozenset({"cached"}),
)  # fmt: skip
RESPONSES = Dialect(
    "responses", "/v1/responses", {"input": "hello"}, _input, "input", _openai_failure, _response,
    lambda reply: _response(typed_responses.final_response(typed_responses.events_of(reply))), _response_end,
    names=_OPENAI | {"max_tokens": "max_output_tokens"},
    formed={"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
    with_tools={"tools": _FUNCTIONS},
    scored={"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    options=frozenset({"cached", "ids", "reasoning"}),
)  # fmt: skip
MESSAGES = Dialect(
    "messages", "/v1/messages", {"messages": _USER, "max_tokens": 100}, _said, "messages", _anthropic_failure,
    _anthropic_message, _anthropic_stream,
    lambda reply: _anthropic_failure(message_events.events_of(reply.body)[-1]),
    names=_OPENAI | {"stop": "stop_sequences"},
    formed={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    with_tools={
        "tools": [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
            for one in _FUNCTIONS
        ]
    },
    options=frozenset({"cached", "ids", "reasoning", "calls_end"}),
)  # fmt: skip
OLLAMA_CHAT = Dialect(
    "ollama chat", "/api/chat", {"messages": _USER}, _said, "messages", _ollama_failure, _ollama,
    _ollama_stream, _ollama_end, "application/x-ndjson", names=_OLLAMA, formed={"format": SCHEMA},
    with_tools={"tools": _TOOLS}, scored={"logprobs": True, "top_logprobs": 2},
    options=frozenset({"reasoning"}),
)  # fmt: skip
OLLAMA_GENERATE = Dialect(
    "ollama generate", "/api/generate", {"prompt": "hello"}, _prompted, "prompt", _ollama_failure, _ollama,
    _ollama_stream, _ollama_end, "application/x-ndjson", names=_OLLAMA, formed={"format": SCHEMA},
    scored={"logprobs": True, "top_logprobs": 2}, options=frozenset({"reasoning"}),
)  # fmt: skip
NATIVE = Dialect(
    "llama.cpp", "/completion", {"prompt": "hello"}, _prompted, "prompt", _openai_failure, _native,
    _native_stream, _native_end,
    names=_OPENAI | {"repetition_penalty": "repeat_penalty", "max_tokens": "n_predict"},
    formed={"json_schema": SCHEMA}, scored={"n_probs": 2}, options=frozenset({"cached"}),
)  # fmt: skip
EMBEDDINGS = Dialect("embeddings", "/v1/embeddings", _input("hello"), _input, "input", _openai_failure)
OLLAMA_EMBED = Dialect(
    "ollama embed", "/api/embed", _input("hello"), _input, "input", _ollama_failure, uncut={"truncate": False}
)
OLLAMA_EMBEDDINGS = Dialect(
    "ollama embeddings",
    "/api/embeddings",
    _prompted("hello"),
    _prompted,
    "prompt",
    _ollama_failure,
    uncut=None,
)
RERANK = Dialect(
    "rerank", "/v1/rerank", {"query": "hello", "documents": ["one", "two"]},
    lambda text: {"documents": ["one", text]}, "documents", _openai_failure,
)  # fmt: skip
COHERE_RERANK = Dialect(
    "rerank of Cohere", "/v2/rerank", RERANK.good, RERANK.prompt, "documents", _openai_failure
)
SCORE = Dialect(
    "score", "/v1/score", {"text_1": "hello", "text_2": ["one", "two"]},
    lambda text: {"text_2": ["one", text]}, "text_2", _openai_failure,
)  # fmt: skip

TEXTS = [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, NATIVE]
VECTORS = [EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, RERANK, COHERE_RERANK, SCORE]
DIALECTS = [*TEXTS, *VECTORS]
