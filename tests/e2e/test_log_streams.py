"""A real server with a standard error that is never read, is full, or must be JSON from the first line on."""

import contextlib
import fcntl
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from e2e.real_server import READY, START_S, TIMEOUT_S, until

FAIRLEAD_SERVE = (sys.executable, "-m", "fairlead", "serve")
SERVE = (*FAIRLEAD_SERVE, "--port", "0")
CHAT = {"model": "fairlead-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
NO_SUCH_MODEL = {"model": "stranger", "messages": [{"role": "user", "content": "Hi"}]}


class Server:
    """A server's process, and a client for the URL on its standard output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        found = READY.search(line)
        assert found, line
        self.http = httpx.Client(base_url=found[1], timeout=TIMEOUT_S)

    def dropped(self) -> int:
        text = self.http.get("/metrics").text
        found = re.search(r"^fairlead_log_lines_dropped_total ([\d.e+]+)", text, re.MULTILINE)
        assert found
        return int(float(found[1]))

    def refuse(self, times: int) -> None:
        """Request an unknown model so many times on one connection; each refusal is a line of the log."""
        body = json.dumps(NO_SUCH_MODEL).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        url = self.http.base_url
        with socket.create_connection((url.host, url.port), timeout=TIMEOUT_S) as sock:
            for _ in range(times):
                sock.sendall(head.encode() + body)
                answer = sock.recv(65536)
                while not answer.endswith(b"}}"):
                    answer += sock.recv(65536)
                assert answer.startswith(b"HTTP/1.1 404"), answer

    def stop(self) -> int:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


@contextlib.contextmanager
def serving(stderr: int, *arguments: str) -> Iterator[Server]:
    process = subprocess.Popen(
        [*SERVE, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    watchdog = threading.Timer(START_S + 2 * TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        yield Server(process)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def quick_server(tmp_path: Path) -> tuple[str, str]:
    """Return the arguments for a server that loads no model."""
    file = tmp_path / "fairlead.yaml"
    file.write_text("nodes: [{id: remote, url: 'http://127.0.0.1:9', models: [remote]}]\n")
    return "--config", str(file)


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Yield a full pipe: its ends for reading and for writing."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    same = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)  # only this one does not block
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(same, b"\n" * 512)
    os.close(same)
    yield reading, writing
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_log_that_is_never_read_does_not_block_the_server(full_pipe):
    _, writing = full_pipe
    with serving(writing) as server:
        server.refuse(1000)
        assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert server.stop() == 0


def test_server_runs_with_its_log_on_a_full_device(quick_server):
    with Path("/dev/full").open("w") as full, serving(full.fileno(), *quick_server) as server:
        assert server.http.post("/v1/chat/completions", json=NO_SUCH_MODEL).status_code == 404
        assert server.stop() == 0


def test_log_at_its_size_limit_does_not_make_a_clean_stop_a_failure(tmp_path, quick_server):
    log = tmp_path / "log"
    with log.open("w") as file, serving(file.fileno(), *quick_server) as server:
        until(lambda: log.stat().st_size > 0)
        limit = log.stat().st_size + 10
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        for _ in range(5):
            assert server.http.post("/v1/chat/completions", json=NO_SUCH_MODEL).status_code == 404
        until(lambda: log.stat().st_size == limit)
        assert server.http.get("/health").status_code == 200
        assert server.stop() == 0


def test_server_runs_with_a_closed_standard_error(quick_server):
    command = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *SERVE, *quick_server]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    with process:
        server = Server(process)
        assert server.http.post("/v1/chat/completions", json=NO_SUCH_MODEL).status_code == 404
        assert server.stop() == 0


# Output of child processes ----------------------------------------------------------------------------

# Answers every request; `print_much` prints in a thread.
NOISY_SCRIPT = """
import http.server, os, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
threading.Thread(target=print_much, daemon=True).start()
server.serve_forever()
"""
ONCE = """
def print_much(): print("a line of its own", flush=True)
"""
WITHOUT_END = """
def print_much():
    while True: os.write(1, b"x\\n" * 30_000)
"""


def noisy_command(folder: Path, print_much: str, *, settings: str = "") -> tuple[str, str]:
    """Return the arguments for a server with a command named `talker` that prints."""
    (folder / "talker.py").write_text(print_much + NOISY_SCRIPT)
    file = folder / "fairlead.yaml"
    command = f"{sys.executable} -IS {folder / 'talker.py'} ${{PORT}}"
    file.write_text(f"{settings}models: {{talker: {{cmd: '{command}', preload: true}}}}\n")
    return "--config", str(file)


def test_child_that_floods_an_unread_log_keeps_working(full_pipe, tmp_path):
    reading, writing = full_pipe
    with serving(writing, *noisy_command(tmp_path, WITHOUT_END)) as server:
        until(lambda: server.dropped() > 100_000)
        for _ in range(10):
            body = NO_SUCH_MODEL | {"model": "talker"}
            assert server.http.post("/v1/chat/completions", json=body).status_code == 200

        received = bytearray()

        def drain() -> None:
            while b"log lines dropped" not in received:
                received.extend(os.read(reading, 65536))

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        reader.join(TIMEOUT_S)
        assert re.search(rb"log lines dropped +lines=\d{5}", received)
        assert server.stop() == 0  # with a log that is full again


# JSON -------------------------------------------------------------------------------------------------


def ended(arguments: Sequence[str]) -> tuple[int, list[dict]]:
    """Run a server that cannot start; return its exit code and the JSON objects of its log."""
    ran = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert ran.stdout == ""
    return ran.returncode, [json.loads(line) for line in ran.stderr.splitlines()]


def test_every_line_of_a_json_log_is_an_object_from_the_start_to_the_end(tmp_path):
    settings = "logJson: true\nlogToStdout: both\napiKeys: [sk-1]\n"
    process = subprocess.Popen(
        [*SERVE, *noisy_command(tmp_path, ONCE, settings=settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        events: list[dict] = []
        for line in process.stderr:
            events.append(json.loads(line))
            if events[-1]["event"] == "ready":
                reply = httpx.post(f"{events[-1]['url']}/v1/chat/completions", json=NO_SUCH_MODEL)
                assert reply.status_code == 401
                process.send_signal(signal.SIGHUP)
            if events[-1]["event"] == "note on the configuration":
                process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(TIMEOUT_S) == 0
    assert all({"event", "level", "timestamp"} <= set(event) for event in events)
    assert {"loading", "ready", "stopping"} <= {event["event"] for event in events}
    assert [event["line"] for event in events if event.get("source") == "talker"] == ["a line of its own"]
    assert any("chmod 600" in event["event"] for event in events)


def test_server_that_cannot_start_reports_the_reason_in_json(tmp_path, quick_server):
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as read_lines:
        port = str(read_lines.getsockname()[1])
        code, events = ended([*FAIRLEAD_SERVE, *quick_server, "--log-json", "--port", port])
    assert (code, port in events[-1]["reason"]) == (1, True)
    code, events = ended([*SERVE, "--log-json", str(tmp_path / "empty")])
    assert (code, "config.json" in events[-1]["reason"]) == (1, True)
    code, events = ended([*SERVE, "--log-json", "--slots", "0"])
    assert (code, "--slots" in events[-1]["event"]) == (2, True)


CRASH = """
import sys
import fairlead.server.app
from fairlead.server.cli import main
async def serve(*_, **__):
    raise ZeroDivisionError("a bug")
fairlead.server.app.serve = serve
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("arguments", [[], ["--log-json"]], ids=["plain", "json"])
def test_crash_shows_its_traceback(arguments, quick_server):
    command = [sys.executable, "-c", CRASH, *quick_server, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert ran.returncode == 1
    if arguments:
        (event,) = map(json.loads, ran.stderr.splitlines())
        assert (event["level"], "ZeroDivisionError: a bug" in event["exception"]) == ("critical", True)
    else:
        assert "Traceback" in ran.stderr
        assert "ZeroDivisionError: a bug" in ran.stderr


def test_crash_ends_the_process_although_its_traceback_is_not_read(full_pipe, quick_server):
    _, writing = full_pipe
    command = [sys.executable, "-c", CRASH, *quick_server]
    assert subprocess.run(command, stderr=writing, timeout=START_S, check=False).returncode == 1
