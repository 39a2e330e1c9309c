"""`fairlead.asgi` under an unmodified Hypercorn, in separate processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from e2e.real_server import START_S, TIMEOUT_S, RealServer

RUNNING = re.compile(r"Running on (http://\S+)")
ENGINE = b"fairlead.engine.worker.main"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "asgi.md"


class StockServer(RealServer):
    """Hypercorn's parent process, its worker with our application, and the worker's model processes."""

    def child_pids(self) -> set[int]:
        """Return the ids of the models' processes, which are the worker's children."""
        return {pid for pid in descendants(self.process.pid) if ENGINE in command_line(pid)}


def documented(name: str) -> str:
    """Return the example program of that name from the documentation."""
    _, found, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"```python\n# {name}:")
    assert found, f"{DOCUMENT} has no {name}"
    return "#" + rest.partition("```")[0]


def descendants(pid: int) -> set[int]:
    """Return the ids of all descendants of a process."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def command_line(pid: int) -> bytes:
    """Return a process's arguments; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.contextmanager
def stock_hypercorn(
    *options: str, application: str = "fairlead.asgi:app", command: tuple[str, ...] = (), **environment: str
) -> Iterator[StockServer]:
    """Start Hypercorn, or the program `command`, on a free port; wait until it runs; end it afterwards."""
    hypercorn = ("-m", "hypercorn", "--worker-class", "trio", "--bind", "127.0.0.1:0", *options, application)
    process = subprocess.Popen(
        [sys.executable, *(command or hypercorn)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"NO_COLOR": "1"} | environment,
    )
    log: list[str] = []
    running = threading.Event()
    found: list[str] = []
    assert process.stdout is not None

    def read() -> None:
        for line in process.stdout:
            log.append(line)
            if not found and (match := RUNNING.search(line)):
                found.append(match[1])
                running.set()
        running.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    server: StockServer | None = None
    try:
        running.wait(START_S)
        assert found, "".join(log)
        server = StockServer(process, found[0], log, reader)
        yield server
    finally:
        if process.poll() is None:
            left = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        process.wait()
        reader.join(TIMEOUT_S)
        process.stdout.close()
        if server is not None:
            server.http.close()
