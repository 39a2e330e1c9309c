"""A real server in its own process, as a user starts it, and a few plain HTTP calls to it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from fairlead.base.config import demonstration_model

START_S = 90.0  # includes torch's first import from a cold disk on a loaded machine
TIMEOUT_S = 60.0  # for anything else on such a machine
READY = re.compile(r"(http://[\w.\[\]:]+)")


def until(holds: Callable[[], object], within_s: float = TIMEOUT_S) -> None:
    """Wait until the condition holds; fail after `within_s` seconds."""
    deadline, pause_s = time.monotonic() + within_s, 0.005
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.03)  # each check of a server takes some milliseconds of a core


class RealServer:
    """`fairlead serve` on a free port of loopback. `log` has the lines of its output so far.

    `reader` is the thread that collects them, until the output ends.
    """

    def __init__(
        self, process: subprocess.Popen[str], url: str, log: list[str], reader: threading.Thread
    ) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.reader = reader
        self.http = httpx.Client(base_url=url, timeout=60)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def queue(self) -> dict[str, float]:
        return self.http.get("/queue").json()

    def running(self) -> dict[str, Any]:
        """Return what `GET /running` says of the only model. Waits while it is not listed."""
        found: list[dict[str, Any]] = []
        until(lambda: found.extend(self.http.get("/running").json()) or found)
        return found[0]

    def counts(self) -> dict[str, float]:
        """Return the counts that must all be zero when no request is open."""
        queue, running = self.queue(), self.running()
        engine = running["engine"]
        return {
            "waiting": queue["waiting"],
            "running": queue["running"],
            "sequences": running["sequences"],
            "slots_taken": running["seats"] - engine["slots_free"],
            "blocks_taken": engine["blocks_total"] - engine["blocks_free"],
        }

    def wait_until_at_rest(self, within_s: float = TIMEOUT_S) -> dict[str, float]:
        """Return the counts once they are all zero, or as they are after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while any((counts := self.counts()).values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return counts

    def child_pids(self) -> set[int]:
        """Return the ids of the models' processes; one that tries grammars is none.

        Found by their parent's id, not by thread: when a thread ends, its children move to another.
        """
        children = set()
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has just ended
                _, parent, *_ = status.read_text().rpartition(")")[2].split()
                command = (status.parent / "cmdline").read_bytes()
                if int(parent) == self.process.pid and b"trial_process" not in command:
                    children.add(int(status.parent.name))
        return children

    def child_pid(self) -> int:
        """Return the id of the only model's process."""
        (pid,) = self.child_pids()
        return pid

    def stop(self, within_s: float = TIMEOUT_S) -> int:
        """Send SIGTERM, as a service manager does; return the exit code. The log is complete afterwards."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.reader.join(TIMEOUT_S)
        return code


def configured(
    folder: Path, model: dict[str, object], *, queue: dict[str, object] | None = None, **more: object
) -> tuple[str, str]:
    """Write a configuration file with the demonstration model and these settings; return the arguments.

    A test may stop the model's process for long: its watchdog and the queue timeout are one hour.
    """
    demonstration = {"path": str(demonstration_model()), "preload": True, "watchdog": "1h"}
    file = folder / "fairlead.yaml"
    settings = {
        "models": {"fairlead-demo": demonstration | model},
        "queue": {"timeout": "1h"} | (queue or {}),
    }
    file.write_text(json.dumps(settings | more))
    return "--config", str(file)


@contextlib.contextmanager
def real_server(
    *arguments: str,
    kind: str = "serve",
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[RealServer]:
    """Start a server, a `node` or a `front`, and wait for its ready line; end it afterwards.

    `prefix` is put before its command.
    """
    port = () if kind == "front" else ("--port", "0")  # its configuration has the port
    command = [*prefix, sys.executable, "-m", "fairlead", kind, *port, *arguments]
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
        server = RealServer(process, found[0], log, reader)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        reader.join(TIMEOUT_S)
        process.stdout.close()
        if server is not None:
            server.http.close()
