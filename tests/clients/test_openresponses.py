"""OpenResponses' compliance rules, in our words: what its own suite asks, and what it checks.

The suite is a TypeScript program of the repository `openresponses/openresponses`, which `bun` runs. It is
skipped unless `OPENRESPONSES` names a checkout with its packages, because it is not ours to ship:

    git clone https://github.com/openresponses/openresponses
    (cd openresponses && npm install --no-save bun)
    OPENRESPONSES=$PWD/openresponses pytest tests/clients/test_openresponses.py --log-cli-level=INFO

That prints how many of its tests passed, and which did not. Of the 17 of July 2026, the demonstration model
passes 15: it calls no tool of its own accord, and reads no images. All 17 pass where a node does both.
"""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, Self

import httpx
import pytest

from clients.chat_server import MODEL as CHAT_MODEL
from clients.chat_server import ChatServer
from clients.conftest import MODEL
from e2e.real_server import RealServer, real_server, until

openai = pytest.importorskip("openai")
from openai.types.responses import Response  # noqa: E402

open_websocket = pytest.importorskip("websockets.sync.client").connect
SUITE = os.environ.get("OPENRESPONSES", "")
SUITE_S = 300
logger = logging.getLogger(__name__)
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAA"
    "AABJRU5ErkJggg=="
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state"}},
        "required": ["location"],
    },
}
CALL = {"name": "get_weather", "arguments": '{"location": "San Francisco"}'}
# Members that a response must have, whether or not its request has them.
REQUIRED = {
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def ask(server: RealServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"model": MODEL} | body, timeout=60)


def checked(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response that has all members, of the right types."""
    assert response.keys() >= REQUIRED
    Response.model_validate_json(json.dumps(response), strict=True)
    return response


def streamed(server: RealServer, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names and numbers are right, and which ends with a response."""
    reply = ask(server, stream=True, **body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for name, data in re.findall(r"^event: (.+)\ndata: (.+)$", reply.text, re.MULTILINE):
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    checked(events[-1]["response"])
    return events


def has_ended(response: dict[str, Any]) -> None:
    assert response["status"] == "completed"
    assert response["output"]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([said("user", "Say hello in exactly 3 words.")], id="basic-response"),
        pytest.param([said("system", "You are a pirate."), said("user", "Say hello.")], id="system-prompt"),
        pytest.param(
            [said("user", "My name is Alice."), said("assistant", "Hello Alice!"), said("user", "My name?")],
            id="multi-turn",
        ),
        pytest.param(
            [
                said("user", "What is 2 + 2?"),
                said("assistant", "I will add them.") | {"phase": "commentary"},
                said("assistant", "4") | {"phase": "final_answer"},
                said("user", "And 3 + 3?"),
            ],
            id="assistant-phase",
        ),
    ],
)
def test_response_is_complete_and_has_output(server, given):
    has_ended(checked(ask(server, input=given, temperature=0).json()))


def test_streaming_response(server):
    events = streamed(server, input=[said("user", "Count from 1 to 5.")], temperature=0)
    assert events[-1]["type"] == "response.completed"
    has_ended(events[-1]["response"])


def test_tool_calling(server):
    # The suite leaves the choice to the model, and the demonstration model seldom calls a tool.
    given = [said("user", "What's the weather like in San Francisco?")]
    response = checked(ask(server, input=given, tools=[WEATHER], tool_choice="required").json())
    assert [item["type"] for item in response["output"]].count("function_call") >= 1


def test_tool_calling_streaming(server):
    given = [said("user", "What's the weather like in San Francisco?")]
    events = streamed(server, input=given, tools=[WEATHER], tool_choice="required")
    kinds = {event["type"] for event in events}
    assert kinds >= {"response.function_call_arguments.delta", "response.function_call_arguments.done"}
    for kind in ("response.output_item.added", "response.output_item.done"):
        assert any(e["type"] == kind and e["item"]["type"] == "function_call" for e in events)


