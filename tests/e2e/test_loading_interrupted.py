"""A real server is interrupted while it loads its only model for the first time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from e2e.real_server import TIMEOUT_S, configured, until
from router.fleet.running_fleet import free_port

MODEL = {"model": "fairlead-demo"}
ASK = MODEL | {"prompt": "Count", "max_tokens": 2}


class Loading:
    """A running server with a model process that SIGSTOP stopped before it could load anything."""

    def __init__(self, process: subprocess.Popen[bytes], http: httpx.Client) -> None:
        self.process = process
        self.http = http
        self.child = 0
        until(self._has_child)
        os.kill(self.child, signal.SIGSTOP)

    def _has_child(self) -> bool:
        assert self.process.poll() is None
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = int(status.read_text().rpartition(")")[2].split()[1])
                command = (status.parent / "cmdline").read_bytes()
                if parent == self.process.pid and b"fairlead.engine.worker.main" in command:
                    self.child = int(status.parent.name)
        return bool(self.child)

    def is_ready(self) -> bool:
        return self.http.get("/ready").status_code == 200


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Loading]:
    port = free_port()
    configuration = configured(tmp_path, {}, limits={"drain": "1h"})
    command = [sys.executable, "-m", "fairlead", "serve", "--port", str(port), *configuration]
    with (
        _ended(subprocess.Popen(command)) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as http,
    ):
        yield Loading(process, http)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_server_survives_the_unload_of_its_loading_model_and_loads_it_again(loading: Loading):
    loading.http.post("/models/unload", json=MODEL).raise_for_status()
    assert not Path(f"/proc/{loading.child}").exists()
    assert loading.http.get("/running").json() == []
    assert not loading.is_ready()
    assert loading.http.get("/health").status_code == 200
    loading.http.post("/v1/completions", json=ASK).raise_for_status()
    assert loading.is_ready()
    loading.process.send_signal(signal.SIGTERM)
    assert loading.process.wait(TIMEOUT_S) == 0


def test_request_that_waits_for_an_unloaded_model_gets_409_and_may_be_repeated(loading: Loading):
    with ThreadPoolExecutor(2) as pool:
        bodies = [ASK | {"stream": stream} for stream in (False, True)]
        waiting = [pool.submit(loading.http.post, "/v1/completions", json=body) for body in bodies]
        until(lambda: loading.http.get("/queue").json()["waiting"] == 2)
        loading.http.post("/models/unload", json=MODEL).raise_for_status()
    for refused in (each.result() for each in waiting):
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "unloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert loading.http.get("/queue").json()["waiting"] == 0
    assert loading.http.post("/v1/completions", json=ASK).status_code == 200


def test_request_that_waits_for_a_model_stays_queued_when_the_unload_waits(loading: Loading):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loading.http.post, "/v1/completions", json=ASK)
        until(lambda: loading.http.get("/queue").json()["waiting"] == 1)
        loading.http.post("/models/unload?wait=true", json=MODEL).raise_for_status()
        assert waiting.result().status_code == 200
    assert not Path(f"/proc/{loading.child}").exists()


@pytest.mark.parametrize("target", ["the server", "all its processes"])
def test_server_that_receives_sigterm_does_not_wait_for_a_load(loading: Loading, target):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loading.http.post, "/v1/completions", json=ASK)
        until(lambda: loading.http.get("/queue").json()["waiting"] == 1)
        loading.process.send_signal(signal.SIGTERM)
        if target != "the server":
            os.kill(loading.child, signal.SIGTERM)
            os.kill(loading.child, signal.SIGCONT)
        assert waiting.result().status_code == 503
    assert loading.process.wait(TIMEOUT_S) == 0  # although the drain timeout is an hour
    assert not Path(f"/proc/{loading.child}").exists()


def test_process_that_is_suspended_while_it_loads_ends_with_its_server(loading: Loading):
    os.kill(loading.child, signal.SIGCONT)
    until(lambda: b"_cext" in Path(f"/proc/{loading.child}/maps").read_bytes())  # it has begun to load
    os.kill(loading.child, signal.SIGSTOP)
    loading.process.kill()
    loading.process.wait()

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{loading.child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(is_gone)
