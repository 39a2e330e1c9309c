"""The child dies or is stuck in the middle of its work: clients have their answers all the same."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.real_server import RealServer, real_server
from fairlead.config import demonstration_model

LONG = {"model": "fairlead-demo", "prompt": "Count", "max_tokens": 450, "ignore_eos": True}
GREEDY = LONG | {"temperature": 0}
SEEDED = LONG | {"temperature": 1.5, "seed": 7}
RANDOM = LONG | {"temperature": 1.5}


class Stream:
    """An answer as it comes. `on_text` is called when the first piece of it is there."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_whole = False

    def read(self, server: RealServer, body: dict[str, Any], on_text=lambda: None) -> "Stream":
        options = {"json": body | {"stream": True}, "timeout": 60}
        with httpx.stream("POST", f"{server.url}/v1/completions", **options) as response:
            assert 200 == response.status_code, response.read()
            try:
                for line in response.iter_lines():
                    self.lines += [line] if line else []
                    if 1 == len(self.lines) and line:
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


@pytest.fixture(
    params=[
        pytest.param(signal.SIGKILL, id="killed"),
        # It does not hear SIGTERM, so it is some seconds until it is gone.
        pytest.param(signal.SIGSTOP, id="stuck", marks=pytest.mark.slow),
    ]
)
def blow(request) -> signal.Signals:
    return request.param


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    """A server for each test, because a child that dies often comes back late; its watchdog is quick."""
    file = tmp_path / "fairlead.yaml"
    model = {"path": str(demonstration_model()), "watchdog": "500ms", "preload": True}
    file.write_text(json.dumps({"models": {"fairlead-demo": model}}))
    with real_server("--config", str(file)) as server:
        yield server


def strike(server: RealServer, blow: signal.Signals) -> None:
    os.kill(server.child_pid(), blow)


def wait_until_ready(server: RealServer) -> None:
    deadline = time.monotonic() + 60
    while server.http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(server: RealServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("body", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stream_that_can_be_repeated_is_whole_and_the_same_as_undisturbed(server: RealServer, body, blow):
    expected = Stream().read(server, body)
    struck = Stream().read(server, body, lambda: strike(server, blow))
    assert "data: [DONE]" == struck.lines[-1]
    assert expected.text() == struck.text()
    assert not any(server.wait_until_at_rest().values())


def test_a_random_stream_ends_with_an_error_and_a_cut(server: RealServer, blow):
    struck = Stream().read(server, RANDOM, lambda: strike(server, blow))
    assert not struck.is_whole
    assert "node_failed" == struck.events[-1]["error"]["code"]
    assert "data: [DONE]" not in struck.lines
    wait_until_ready(server)
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("body", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_plain_request_is_answered_by_the_next_child(server: RealServer, body, blow):
    with ThreadPoolExecutor(1) as pool:
        answer: Future[httpx.Response] = pool.submit(ask, server, body)
        while not server.running()["sequences"]:
            time.sleep(0.002)
        strike(server, blow)
        assert 200 == answer.result().status_code
    assert 450 == answer.result().json()["usage"]["completion_tokens"]
    assert 1 == server.running()["restarts"]
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_comes_to_a_child_that_does_not_answer_is_answered_by_the_next(
    server: RealServer, stream
):
    victim = server.child_pid()
    strike(server, signal.SIGSTOP)
    if stream:
        answer = Stream().read(server, RANDOM | {"max_tokens": 5})
        assert "data: [DONE]" == answer.lines[-1]
    else:
        assert 5 == ask(server, RANDOM | {"max_tokens": 5}).json()["usage"]["completion_tokens"]
    assert victim != server.child_pid()
    assert not any(server.wait_until_at_rest().values())


def test_every_choice_of_several_streams_goes_on_where_it_broke_off(server: RealServer, blow):
    bodies = [SEEDED | {"seed": 10 * number, "n": 2, "max_tokens": 200} for number in range(3)]
    expected = [Stream().read(server, body) for body in bodies]
    streams = [Stream() for _ in bodies]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(each.read, server, body) for each, body in zip(streams, bodies, strict=True)]
        while not all(len(each.lines) > 10 for each in streams):
            time.sleep(0.001)
        strike(server, blow)
        for run in runs:
            run.result()
    for undisturbed, struck in zip(expected, streams, strict=True):
        assert "data: [DONE]" == struck.lines[-1]
        assert [undisturbed.text(index) for index in range(2)] == [struck.text(index) for index in range(2)]
    assert not any(server.wait_until_at_rest().values())


def test_a_request_that_kills_every_child_is_given_up_after_two(server: RealServer):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, GREEDY)
        for restarts in range(2):
            while (child := server.running())["restarts"] < restarts or not child["sequences"]:
                time.sleep(0.002)
            strike(server, signal.SIGKILL)
        told = answer.result()
    assert (502, "node_failed") == (told.status_code, told.json()["error"]["code"])
    wait_until_ready(server)
    assert not any(server.wait_until_at_rest().values())