def test_image_input_is_refused_by_name_because_the_model_reads_text_only(server):
    content = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": IMAGE}]
    reply = ask(server, input=[said("user", content)])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "input[0].content[1].type"


# Compaction and WebSockets -----------------------------------------------------------------------------


def test_compact_response(server):
    given = [said("user", "Remember: slate."), said("assistant", "OK."), said("user", "Compress this.")]
    compacted = httpx.post(
        f"{server.url}/v1/responses/compact", json={"model": MODEL, "input": given}, timeout=60
    ).json()
    assert compacted["object"] == "response.compaction"
    assert [item["type"] for item in compacted["output"]][-1] == "compaction"
    assert compacted["usage"]["total_tokens"] > 0


def test_compact_missing_model(server):
    reply = httpx.post(f"{server.url}/v1/responses/compact", json={"input": "hello"})
    assert 400 <= reply.status_code < 500
    assert reply.json()["error"]["param"] == "model"


class Socket:
    """A WebSocket to the server. `ask` returns the last event of an answer."""

    def __init__(self, server: RealServer) -> None:
        self._opening = open_websocket(server.url.replace("http", "ws") + "/v1/responses")

    def __enter__(self) -> Self:
        self._socket = self._opening.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._opening.__exit__(None, None, None)

    def ask(self, given: Any, previous: str | None = None, *, store: bool | None = False) -> dict[str, Any]:
        body = {"type": "response.create", "model": MODEL, "store": store, "temperature": 0, "input": given}
        self._socket.send(json.dumps(body | {"previous_response_id": previous}))
        while True:
            event = json.loads(self._socket.recv(timeout=30))
            if event["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
                return event

    def respond(self, given: Any, previous: str | None = None) -> dict[str, Any]:
        response = checked(self.ask(given, previous)["response"])
        has_ended(response)
        return response


def test_websocket_responses_in_sequence(server):
    with Socket(server) as socket:
        first = socket.respond("Reply with exactly: first")
        second = socket.respond("Reply with exactly: second")
    assert first["id"] != second["id"]
    assert first["store"] is False


def test_websocket_continuation_of_a_response_that_is_not_stored(server):
    with Socket(server) as socket:
        first = socket.respond("Remember the code word: cobalt. Reply with OK.")
        second = socket.respond("What is the code word?", first["id"])
        third = socket.respond("Again.", second["id"])
        sizes = [response["usage"]["input_tokens"] for response in (first, second, third)]
        assert sizes == sorted(set(sizes))
        assert socket.ask("stale", first["id"])["code"] == "previous_response_not_found"


def test_websocket_reconnect_does_not_find_what_is_not_stored(server):
    with Socket(server) as socket:
        first = socket.respond("Remember the code word: copper. Reply with OK.")
    with Socket(server) as socket:
        assert socket.ask("Try to continue.", first["id"])["code"] == "previous_response_not_found"
        socket.respond([said("user", "Start a new response.")])


def test_websocket_previous_response_not_found(server):
    with Socket(server) as socket:
        error = socket.ask("This should fail.", "resp_missing")
        assert (error["type"], error["code"]) == ("error", "previous_response_not_found")
        assert error["error"]["code"] == "previous_response_not_found"


def test_websocket_failed_continuation_evicts_the_response(server):
    with Socket(server) as socket:
        first = socket.respond("Remember the code word: ember. Reply with OK.")
        result = {"type": "function_call_output", "call_id": "call_missing", "output": "No such call."}
        assert socket.ask([result], first["id"])["type"] == "error"
        assert socket.ask("stale", first["id"])["code"] == "previous_response_not_found"


def test_websocket_begins_a_new_chain_with_a_compaction(server):
    given = [said("user", "Remember: slate."), said("assistant", "OK."), said("user", "Compress this.")]
    body = {"model": MODEL, "input": given}
    output = httpx.post(f"{server.url}/v1/responses/compact", json=body, timeout=60).json()["output"]
    with Socket(server) as socket:
        assert socket.respond([*output, said("user", "Go on.")])["previous_response_id"] is None


# The suite itself ---------------------------------------------------------------------------------------

needs_suite = pytest.mark.skipif(not SUITE, reason="OPENRESPONSES names no checkout of the suite")


def run_suite(server: RealServer, model: str) -> dict[str, list[str]]:
    """Run the suite, and log how many tests passed. Return the errors of those that did not, by their ids."""
    command = ["npm", "run", "--silent", "test:compliance", "--", "--base-url", f"{server.url}/v1"]
    command += ["--api-key", "unused", "--model", model, "--json"]
    # A group of its own, all of which ends: `bun` is a grandchild, and holds the pipes.
    process = subprocess.Popen(
        command,
        cwd=SUITE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=SUITE_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the suite has not ended within {SUITE_S} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert "{" in output, f"the suite has not run: {output}{errors}"
    results: list[dict[str, Any]] = json.loads(output[output.index("{") :])["results"]
    failed = {one["id"]: one.get("errors") or [] for one in results if one["status"] != "passed"}
    logger.info("%d of %d passed with %s; not %s", len(results) - len(failed), len(results), model, failed)
    assert {one["id"] for one in results} >= {"basic-response", "streaming-response", "websocket-response"}
    return failed


@needs_suite
def test_suite_of_openresponses(server):
    # Those that need a model which calls tools of its own accord, or one which sees.
    assert run_suite(server, MODEL).keys() <= {"tool-calling", "tool-calling-streaming", "image-input"}


class SeeingServer(ChatServer):
    """Calls the first tool of a request, describes its first image, or answers with its last text."""

    def message_for(self, body: Any) -> Any:
        parts = [part for said in body["messages"] for part in parts_of(said["content"])]
        if any(part["type"] == "image_url" for part in parts):
            return {"content": "A red heart."}
        if body.get("tools"):
            called = {**CALL, "name": body["tools"][0]["function"]["name"]}
            return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": called}]}
        return {"content": parts[-1]["text"]}


def parts_of(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


@pytest.fixture(params=[1, 2])
def seeing_server(request, tmp_path) -> Iterator[RealServer]:
    """Serve a node that speaks OpenAI's chats only, calls tools and sees; with so many fronts."""
    upstream = SeeingServer()
    thread = threading.Thread(target=upstream.serve_forever)
    thread.start()
    node = {"id": "chats", "url": upstream.url, "seats": 4, "dialects": ["openai"]}
    settings = {"nodes": [node], "fronts": request.param, "healthCheck": {"interval": "100ms"}}
    settings |= {"responses": {"inStore": True}}
    file = tmp_path / "fairlead.yaml"
    file.write_text(json.dumps(settings))
    try:
        with real_server("--config", str(file), "--store", str(tmp_path / "fairlead.db")) as running:
            until(lambda: running.http.get("/nodes").json()[0]["state"] == "up")
            yield running
    finally:
        upstream.shutdown()
        upstream.server_close()
        thread.join()


@needs_suite
def test_suite_of_openresponses_with_a_node_that_calls_tools_and_sees(seeing_server):
    assert run_suite(seeing_server, CHAT_MODEL) == {}


def test_node_that_calls_tools_and_sees_gives_responses(seeing_server):
    content = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": IMAGE}]
    has_ended(checked(ask(seeing_server, model=CHAT_MODEL, input=[said("user", content)]).json()))
    given = [said("user", "What's the weather like in San Francisco?")]
    response = checked(ask(seeing_server, model=CHAT_MODEL, input=given, tools=[WEATHER]).json())
    assert [item["type"] for item in response["output"]] == ["function_call"]
    events = streamed(seeing_server, model=CHAT_MODEL, input=given, tools=[WEATHER])
    kinds = {event["type"] for event in events}
    assert kinds >= {"response.function_call_arguments.delta", "response.function_call_arguments.done"}
