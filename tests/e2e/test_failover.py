"""The model's process dies or is stuck in the middle of its work; clients still get their answers."""

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.own_copy import own_copy
from e2e.real_server import TIMEOUT_S, RealServer, configured, real_server, until

LONG = {"model": "fairlead-demo", "prompt": "Count", "max_tokens": 450, "ignore_eos": True}
GREEDY = LONG | {"temperature": 0}
SEEDED = LONG | {"temperature": 1.5, "seed": 7}
RANDOM = LONG | {"temperature": 1.5}
CONTEXT = 200_000
# 150 numbers take hundreds of tokens, so that the child is killed or stopped before the end.
NUMBERS = {
    "type": "object",
    "properties": {
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 100, "maximum": 999},
            "minItems": 150,
            "maxItems": 150,
        }
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
CONSTRAINED = {"model": "fairlead-demo", "max_tokens": 20_000, "temperature": 1, "seed": 7}
CALLS = {
    "messages": [{"role": "user", "content": "Count from 1 to 150."}],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": NUMBERS, "strict": True}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
ENDLESS = {"max_tokens": 20_000}  # takes minutes, so that it cannot end before the child is killed or stopped


class Stream:
    """Reads a streamed answer. Calls `on_text` when its first event arrives."""

    def __init__(self, path: str = "/v1/completions") -> None:
        self.path = path
        self.lines: list[str] = []
        self.is_whole = False

    def read(self, server: RealServer, body: dict[str, Any], on_text=lambda: None) -> "Stream":
        options = {"json": body | {"stream": True}, "timeout": TIMEOUT_S}
        with httpx.stream("POST", f"{server.url}{self.path}", **options) as response:
            assert response.status_code == 200, response.read()
            try:
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        self.lines.append(line)
                        if len(self.lines) == 1:
                            on_text()
                self.is_whole = True
            except httpx.RemoteProtocolError:
                pass
        return self

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line != "data: [DONE]"]

    def text(self, index: int = 0) -> str:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(choice["text"] for choice in choices if choice["index"] == index)

    @property
    def arguments(self) -> str:
        """The arguments of the calls in a chat, joined."""
        deltas = [choice["delta"] for event in self.events for choice in event["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        return "".join(call["function"]["arguments"] for call in calls)


@pytest.fixture(
    params=[
        pytest.param(signal.SIGKILL, id="killed"),
        # A stopped process does not act on SIGTERM, so it takes some seconds to end.
        pytest.param(signal.SIGSTOP, id="stuck", marks=pytest.mark.slow),
    ]
)
def kill_engine(request) -> signal.Signals:
    return request.param


@pytest.fixture
def server(tmp_path: Path, kill_engine: signal.Signals) -> Iterator[RealServer]:
    """A server for each test, because a child which dies often is restarted with a delay.

    Its watchdog's bound is short where a test waits for it, but long enough for a slow machine.
    """
    model = {"path": str(own_copy(tmp_path / "model", max_position_embeddings=CONTEXT))}
    quick = {"watchdog": "4s"} if kill_engine is signal.SIGSTOP else {}
    with real_server(*configured(tmp_path, model | quick)) as server:
        yield server


def kill_during(server: RealServer, kill_engine: signal.Signals) -> None:
    os.kill(server.child_pid(), kill_engine)


def wait_until_ready(server: RealServer) -> None:
    until(lambda: server.http.get("/ready").status_code == 200)


def post_chat(server: RealServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=2 * TIMEOUT_S)


def retries(server: RealServer) -> float:
    """Return how many jobs were retried."""
    metrics = server.http.get("/metrics").text
    (count,) = re.findall(r"^fairlead_retries_total\{.*\} (.+)$", metrics, re.MULTILINE)
    return float(count)


@pytest.mark.parametrize(
    "body",
    [pytest.param(GREEDY, id="greedy", marks=pytest.mark.nightly), pytest.param(SEEDED, id="seeded")],
)
def test_stream_that_can_be_repeated_is_whole_and_the_same_as_undisturbed(
    server: RealServer, body, kill_engine
):
    expected = Stream().read(server, body)
    killed = Stream().read(server, body, lambda: kill_during(server, kill_engine))
    assert killed.lines[-1] == "data: [DONE]"
    assert expected.text() == killed.text()
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("kill_engine", [signal.SIGKILL], indirect=True, ids=["killed"])
def test_constrained_text_resumes_where_it_stopped(server: RealServer, kill_engine):
    body = CONSTRAINED | {"prompt": "Count", "structured_outputs": {"json": NUMBERS}}
    expected = Stream().read(server, body)
    killed = Stream().read(server, body, lambda: kill_during(server, kill_engine))
    assert killed.lines[-1] == "data: [DONE]"
    assert expected.text() == killed.text()
    assert len(json.loads(killed.text())["numbers"]) == 150
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("kill_engine", [signal.SIGKILL], indirect=True, ids=["killed"])
def test_constrained_call_resumes_where_it_stopped(server: RealServer, kill_engine):
    body = CONSTRAINED | CALLS
    expected = Stream("/v1/chat/completions").read(server, body)
    stream = Stream("/v1/chat/completions")
    killed = stream.read(server, body, lambda: kill_during(server, kill_engine))
    assert killed.lines[-1] == "data: [DONE]"
    assert expected.arguments == killed.arguments
    assert len(json.loads(killed.arguments)["numbers"]) == 150
    assert not any(server.wait_until_at_rest().values())


def test_random_stream_ends_with_an_error_and_a_cut(server: RealServer, kill_engine):
    killed = Stream().read(server, RANDOM | ENDLESS, lambda: kill_during(server, kill_engine))
    assert not killed.is_whole
    assert killed.events[-1]["error"]["code"] == "node_failed"
    assert "data: [DONE]" not in killed.lines
    wait_until_ready(server)
    assert not any(server.wait_until_at_rest().values())


def stream_killed_midway(
    server: RealServer, body: dict[str, Any], kill_engine: signal.Signals
) -> httpx.Response:
    """Send a request; kill or stop the child before it is done. Repeat if the answer was done already."""
    with ThreadPoolExecutor(1) as pool:
        for late in itertools.count(1):
            answer: Future[httpx.Response] = pool.submit(post_chat, server, body)
            until(lambda answer=answer: server.running()["sequences"] or answer.done())
            killed_pid = server.child_pid()
            os.kill(killed_pid, kill_engine)
            result = answer.result()
            if retries(server):
                break
            if kill_engine is signal.SIGSTOP:
                os.kill(killed_pid, signal.SIGCONT)
            else:
                until(lambda late=late: server.running()["counts"]["restarts"] == late)
    return result


@pytest.mark.parametrize(
    "body",
    [pytest.param(GREEDY, id="greedy"), pytest.param(RANDOM, id="random", marks=pytest.mark.nightly)],
)
def test_plain_request_is_answered_by_the_next_child(server: RealServer, body, kill_engine):
    answer = stream_killed_midway(server, body, kill_engine)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 450
    assert retries(server) == 1
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("kill_engine", [signal.SIGSTOP], indirect=True, ids=["stuck"])
def test_request_to_a_stuck_child_is_answered_by_the_next_one(server: RealServer, kill_engine, stream):
    # Before its first answer, a child has twice the watchdog's bound.
    assert post_chat(server, GREEDY | {"max_tokens": 1}).json()["usage"]["completion_tokens"] == 1
    killed_pid = server.child_pid()
    kill_during(server, kill_engine)
    if stream:
        answer = Stream().read(server, RANDOM | {"max_tokens": 5})
        assert answer.lines[-1] == "data: [DONE]"
    else:
        assert post_chat(server, RANDOM | {"max_tokens": 5}).json()["usage"]["completion_tokens"] == 5
    assert killed_pid != server.child_pid()
    assert not any(server.wait_until_at_rest().values())


def test_every_choice_of_several_streams_resumes_where_it_stopped(server: RealServer, kill_engine):
    bodies = [SEEDED | {"seed": 10 * number, "n": 2, "max_tokens": 200} for number in range(3)]
    expected = [Stream().read(server, body) for body in bodies]
    streams = [Stream() for _ in bodies]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(each.read, server, body) for each, body in zip(streams, bodies, strict=True)]
        while not all(len(each.lines) > 10 for each in streams):
            time.sleep(0.001)
        kill_during(server, kill_engine)
        for run in runs:
            run.result()
    for uninterrupted, killed in zip(expected, streams, strict=True):
        assert killed.lines[-1] == "data: [DONE]"
        assert [uninterrupted.text(index) for index in range(2)] == [killed.text(index) for index in range(2)]
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("kill_engine", [signal.SIGKILL], indirect=True, ids=["killed"])
def test_request_fails_after_two_children_have_died_with_it(server: RealServer, kill_engine):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post_chat, server, GREEDY | ENDLESS)
        for restarts in range(2):
            while (child := server.running())["counts"]["restarts"] < restarts or not child["sequences"]:
                time.sleep(0.002)
            kill_during(server, kill_engine)
        response = answer.result()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "node_failed")
    wait_until_ready(server)
    assert not any(server.wait_until_at_rest().values())
