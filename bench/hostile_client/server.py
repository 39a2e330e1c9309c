"""A server to attack: its processes, their memory, and the faults in its log."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostile_client.attack import Address

READY = re.compile(r"ready: http://([\w.]+):(\d+)")
OUR_BUGS = re.compile(r"Traceback|unexpected error|request failed")
START_S = 120.0


@dataclass
class Server:
    """A running server, and the lines of its log that report a fault of its own."""

    address: Address
    pid: int
    bugs: list[str] = field(default_factory=list)

    def memory_mb(self) -> float:
        """Return the resident memory of the server's own process."""
        return _memory_mb(self.pid)

    def all_memory_mb(self) -> float:
        """Return the resident memory of all its processes."""
        return sum(map(_memory_mb, self._processes()))

    def models(self) -> set[int]:
        """Return the ids of its models' processes."""
        found = set()
        for pid in self._processes():
            with suppress(OSError):
                if b"fairlead.engine.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
        return found

    def _processes(self) -> list[int]:
        """Return the ids of the server's process and of all below it."""
        parents = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has just ended
                parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found


@contextmanager
def serving_with(settings: Mapping[str, Any]) -> Iterator[Server]:
    """Start a server with these settings, and end it afterwards. Exits if it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fairlead.yaml"
        file.write_text(json.dumps(settings))
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "fairlead", "serve", "--port", "0", "--config", str(file)]
        with log.open("wb") as written:
            process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            server = Server(_address(process, log), process.pid)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # The log has a line for each refusal. Reading it during the measurement would delay the canary.
        with log.open(encoding="utf-8", errors="replace") as lines:
            server.bugs += [line for line in lines if OUR_BUGS.search(line)]


def _address(process: "subprocess.Popen[bytes]", log: Path) -> Address:
    """Wait until the server is ready; return its address."""
    deadline = time.monotonic() + START_S
    while not (found := READY.search(log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the server has not started:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return found[1], int(found[2])


def _memory_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # it has just ended
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
