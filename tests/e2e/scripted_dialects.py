"""The dialects of chats: how each asks for an answer, and what its clients read of a stream and of the whole.

A stream is read by adding its pieces, as clients do, and not from copies of the whole in its last event.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from server.routes import message_events


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


class Request(NamedTuple):
    """What is asked for, in the terms of no dialect.

    `is_required`: the answer is a call. `schema`: that of the answer. `max_tokens` 0: no limit.
    """

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    stop: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None
    max_tokens: int = 0


class Answer(NamedTuple):
    """The parts of an answer. The arguments of a call are JSON text, as they were written."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    end: str = ""


class Dialect(NamedTuple):
    """A dialect. `body` has the members of a request with a message; `ends`: how it names `END`, `STOP`, …

    `can`: the members of `Request` that it has. `shown` is the part of an answer that it can express.
    """

    path: str
    body: Callable[[str, Request], dict[str, Any]]
    whole: Callable[[bytes], Answer]
    stream: Callable[[bytes], Answer]
    ends: dict[str, str]
    can: frozenset[str]
    shown: Callable[[Answer], Answer] = lambda answer: answer


END, STOP, LENGTH, CALLS = "the model's end", "a stop string", "the limit", "calls"
_ALL = frozenset(Request._fields)
_LONGEST = 1000


def _events(body: bytes) -> list[dict[str, Any]]:
    lines = body.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def _joined(texts: list[str | None]) -> str:
    return "".join(text or "" for text in texts)


# OpenAI's chats --------------------------------------------------------------------------------------


def _chat_tools(request: Request) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "parameters": tool.parameters, "strict": tool.is_strict},
        }
        for tool in request.tools
    ]


