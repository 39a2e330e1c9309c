"""A server with few file descriptors, and clients which would use all of them."""

import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from e2e.real_server import RealServer, configured, real_server, until

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit and /proc")

ASK = {"model": "fairlead-demo", "prompt": "Count", "max_tokens": 2}


def limited(limit: str) -> tuple[str, ...]:
    """Return a prefix for a command, which runs it under this `ulimit`."""
    return ("sh", "-c", f'ulimit {limit}; exec "$@"', "sh")


@contextmanager
def silent_clients(server: RealServer, count: int) -> Iterator[None]:
    """Open connections that send nothing; some may be refused. The server has handled all of them."""
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(60)
            with suppress(ConnectionError):
                sock.connect(server.address)
        server.http.get("/health").raise_for_status()
        yield


def open_files(server: RealServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def status_of_chat(server: RealServer) -> int:
    return server.http.post("/v1/completions", json=ASK).status_code


def events(server: RealServer, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def loads_and_restarts(server: RealServer) -> None:
    """Load the model, kill its process, and check that it is loaded again."""
    assert status_of_chat(server) == 200
    first = server.child_pid()
    os.kill(first, signal.SIGKILL)
    until(lambda: server.http.get("/ready").status_code == 200 and server.child_pids() - {first})
    assert status_of_chat(server) == 200


def test_server_with_few_descriptors_loads_and_restarts_beside_more_clients_than_fit(tmp_path: Path):
    arguments = (*configured(tmp_path, {"preload": False}), "--log-json")
    with real_server(*arguments, prefix=limited("-n 256")) as server:
        server.http.get("/health").raise_for_status()  # this connection is kept open
        with silent_clients(server, 400):
            loads_and_restarts(server)
        (line,) = events(server, "fewer connections than configured: the limit of open files is low")
        assert (line["configured"], line["descriptors"]) == (4096, 256)
        assert line["connections"] * 2 + line["reserved"] <= 256
        assert server.stop() == 0


def test_soft_limit_is_raised_and_a_load_without_descriptors_fails_alone(tmp_path: Path):
    arguments = (*configured(tmp_path, {"preload": False}), "--log-json")
    with real_server(*arguments, prefix=limited("-S -n 128")) as server:
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, 1 << 20)
        with silent_clients(server, 200):
            assert open_files(server) > 200
            # As if all other descriptors were in use.
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (open_files(server), hard))
            assert status_of_chat(server) == 502
            assert server.http.get("/health").status_code == 200
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
            loads_and_restarts(server)
        assert server.stop() == 0
        assert "Too many open files" in str(events(server, "load failed")[0]["reason"])
        assert not [line for line in server.log if "Traceback" in line]
