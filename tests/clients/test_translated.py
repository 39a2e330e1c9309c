"""A real server in front of one that speaks only OpenAI's chat: the SDKs of other dialects work with it."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from clients.chat_server import MODEL, TEXT, USAGE, ChatServer
from clients.packages import package
from e2e.real_server import RealServer, real_server, until

anthropic = package("anthropic")

HELLO: Any = [{"role": "user", "content": "hello"}]
CALL = {"id": "theirs", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
THOUGHT = {"reasoning_content": "Hm.", **TEXT}
CALLED = {"content": None, "tool_calls": [CALL]}
SCHEMA: Any = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.fixture(scope="module")
def running_upstream() -> Iterator[ChatServer]:
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def server(running_upstream: ChatServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    node = {"id": "chats", "url": running_upstream.url, "seats": 4, "dialects": ["openai"]}
    file = tmp_path_factory.mktemp("translating") / "fairlead.yaml"
    file.write_text(json.dumps({"nodes": [node], "healthCheck": {"interval": "100ms", "failures": 1000}}))
    with real_server("--config", str(file)) as running:
        until(lambda: running.http.get("/nodes").json()[0]["state"] == "up")
        yield running


@pytest.fixture
def upstream(running_upstream: ChatServer) -> ChatServer:
    running_upstream.reset()
    return running_upstream


@pytest.fixture(scope="module")
def messages(server: RealServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def responses(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


ASK: Any = {"model": MODEL, "max_tokens": 50, "messages": HELLO}


def message_of(client: Any, *, streams: bool, **more: Any) -> Any:
    if not streams:
        return client.messages.create(**ASK, **more)
    with client.messages.stream(**ASK, **more) as stream:
        return stream.get_final_message()


def response_of(client: openai.OpenAI, *, streams: bool, **more: Any) -> Any:
    if not streams:
        return client.responses.create(model=MODEL, input="hello", store=False, **more)
    with client.responses.stream(model=MODEL, input="hello", store=False, **more) as stream:
        events = list(stream)
    return events[-1].response


both = pytest.mark.parametrize("streams", [False, True])


@both
def test_message_with_thinking(messages, upstream, streams):
    upstream.message = THOUGHT
    answer = message_of(messages, streams=streams, stop_sequences=["END"], extra_body={"temperature": 0})
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[0].thinking, answer.stop_reason) == ("Hm.", "end_turn")
    assert answer.content[1].text == ("Helloworld" if streams else "Hello world")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (13, 8, 9)
    sent = upstream.sent[0]
    assert (sent["messages"], sent["max_tokens"], sent["stop"]) == (HELLO, 50, ["END"])
    assert (sent["temperature"], sent.get("stream", False)) == (0, streams)


@both
def test_message_with_a_call_and_its_result(messages, upstream, streams):
    upstream.message, upstream.finish_reason = CALLED, "tool_calls"
    tools: Any = [{"name": "f", "description": "It is f.", "input_schema": SCHEMA}]
    answer = message_of(messages, streams=streams, tools=tools, tool_choice={"type": "any"})
    (call,) = answer.content
    assert (call.type, call.name, call.input, answer.stop_reason) == ("tool_use", "f", {"x": 1}, "tool_use")
    upstream.message, upstream.finish_reason = TEXT, "stop"
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "2"}]
    turns: Any = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": result}]
    messages.messages.create(**{**ASK, "messages": HELLO + turns}, tools=tools)
    first, second = upstream.sent
    assert (first["tool_choice"], first["tools"][0]["function"]["name"]) == ("required", "f")
    assert second["messages"][1]["tool_calls"][0]["id"] == call.id
    assert json.loads(second["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
    assert second["messages"][2]["tool_call_id"] == call.id


@both
def test_message_that_is_cut(messages, upstream, streams):
    upstream.finish_reason = "length"
    assert message_of(messages, streams=streams).stop_reason == "max_tokens"


@both
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "BadRequestError"), (422, "APIStatusError"), (404, "NotFoundError")],
)
def test_refused_message(messages, upstream, streams, status, kind):
    upstream.status = status
    with pytest.raises(getattr(anthropic, kind)) as refused:
        message_of(messages, streams=streams)
    assert refused.value.status_code == status
    assert refused.value.body["type"] == "error"
    assert "maximum context length is 9 tokens" in refused.value.body["error"]["message"]


@both
def test_response_with_reasoning(responses, upstream, streams):
    upstream.message = THOUGHT
    answer = response_of(responses, streams=streams, top_p=0.5)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == ("Helloworld" if streams else "Hello world")
    assert (answer.status, answer.top_p) == ("completed", 0.5)
    usage = answer.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (21, 8)
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (9, 2)


@both
def test_response_with_a_call_and_its_result(responses, upstream, streams):
    upstream.message, upstream.finish_reason = CALLED, "tool_calls"
    tools: Any = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    answer = response_of(responses, streams=streams, tools=tools)
    (call,) = answer.output
    assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"x": 1}')
    upstream.message, upstream.finish_reason = TEXT, "stop"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    asked = {"role": "user", "content": "hello"}
    given: Any = [asked, call.model_dump(), result]
    responses.responses.create(model=MODEL, input=given, tools=tools, store=False)
    sent = upstream.sent[1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == call.call_id


@both
def test_response_of_a_schema(responses, upstream, streams):
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    upstream.message = {"content": '{"x":1}'}
    assert response_of(responses, streams=streams, text=text).output_text == '{"x":1}'
    assert upstream.sent[0]["response_format"]["json_schema"]["schema"] == SCHEMA


@both
def test_response_that_is_cut(responses, upstream, streams):
    upstream.finish_reason = "length"
    answer = response_of(responses, streams=streams)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@both
def test_refused_response(responses, upstream, streams):
    upstream.status = 400
    with pytest.raises(openai.BadRequestError, match="maximum context length is 9 tokens"):
        response_of(responses, streams=streams)


def test_full_node_makes_the_request_wait(messages, upstream):
    upstream.status = 429
    threading.Timer(0.5, upstream.reset).start()
    assert message_of(messages, streams=False).content[0].text == "Hello world"


@pytest.mark.parametrize("after", [0, 1])
def test_failure_before_the_answer_is_an_error_status(messages, responses, upstream, after):
    upstream.after = after
    with pytest.raises(anthropic.APIStatusError) as failed:
        message_of(messages, streams=True)
    assert failed.value.status_code == 502
    with pytest.raises(openai.APIStatusError) as failed_too:
        response_of(responses, streams=True)
    assert failed_too.value.status_code == 502


@pytest.mark.parametrize(
    ("path", "fields", "event"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, "error"),
        ("/v1/responses", {"input": "hello"}, "response.failed"),
    ],
)
def test_failure_in_the_answer_is_an_error_event(server, upstream, path, fields, event):
    upstream.after = 3
    upstream.ends.clear()
    body = {"model": MODEL, "stream": True, "temperature": 1, **fields}
    with server.http.stream("POST", path, json=body) as reply:
        assert (reply.status_code, reply.headers["X-Fairlead-Translated"]) == (200, "openai")
        lines = reply.iter_lines()
        read = [next(lines)]
        upstream.ends.set()
        with pytest.raises(httpx.RemoteProtocolError):
            read.extend(lines)
    assert f"event: {event}" in read


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_client_that_leaves_ends_the_request(server, upstream, path):
    upstream.ends.clear()
    body = {"model": MODEL, "stream": True, "messages": HELLO, "max_tokens": 9, "input": "hello"}
    if path == "/v1/responses":
        del body["messages"], body["max_tokens"]
    with server.http.stream("POST", path, json=body) as reply:
        assert (reply.status_code, reply.headers["X-Fairlead-Translated"]) == (200, "openai")
        next(reply.iter_lines())
        assert upstream.open == 1
    until(lambda: upstream.open == 0)
    until(lambda: server.queue()["running"] == 0)
    upstream.ends.set()


def test_tokens_are_not_counted_by_such_a_node(messages, upstream):
    with pytest.raises(anthropic.BadRequestError, match="cannot be translated"):
        messages.messages.count_tokens(model=MODEL, messages=HELLO)


def test_chats_are_relayed_unchanged(server, upstream):
    body = {"model": MODEL, "messages": HELLO, "unheard_of": 1}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert (upstream.sent, "X-Fairlead-Translated" in reply.headers) == ([body], False)
    assert reply.json()["usage"] == USAGE


@both
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_answer(server, upstream, path, streams):
    upstream.message = THOUGHT
    body = {
        "model": MODEL,
        "stream": streams,
        "messages": HELLO,
        "prompt": "hello",
        "options": {"num_predict": 7},
    }
    del body["prompt" if path == "/api/chat" else "messages"]
    reply = server.http.post(path, json=body)
    assert (reply.status_code, reply.headers["X-Fairlead-Translated"]) == (200, "openai")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    texts = [line["message"]["content"] if path == "/api/chat" else line["response"] for line in lines]
    assert "".join(texts) == ("Helloworld" if streams else "Hello world")
    last = lines[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 21, 9)
    assert last["total_duration"] > 0
    assert (upstream.sent[0]["messages"], upstream.sent[0]["max_tokens"]) == (HELLO, 7)


@both
def test_ollamas_call(server, upstream, streams):
    upstream.message, upstream.finish_reason = CALLED, "tool_calls"
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {"model": MODEL, "stream": streams, "messages": HELLO, "tools": tools}
    lines = [json.loads(line) for line in server.http.post("/api/chat", json=body).text.splitlines()]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", {"x": 1})]
    history = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": calls[0]}]}]
    body["messages"] = [*history, {"role": "tool", "content": "2", "tool_name": "f"}]
    server.http.post("/api/chat", json=body)
    _, asked, result = upstream.sent[1]["messages"]
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"]


@both
def test_ollamas_refusal(server, upstream, streams):
    upstream.status = 400
    reply = server.http.post("/api/chat", json={"model": MODEL, "stream": streams, "messages": HELLO})
    assert reply.status_code == 400
    assert "maximum context length is 9 tokens" in reply.json()["error"]
