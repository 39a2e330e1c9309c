"""The server's files: its configuration, its log, and `/proc` of its children."""

import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import msgspec

from simulation.machine import Machine
from simulation.processes import Processes

PAGE_BYTES = 50 * 1024 * 1024
CLOCK_TICKS = 100
NULL = os.open(os.devnull, os.O_RDONLY)


class _OpenFile(io.BytesIO):
    """A file that is open for reading. Its descriptor is that of `/dev/null`; only its mode is used."""

    def fileno(self) -> int:
        """Return a descriptor of this process."""
        return NULL


class ConfigurationFile(PurePosixPath):
    """The configuration file."""

    __slots__ = ("content", "machine", "version")
    content: bytes
    machine: Machine
    version: int

    @classmethod
    def make(cls, machine: Machine, content: bytes) -> "ConfigurationFile":
        """Create the file."""
        file = cls("/etc/fairlead.yaml")
        file.machine, file.content, file.version = machine, content, 1
        return file

    def write(self, content: bytes) -> None:
        """Replace its content."""
        self.content = content
        self.version += 1

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Open it. Raises `OSError`."""
        self.machine.call("open_file")
        self.machine.call("read_file")
        return _OpenFile(self.content)

    def resolve(self) -> Path:
        """Return its real path."""
        return Path(self)

    def stat(self) -> Any:
        """Return a status that differs between versions. Raises `OSError`."""
        self.machine.call("stat")
        return SimpleNamespace(st_mtime_ns=self.version, st_size=len(self.content), st_ino=1)


class Log:
    """The server's stderr. A write may fail as on a full disk.

    `lines` counts the lines that were written; `problems` are those with a traceback.
    """

    encoding = "utf-8"

    def __init__(self, machine: Machine) -> None:
        self.lines = 0
        self.problems: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._machine = machine
        self._rest = ""

    def write(self, text: str) -> int:
        """Add text. Raises `OSError`."""
        self._machine.call("write_log")
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: everything is written at once."""

    def isatty(self) -> bool:
        """Return False: it is not a terminal."""
        return False

    def _take(self, line: str) -> None:
        self.lines += 1
        event: dict[str, Any] = {}
        if line.startswith("{"):
            event = msgspec.json.decode(line)
            event.pop("timestamp", None)
            self.events.append(event)
        self._machine.note("log", msgspec.json.encode(event) if event else line)
        if "exception" in event or "Traceback" in line:
            self.problems.append(line.replace("\\n", "\n"))


class Proc:
    """A path in `/proc`, which has the server's children, their groups, CPU time and memory."""

    def __init__(self, processes: Processes, name: str = "") -> None:
        self._processes = processes
        self.name = name

    def __truediv__(self, name: str) -> "Proc":
        return Proc(self._processes, f"{self.name}/{name}" if self.name else name)

    def iterdir(self) -> Iterator["Proc"]:
        """Return the folders of the processes."""
        return (Proc(self._processes, str(process.pid)) for process in self._processes.running)

    def read_bytes(self) -> bytes:
        """Return a file's content. Raises `FileNotFoundError`."""
        self._processes.machine.call("read_file")
        pid, _, file = self.name.partition("/")
        for process in self._processes.running:
            if str(process.pid) == pid and file == "stat":
                ticks = int(process.computed_s * CLOCK_TICKS)
                return b"%d (fake) S 1 %d %d" % (process.pid, process.group, process.group) + (
                    b" 0" * 7 + b" %d 0" % ticks
                )
            if str(process.pid) == pid and file == "smaps_rollup":
                return b"Pss: %d kB\n" % (PAGE_BYTES // 1024)
        raise FileNotFoundError(self.name)
