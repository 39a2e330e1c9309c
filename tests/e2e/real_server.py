"""A real server in its own process, as a user starts it, and a few plain HTTP calls to it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

START_S = 90.0  # with torch's first import from a cold disk on a loaded machine
READY = re.compile(r"(http://[\w.\[\]:]+)")


class RealServer:
    """`fairlead serve` on a free port of loopback. `log` is what it wrote on stderr so far."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.http = httpx.Client(base_url=url, timeout=60)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def queue(self) -> dict[str, float]:
        return self.http.get("/queue").json()

    def running(self) -> dict[str, float]:
        """What `GET /running` says of the one model."""
        answer = self.http.get("/running").json()
        return answer[0]

    def counts(self) -> dict[str, float]:
        """Everything that must be back at rest when nobody asks for anything."""
        queue, running = self.queue(), self.running()
        return {
            "waiting": queue["waiting"],
            "running": queue["running"],
            "sequences": running["sequences"],
            "slots_taken": running["seats"] - running["slots_free"],
            "blocks_taken": running["blocks_total"] - running["blocks_free"],
        }

    def wait_until_at_rest(self, within_s: float = 20.0) -> dict[str, float]:
        """Return the counts once they are all zero, or as they are when time is up."""
        deadline = time.monotonic() + within_s
        while any((counts := self.counts()).values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return counts

    def child_pids(self) -> set[int]:
        """The models' processes, whichever of the server's threads started them."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return {int(pid) for thread in threads for pid in thread.read_text().split()}

    def child_pid(self) -> int:
        """The model's process, where there is but one."""
        (pid,) = self.child_pids()
        return pid

    def stop(self, within_s: float = 20.0) -> int:
        """Ask it to end, as a service manager does; return its exit code."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextlib.contextmanager
def real_server(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[RealServer]:
    """Start a server, wait for its ready line, and end it afterwards."""
    command = [sys.executable, "-m", "fairlead", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"NO_COLOR": "1"} | (environment or {}),
    )
    log: list[str] = []
    ready = threading.Event()
    found: list[str] = []
    server: RealServer | None = None

    assert process.stdout is not None

    def read() -> None:
        for line in process.stdout:
            log.append(line)
            if not ready.is_set() and "ready" in line and (match := READY.search(line)):
                found.append(match[1])
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(START_S)
        assert found, "".join(log)
        server = RealServer(process, found[0], log)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        reader.join(5)
        process.stdout.close()
        if server is not None:
            server.http.close()
