"""The router queue's stories 4 and 5 and its edge cases: a real server in front of three others.

Each runs in its own process. `stories/test_seed_000_router_queue.py` has all stories on a virtual clock.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.real_server import TIMEOUT_S, RealServer, real_server, until
from nodes.stub_server import text
from router.fleet.running_fleet import STUB

NODES = ("a", "b", "c")
CAPACITY = 2
LONG = {"delay_s": 600}
WORDS = 6


class NodesAndRouter:
    """Fairlead, the servers behind it, and clients. An answer takes as long as its request says."""

    def __init__(self, server: RealServer, servers: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
        self.server = server
        self.servers = servers
        self._blocked = folder / "hold"
        self._pool = ThreadPoolExecutor(16)
        self._client = httpx.Client(timeout=2 * TIMEOUT_S)

    @contextmanager
    def blocked_answers(self) -> Iterator[dict[str, Any]]:
        """Yield stub options that hold a plain answer, or the rest of a stream, until the block ends."""
        self._blocked.touch()
        try:
            yield {"held": str(self._blocked), "after": 3}
        finally:
            self._blocked.unlink()

    def submit_chat(self, *, stream: bool = False, **stub: Any) -> "Future[httpx.Response]":
        """Request a greedy answer in a thread."""
        body = {"model": "m", "messages": [], "temperature": 0, "stream": stream}
        body["stub"] = {"words": WORDS} | stub
        return self._pool.submit(self._client.post, f"{self.server.url}/v1/chat/completions", json=body)

    def get(self, path: str) -> Any:
        return self.server.http.get(path).json()

    def queue(self) -> tuple[int, int]:
        """Return how many jobs run and how many wait."""
        totals = self.get("/queue")
        return totals["running"], totals["waiting"]

    def nodes(self) -> dict[str, Any]:
        return {node["id"]: node for node in self.get("/nodes")}

    def busy(self) -> str:
        """Return the names of the nodes which have a job."""
        return "".join(sorted(name for name, node in self.nodes().items() if node["busy"]))

    def until(self, holds: Callable[[], bool]) -> None:
        until(holds)

    def collect_answers(self, **stub: Any) -> "list[Future[httpx.Response]]":
        """Give each of the three nodes a job."""
        answers = []
        for running in range(1, len(NODES) + 1):
            answers.append(self.submit_chat(**(stub or LONG)))
            self.until(lambda running=running: self.queue() == (running, 0))
        return answers

    def close(self) -> None:
        self._client.close()
        _end(self.servers)
        self._pool.shutdown()


def _end(servers: dict[str, subprocess.Popen[bytes]]) -> None:
    for process in servers.values():
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def running_router(folder: Path, **queue: Any) -> Iterator[NodesAndRouter]:
    servers = {name: subprocess.Popen([*STUB, "0"], stdout=subprocess.PIPE) for name in NODES}
    try:
        configuration = {
            "nodes": [
                {"id": name, "url": f"http://127.0.0.1:{_port(process)}", "models": ["m"]}
                for name, process in servers.items()
            ],
            # A node which is only slow does not fail three probes in a row.
            "healthCheck": {"interval": "50ms", "timeout": "2s"},
            "queue": {"capacity": CAPACITY, "timeout": "1h"} | queue,
        }
        file = folder / "fairlead.yaml"
        file.write_text(json.dumps(configuration))
        with real_server("--config", str(file)) as server:
            opened = NodesAndRouter(server, servers, folder)
            opened.until(lambda: {"up"} == {node["state"] for node in opened.nodes().values()})
            try:
                yield opened
            finally:
                opened.close()
    finally:
        _end(servers)


def _port(process: subprocess.Popen[bytes]) -> int:
    """Return the port on which a stub says that it listens."""
    assert process.stdout is not None
    return int(process.stdout.readline().split()[3].rstrip(b","))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesAndRouter]:
    """Shared by the tests which leave it unchanged, and by the last one, which does not."""
    with running_router(tmp_path_factory.mktemp("fleet")) as started:
        yield started


def content(response: httpx.Response) -> str:
    """Return the text of an answer, streamed or not."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        return response.json()["choices"][0]["message"]["content"]
    # A long wait adds comment lines, which are not events.
    *events, done = [line[6:] for line in response.text.splitlines() if line.startswith("data:")]
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"] for event in events]
    return "".join(choice["delta"].get("content", "") for (choice,) in filter(None, choices))


