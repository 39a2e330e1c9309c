"""A configuration changes under fifty running streams: none is disturbed, and the change takes effect."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.real_server import TIMEOUT_S, RealServer, real_server, until
from e2e.slow_motion import slowed
from fairlead.base.config import demonstration_model

STREAMS = 50
UNCHANGED, REMOVED, ADDED = "sk-staying", "sk-leaving", "sk-coming"
# Each is sent to both models, which answer alike because they have the same weights.
BODIES = [
    {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, **choice}
    for prompt in ("Count from 1 to 90.", "What is Fairlead?", "Who waits?", "Two and two", "The queue")
    for choice in ({"temperature": 0}, {"temperature": 1.2, "seed": 5})
]


class File:
    """The server's configuration with two models and two keys."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *, key: str, slots: str = "25", server: RealServer | None = None) -> None:
        """Rewrite the file, and send SIGHUP to the server; `slots` are those of the model `changing`."""
        folder = json.dumps(str(demonstration_model()))
        replace(
            self.path,
            f"apiKeys: [{UNCHANGED}, {key}]\n"
            "models:\n"
            f"  steady: {{path: {folder}, slots: 25, preload: true, watchdog: 1h}}\n"
            "  changing:\n"
            f"    path: {folder}\n"
            "    preload: true\n"
            "    watchdog: 1h\n"
            f"    slots: {slots}\n"
            "queue: {timeout: 1h}\n",
        )
        if server is not None:
            server.process.send_signal(signal.SIGHUP)


def replace(path: Path, text: str) -> None:
    """Write a file atomically: half a file would be another configuration."""
    again = path.with_suffix(".again")
    again.write_text(text)
    again.replace(path)


@pytest.fixture
def file(tmp_path: Path) -> File:
    file = File(tmp_path / "fairlead.yaml")
    file.write(key=REMOVED)
    return file


@pytest.fixture
def server(file: File) -> Iterator[RealServer]:
    with real_server("--config", str(file.path), "--log-json") as server:
        server.http.headers["Authorization"] = f"Bearer {UNCHANGED}"
        yield server


def stream(server: RealServer, body: dict[str, Any], key: str, begun: list[str]) -> str:
    """Return the text of a complete answer. Appends its first event to `begun` when that arrives."""
    options = {"json": body | {"stream": True}, "headers": {"Authorization": f"Bearer {key}"}}
    pieces: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", timeout=TIMEOUT_S, **options) as response:
        assert response.status_code == 200, response.read()
        # A long wait adds comment lines, which are not events.
        events = (line for line in response.iter_lines() if line.startswith("data:"))
        lines = list(_collect_lines(events, begun))
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        pieces += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
    return "".join(pieces)


def _collect_lines(lines: Iterator[str], begun: list[str]) -> Iterator[str]:
    first = next(lines)
    begun.append(first)
    yield first
    yield from lines


def is_accepted(server: RealServer, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=TIMEOUT_S)
    assert reply.status_code in (200, 401)
    return reply.status_code == 200


def reasons(server: RealServer) -> list[str]:
    """Return the logged reasons why configurations were not reloaded."""
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    return [line["reason"] for line in lines if line["event"] == "configuration not reloaded"]


def states(server: RealServer) -> dict[str, tuple[str, int]]:
    return {each["model"]: (each["state"], each["seats"]) for each in server.http.get("/running").json()}


def test_reload_does_not_disturb_clients(file: File, server: RealServer):
    pids = server.child_pids()
    requests = [
        (body | {"model": model}, (UNCHANGED, REMOVED)[number % 2])
        for number in range(STREAMS // len(BODIES))
        for body, model in zip(BODIES, ["steady", "changing"] * 5, strict=True)
    ]
    begun: list[str] = []
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        expected = list(
            pool.map(lambda body: stream(server, body | {"model": "steady"}, UNCHANGED, []), BODIES)
        )
        with ExitStack() as slow:
            # Stopped until all requests have arrived, and again after their first events. So all of them
            # run, and none ends, while the configuration changes.
            slowed_processes = [slow.enter_context(slowed(pid, run_s=0.003, rest_s=0.06)) for pid in pids]
            for each in slowed_processes:
                each.set()
            answers = [pool.submit(stream, server, body, key, begun) for body, key in requests]
            until(lambda: server.queue()["running"] == STREAMS)
            for each in slowed_processes:
                each.clear()
            until(lambda: len(begun) == STREAMS)
            for each in slowed_processes:
                each.set()
            assert server.queue()["running"] == STREAMS

            file.write(key=ADDED, slots="-3", server=server)
            until(lambda: reasons(server))
            (reason,) = reasons(server)
            assert f"{file.path}:8: models.changing.slots: " in reason
            assert (is_accepted(server, REMOVED), is_accepted(server, ADDED)) == (True, False)

            file.write(key=ADDED, slots="7", server=server)
            until(lambda: is_accepted(server, ADDED))
            assert not is_accepted(server, REMOVED)
            assert pids == server.child_pids()
            assert server.queue()["running"] == STREAMS
            # This request waits for the model with its new settings.
            later = pool.submit(stream, server, BODIES[0] | {"model": "changing"}, ADDED, [])
            until(lambda: server.queue()["waiting"])
        texts = [answer.result() for answer in answers]
        assert expected * (STREAMS // len(BODIES)) == texts
        assert expected[0] == later.result()

    until(lambda: states(server) == {"steady": ("ready", 25), "changing": ("ready", 7)})
    assert len(pids & server.child_pids()) == 1
    assert len(server.child_pids()) == 2
    loads = {each["model"]: each["counts"]["loads"] for each in server.http.get("/running").json()}
    assert loads == {"steady": 1, "changing": 2}
    assert len(reasons(server)) == 1


def test_watched_file_is_read_again_after_each_change(tmp_path: Path):
    path = tmp_path / "fairlead.yaml"

    def write(key: str, capacity: int) -> None:
        node = "{id: remote, url: 'http://127.0.0.1:9', models: [remote]}"
        replace(path, f"apiKeys: [{UNCHANGED}, {key}]\nnodes: [{node}]\nqueue: {{capacity: {capacity}}}\n")

    write(REMOVED, 10)
    with real_server("--config", str(path), "--log-json", "--watch-config") as server:
        write(ADDED, -1)
        until(lambda: reasons(server))
        assert f"{path}:3: queue.capacity: " in reasons(server)[0]
        assert (is_accepted(server, REMOVED), is_accepted(server, ADDED)) == (True, False)
        write(ADDED, 11)
        until(lambda: is_accepted(server, ADDED))
        assert not is_accepted(server, REMOVED)
        assert is_accepted(server, UNCHANGED)
        assert len(reasons(server)) == 1
