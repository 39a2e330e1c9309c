"""A model that two processes compute together: the same answers, and one node that ends and is restarted."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.real_server import RealServer, configured, real_server, until
from e2e.test_failover import Stream
from engine.worker.children import is_running

pytestmark = pytest.mark.slow
SEEDED = {"model": "fairlead-demo", "prompt": "Count", "max_tokens": 40, "ignore_eos": True, "seed": 7}
SCORED = {"model": "fairlead-demo", "prompt": "What is Fairlead?", "max_tokens": 8, "temperature": 0}
LETTERS = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 5, "maxItems": 5}


def served(tmp_path: Path, **settings: object) -> Any:
    return real_server(*configured(tmp_path, {"dtype": "float32", **settings}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with a model of two ranks. At the end it is killed, and both must end with it."""
    with served(tmp_path_factory.mktemp("server"), parallel=2, watchdog="4s") as server:
        yield server
        pids = [server.child_pid(), other_rank(server)]
        server.process.kill()
        until(lambda: not any(map(is_running, pids)))


def other_rank(server: RealServer) -> int:
    """Return the id of the process of rank 1."""
    [pid] = children(server.child_pid())
    return pid


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def answers(server: RealServer) -> list[Any]:
    """Return what a client gets that uses the engine in several ways; log-probabilities are rounded."""

    def post(**body: object) -> dict[str, Any]:
        response = httpx.post(f"{server.url}/v1/completions", json=SCORED | body, timeout=60)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice

    scored = post(echo=True, logprobs=2)
    values = [value and round(value, 2) for value in scored["logprobs"]["token_logprobs"]]
    constrained = post(structured_outputs={"json": LETTERS}, max_tokens=60)
    return [scored["text"], scored["logprobs"]["tokens"], values, constrained["text"]]


def test_answers_are_those_of_one_process(server: RealServer, tmp_path: Path):
    two = answers(server)
    with served(tmp_path) as one:
        assert two == answers(one)
        taken = one.http.get("/running").json()[0]["engine"]
    engine = server.running()["engine"]
    assert engine["kernel"] == "torch × 2"
    assert (engine["blocks_total"], engine["slots_free"]) == (taken["blocks_total"], taken["slots_free"])


def strike(server: RealServer, rank: int, number: signal.Signals = signal.SIGKILL) -> list[int]:
    """Send a rank a signal; return the ids of both."""
    pids = [server.child_pid(), other_rank(server)]
    os.kill(pids[rank], number)
    return pids


def stream_struck(server: RealServer, rank: int, number: signal.Signals) -> str:
    """Strike in the middle of a stream: both ranks end, and the next ones continue it. Return its text."""
    struck: list[int] = []
    stream = Stream().read(server, SEEDED, lambda: struck.extend(strike(server, rank, number)))
    assert stream.lines[-1] == "data: [DONE]"
    assert not any(map(is_running, struck))
    assert not any(server.wait_until_at_rest().values())
    return stream.text()


def test_killed_rank_ends_the_model_which_is_restarted_and_answers_again(server: RealServer):
    expected = Stream().read(server, SEEDED).text()
    # While idle; only these restarts have the delay, which doubles. A waiting stream loads the model at once.
    for rank in (0, 1):
        restarts = server.running()["counts"]["restarts"]
        struck = strike(server, rank)
        until(lambda done=restarts + 1: server.running()["counts"]["restarts"] == done)
        until(lambda: server.running()["state"] == "ready")
        assert not any(map(is_running, struck))
    for rank in (0, 1):
        assert expected == stream_struck(server, rank, signal.SIGKILL)
    assert expected == Stream().read(server, SEEDED).text()
    assert sum("rank 1 of 2 was killed by SIGKILL" in line for line in server.log) >= 2


def test_stopped_rank_ends_the_model_by_the_watchdog(server: RealServer):
    before = server.running()["counts"]["stuck"]
    expected = Stream().read(server, SEEDED).text()
    assert expected == stream_struck(server, 1, signal.SIGSTOP)
    assert server.running()["counts"]["stuck"] == before + 1