def test_stories_4_and_5_idle_nodes_first_then_the_queue_then_429(opened: NodesAndRouter):
    with opened.blocked_answers() as stub_options:
        # Story 5: each request goes to an idle node.
        opened.collect_answers(**stub_options)
        assert opened.busy() == "abc"
        # Story 4: no node has two jobs, and the other jobs are shown as waiting.
        waiting = [opened.submit_chat(delay_s=0) for _ in range(CAPACITY)]
        opened.until(lambda: opened.queue() == (len(NODES), CAPACITY))
        assert [(node["busy"], node["seats"]) for node in opened.nodes().values()] == [(1, 1)] * 3
        # Story 5: all nodes are busy and the queue is full.
        refused = opened.submit_chat().result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
    # Story 4: a waiting job is served when a node is free; its headers state the wait.
    for future in waiting:
        response = future.result()
        assert text(WORDS) == content(response)
        assert {"x-queue-position", "x-estimated-wait"} <= set(response.headers)
    opened.until(lambda: opened.queue() == (0, 0))
    assert opened.busy() == ""


def test_edge_jobs_of_a_node_that_hangs_are_answered_by_the_others(opened: NodesAndRouter):
    with opened.blocked_answers() as stub_options:
        answers = [opened.submit_chat(stream=stream, **stub_options) for stream in (True, False, True)]
        opened.until(lambda: opened.busy() == "abc")
        opened.servers["b"].send_signal(signal.SIGSTOP)
    assert [text(WORDS)] * 3 == [content(future.result()) for future in answers]
    assert opened.nodes()["b"]["state"] == "down"
    opened.servers["b"].send_signal(signal.SIGCONT)
    opened.until(lambda: opened.nodes()["b"]["state"] == "up")
    opened.until(lambda: opened.queue() == (0, 0))


def test_edge_jobs_wait_for_a_node_to_come_back_when_all_are_down(opened: NodesAndRouter):
    for process in opened.servers.values():
        process.send_signal(signal.SIGSTOP)
    opened.until(lambda: {"down"} == {node["state"] for node in opened.nodes().values()})
    answers = opened.submit_chat(stream=True)
    opened.until(lambda: opened.queue() == (0, 1))
    opened.servers["c"].send_signal(signal.SIGCONT)
    assert text(WORDS) == content(answers.result())
    for process in opened.servers.values():
        process.send_signal(signal.SIGCONT)
    opened.until(lambda: {"up"} == {node["state"] for node in opened.nodes().values()})


def test_edge_queue_timeout_of_a_stream_covers_the_time_to_its_first_chunk(tmp_path: Path):
    with running_router(tmp_path, timeout="1s") as opened:
        # On a slow node, or while it waits for one.
        for busy in (0, len(NODES)):
            late = opened.submit_chat(stream=True, **LONG).result()
            assert (late.status_code, late.json()["error"]["code"]) == (504, "queue_timeout")
            opened.until(lambda busy=busy: opened.queue() == (busy, 0))
            if not busy:
                opened.collect_answers()


def test_edge_running_and_waiting_jobs_of_a_crashed_node_move_to_the_others(opened: NodesAndRouter):
    with opened.blocked_answers() as stub_options:
        streams = [opened.submit_chat(stream=True, **stub_options) for _ in NODES]
        opened.until(lambda: opened.busy() == "abc")
        waiting = [opened.submit_chat(stream=stream, delay_s=0.02) for stream in (True, False)]
        opened.until(lambda: opened.queue()[1] == CAPACITY)
        opened.servers["a"].kill()
    assert [text(WORDS)] * 5 == [content(future.result()) for future in (*streams, *waiting)]
    opened.until(lambda: opened.nodes()["a"]["state"] == "down")
    assert text(WORDS) == content(opened.submit_chat().result())
    opened.until(lambda: opened.queue() == (0, 0))