def _chat_body(message: str, request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": message}], "temperature": 0}
    if request.tools:
        body |= {"tools": _chat_tools(request), "tool_choice": "required" if request.is_required else "auto"}
    if request.stop:
        body["stop"] = [*request.stop]
    if request.schema is not None:
        form = {"name": "form", "schema": request.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body | ({"max_tokens": request.max_tokens} if request.max_tokens else {})


def _chat_whole(body: bytes) -> Answer:
    (choice,) = json.loads(body)["choices"]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    return Answer(
        message.get("reasoning_content") or "",
        message["content"] or "",
        tuple((one["name"], one["arguments"]) for one in calls),
        choice["finish_reason"],
    )


def _chat_stream(body: bytes) -> Answer:
    assert body.endswith(b"data: [DONE]\n\n")
    choices = [event["choices"][0] for event in _events(body) if event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if "name" in piece["function"]:
            assert piece["index"] == len(calls)
            calls.append([piece["function"]["name"], ""])
        calls[piece["index"]][1] += piece["function"]["arguments"]
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [
        True
    ]
    return Answer(
        _joined([delta.get("reasoning_content") for delta in deltas]),
        _joined([delta.get("content") for delta in deltas]),
        tuple((name, arguments) for name, arguments in calls),
        choices[-1]["finish_reason"],
    )


# OpenAI's responses ----------------------------------------------------------------------------------


def _responses_body(message: str, request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {"input": message, "temperature": 0, "store": False}
    if request.tools:
        tools = [{"type": "function", **tool["function"]} for tool in _chat_tools(request)]
        body |= {"tools": tools, "tool_choice": "required" if request.is_required else "auto"}
    if request.schema is not None:
        form = {"type": "json_schema", "name": "form", "schema": request.schema, "strict": True}
        body["text"] = {"format": form}
    if request.stop:
        body["stop"] = [*request.stop]
    return body | ({"max_output_tokens": request.max_tokens} if request.max_tokens else {})


def _responses_end(response: dict[str, Any]) -> str:
    details = response["incomplete_details"]
    return str(response["status"] if details is None else details["reason"])


def _responses_whole(body: bytes) -> Answer:
    response = json.loads(body)
    return _of_items(response["output"], _responses_end(response))


def _of_items(items: list[dict[str, Any]], end: str) -> Answer:
    texts: dict[str, list[str | None]] = {"reasoning": [], "message": []}
    calls = []
    for item in items:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            texts[item["type"]] += [part["text"] for part in item["content"]]
    return Answer(_joined(texts["reasoning"]), _joined(texts["message"]), tuple(calls), end)


def _responses_stream(body: bytes) -> Answer:
    events = _events(body)
    texts: dict[str, list[str | None]] = {"reasoning_text": [], "output_text": []}
    calls: list[list[str]] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                calls.append([event["item"]["name"], ""])
            case "response.function_call_arguments.delta":
                calls[-1][1] += event["delta"]
            case "response.reasoning_text.delta" | "response.output_text.delta":
                texts[event["type"].split(".")[1]].append(event["delta"])
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
    response = events[-1]["response"]
    end = _responses_end(response)
    answer = Answer(
        _joined(texts["reasoning_text"]),
        _joined(texts["output_text"]),
        tuple((name, arguments) for name, arguments in calls),
        end,
    )
    assert answer == _of_items(response["output"], end)
    return answer


# Anthropic's messages --------------------------------------------------------------------------------


def _messages_body(message: str, request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": message}],
        "temperature": 0,
        "max_tokens": request.max_tokens or _LONGEST,
    }
    if request.tools:
        body["tools"] = [
            {"name": tool.name, "input_schema": tool.parameters, "strict": tool.is_strict}
            for tool in request.tools
        ]
        body["tool_choice"] = {"type": "any" if request.is_required else "auto"}
    if request.stop:
        body["stop_sequences"] = [*request.stop]
    if request.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": request.schema}}
    return body


def _of_message(message: dict[str, Any]) -> Answer:
    blocks = message["content"]
    return Answer(
        _joined([block["thinking"] for block in blocks if block["type"] == "thinking"]),
        _joined([block["text"] for block in blocks if block["type"] == "text"]),
        tuple((block["name"], _dumped(block["input"])) for block in blocks if block["type"] == "tool_use"),
        message["stop_reason"],
    )


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_parsed_arguments(answer: Answer) -> Answer:
    """Return the answer as messages have it: with values as arguments, empty if they are cut."""
    calls = tuple((name, _dumped(message_events.parsed(arguments))) for name, arguments in answer.calls)
    return answer._replace(calls=calls)


# Ollama's chats --------------------------------------------------------------------------------------


def _ollama_body(message: str, request: Request) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": 0, "num_predict": request.max_tokens}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": message}], "options": options}
    if request.tools:
        body["tools"] = _chat_tools(request)
    if request.stop:
        options["stop"] = [*request.stop]
    return body | ({} if request.schema is None else {"format": request.schema})


def _of_lines(lines: list[dict[str, Any]]) -> Answer:
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    return Answer(
        _joined([message.get("thinking") for message in messages]),
        _joined([message["content"] for message in messages]),
        tuple((call["name"], _dumped(call["arguments"])) for call in calls),
        lines[-1]["done_reason"],
    )


def _with_whole_calls(answer: Answer) -> Answer:
    """Return the answer without calls whose arguments are cut, which Ollama's dialect cannot express."""
    calls = []
    for name, arguments in answer.calls:
        try:
            value = json.loads(arguments)
        except ValueError:
            continue
        if isinstance(value, dict):
            calls.append((name, _dumped(value)))
    return answer._replace(calls=tuple(calls))


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        _chat_body,
        _chat_whole,
        _chat_stream,
        {END: "stop", STOP: "stop", LENGTH: "length", CALLS: "tool_calls"},
        _ALL,
    ),
    "responses": Dialect(
        "/v1/responses",
        _responses_body,
        _responses_whole,
        _responses_stream,
        {END: "completed", STOP: "completed", LENGTH: "max_output_tokens", CALLS: "completed"},
        _ALL,
    ),
    "messages": Dialect(
        "/v1/messages",
        _messages_body,
        lambda body: _of_message(json.loads(body)),
        lambda body: _of_message(message_events.read(message_events.events_of(body))[0]),
        {END: "end_turn", STOP: "stop_sequence", LENGTH: "max_tokens", CALLS: "tool_use"},
        _ALL,
        _with_parsed_arguments,
    ),
    "ollama": Dialect(
        "/api/chat",
        _ollama_body,
        lambda body: _of_lines([json.loads(body)]),
        lambda body: _of_lines([json.loads(line) for line in body.splitlines()]),
        {END: "stop", STOP: "stop", LENGTH: "length", CALLS: "stop"},
        _ALL - {"is_required"},
        _with_whole_calls,
    ),
}
