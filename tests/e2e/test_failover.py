"""The model's process dies or is stuck in the middle of its work; clients still get their answers."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from e2e.own_copy import own_copy
from e2e.real_server import TIMEOUT_S, RealServer, configured, real_server, until
from e2e.slow_motion import slowed

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
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SEVERAL = [SEEDED | {"seed": 10 * number, "n": 2, "max_tokens": 300} for number in range(3)]
STREAMS = {
    "greedy": (COMPLETIONS, GREEDY),
    "seeded": (COMPLETIONS, SEEDED),
    "text": (COMPLETIONS, CONSTRAINED | {"prompt": "Count", "structured_outputs": {"json": NUMBERS}}),
    "call": (CHAT, CONSTRAINED | CALLS),
    **{f"several {number}": (COMPLETIONS, body) for number, body in enumerate(SEVERAL)},
}
ATTEMPTS = 5


class Stream:
    """Reads a streamed answer. Calls `on_text` when its event number `begun_at` arrives."""

    def __init__(self, path: str = COMPLETIONS, begun_at: int = 1) -> None:
        self.path = path
        self.begun_at = begun_at
        self.lines: list[str] = []
        self.is_whole = False

    def read(self, server: RealServer, body: dict[str, Any], on_text=lambda: None) -> "Stream":
        options = {"json": body | {"stream": True}, "timeout": 2 * TIMEOUT_S}
        with httpx.stream("POST", f"{server.url}{self.path}", **options) as response:
            assert response.status_code == 200, response.read()
            try:
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        self.lines.append(line)
                        if len(self.lines) == self.begun_at:
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


Client = Callable[[Callable[[], None]], Any]


def struck_midway(
    server: RealServer, number: signal.Signals, clients: dict[str, Client], sequences: int
) -> dict[str, Any]:
    """Run all clients at the same time; kill or stop the child in the middle. Return what they return.

    A client calls its argument when it has begun. Until all have, the child is slowed down: to make the
    grammars of some may take longer than the whole answers of others. If a sequence has ended before the
    strike all the same, all clients are run again.
    """
    with ThreadPoolExecutor(len(clients)) as pool:
        for _ in range(ATTEMPTS):
            child = server.child_pid()
            with slowed(child, run_s=0.01):
                runs = _begun(pool, server, clients, sequences)
            os.kill(child, signal.SIGSTOP)
            if server.running()["sequences"] == sequences:
                break
            os.kill(child, signal.SIGCONT)
            for run in runs.values():
                run.result()
        else:
            pytest.fail(f"sequences had ended before the strike, {ATTEMPTS} times")
        os.kill(child, number)
        return {name: run.result() for name, run in runs.items()}


def _begun(
    pool: ThreadPoolExecutor, server: RealServer, clients: dict[str, Client], sequences: int
) -> dict[str, Future[Any]]:
    """Start the clients; return when all have begun, or one has ended."""
    begun: list[None] = []
    runs = {name: pool.submit(client, lambda: begun.append(None)) for name, client in clients.items()}

    def has_ended() -> bool:
        return any(run.done() for run in runs.values())

    until(lambda: len(begun) == len(runs) or has_ended())
    until(lambda: server.running()["sequences"] == sequences or has_ended())
    return runs


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stuck", marks=pytest.mark.slow),
    ],
)
def kill_engine(request) -> signal.Signals:
    return request.param


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, kill_engine: signal.Signals) -> Iterator[RealServer]:
    """A server. Its child is killed or stopped a few times, and the delay of a restart doubles each time.

    Its watchdog's bound is short where a test waits for it, but long enough for a slow machine.
    """
    folder = tmp_path_factory.mktemp("server")
    model = {"path": str(own_copy(folder / "model", max_position_embeddings=CONTEXT)), "slots": 16}
    quick = {"watchdog": "4s"} if kill_engine is signal.SIGSTOP else {}
    with real_server(*configured(folder, model | quick)) as server:
        yield server


class Struck(NamedTuple):
    """What clients get from a child that ends in the middle of all answers, and the undisturbed streams."""

    expected: dict[str, Stream]
    answers: dict[str, Any]
    retries: float

    def whole_stream(self, name: str) -> tuple[Stream, Stream]:
        """Return the undisturbed and the interrupted stream, which must have its end."""
        stream = self.answers[name]
        assert stream.lines[-1] == "data: [DONE]"
        return self.expected[name], stream


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Stream]:
    """Keep the streams of the first server for the other ones: all have the same model."""
    return {}


@pytest.fixture(scope="module")
def struck(server: RealServer, kill_engine: signal.Signals, undisturbed: dict[str, Stream]) -> Struck:
    """Strike while the child generates 13 sequences for 9 clients."""
    if not undisturbed:
        with ThreadPoolExecutor(len(STREAMS)) as pool:
            runs = {
                name: pool.submit(Stream(path).read, server, body) for name, (path, body) in STREAMS.items()
            }
        undisturbed.update({name: run.result() for name, run in runs.items()})

    def stream(path: str, body: dict[str, Any]) -> Client:
        return lambda begin: Stream(path, begun_at=10).read(server, body, begin)

    def plain(body: dict[str, Any]) -> Client:
        return lambda begin: (begin(), post_completion(server, body))[1]

    clients = {name: stream(path, body) for name, (path, body) in STREAMS.items()}
    clients["random"] = stream(COMPLETIONS, RANDOM | ENDLESS)
    clients["plain greedy"] = plain(GREEDY)
    clients["plain random"] = plain(RANDOM)
    before = retries(server)
    answers = struck_midway(server, kill_engine, clients, sequences=len(clients) + len(SEVERAL))
    wait_until_ready(server)
    return Struck(undisturbed, answers, retries(server) - before)


def wait_until_ready(server: RealServer) -> None:
    until(lambda: server.http.get("/ready").status_code == 200)


def post_completion(server: RealServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=2 * TIMEOUT_S)


def retries(server: RealServer) -> float:
    """Return how many jobs were retried."""
    metrics = server.http.get("/metrics").text
    found = re.findall(r"^fairlead_retries_total\{.*\} (.+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_stream_that_can_be_repeated_is_whole_and_the_same_as_undisturbed(struck: Struck, name):
    expected, stream = struck.whole_stream(name)
    assert expected.text() == stream.text()
    assert len(expected.text()) > 100


def test_constrained_text_resumes_where_it_stopped(struck: Struck):
    expected, stream = struck.whole_stream("text")
    assert expected.text() == stream.text()
    assert len(json.loads(stream.text())["numbers"]) == 150


def test_constrained_call_resumes_where_it_stopped(struck: Struck):
    expected, stream = struck.whole_stream("call")
    assert expected.arguments == stream.arguments
    assert len(json.loads(stream.arguments)["numbers"]) == 150


def test_random_stream_ends_with_an_error_and_a_cut(struck: Struck):
    stream = struck.answers["random"]
    assert not stream.is_whole
    assert stream.events[-1]["error"]["code"] == "node_failed"
    assert "data: [DONE]" not in stream.lines


@pytest.mark.parametrize("name", ["plain greedy", "plain random"])
def test_plain_request_is_answered_by_the_next_child(struck: Struck, name):
    answer = struck.answers[name]
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 450


def test_every_choice_of_several_streams_resumes_where_it_stopped(struck: Struck):
    for number in range(len(SEVERAL)):
        expected, stream = struck.whole_stream(f"several {number}")
        assert [expected.text(index) for index in range(2)] == [stream.text(index) for index in range(2)]


def test_each_job_but_the_random_stream_was_retried_once_and_has_freed_everything(
    struck: Struck, server: RealServer
):
    assert struck.retries == len(STREAMS) + 2
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("kill_engine", [signal.SIGSTOP], indirect=True, ids=["stuck"])
def test_request_to_a_stuck_child_is_answered_by_the_next_one(server: RealServer, kill_engine):
    # Before its first answer, a child has twice the watchdog's bound.
    assert post_completion(server, GREEDY | {"max_tokens": 1}).json()["usage"]["completion_tokens"] == 1
    stopped_pid = server.child_pid()
    os.kill(stopped_pid, kill_engine)
    body = RANDOM | {"max_tokens": 5}
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(Stream().read, server, body)
        plain = pool.submit(post_completion, server, body)
    assert stream.result().lines[-1] == "data: [DONE]"
    assert plain.result().json()["usage"]["completion_tokens"] == 5
    assert stopped_pid != server.child_pid()
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("kill_engine", [signal.SIGKILL], indirect=True, ids=["killed"])
def test_request_fails_after_two_children_have_died_with_it(server: RealServer, kill_engine):
    before = server.running()["counts"]["restarts"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post_completion, server, GREEDY | ENDLESS)
        for restarts in range(2):
            until(
                lambda least=before + restarts: (
                    (child := server.running())["counts"]["restarts"] >= least and child["sequences"]
                )
            )
            os.kill(server.child_pid(), kill_engine)
        response = answer.result()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "node_failed")
    # Without the delay of a third restart.
    server.http.post("/models/load", json={"model": LONG["model"]}).raise_for_status()
    assert not any(server.wait_until_at_rest().values())
