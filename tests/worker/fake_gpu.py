"""A GPU that only counts: processes take of its memory and give it back by ending, as with a real one.

It is a file, so that processes share it: its size, what each process has taken, and the most that was taken
at a time by each number of processes.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MIB = 1024 * 1024


class OutOfMemory(RuntimeError):
    """More was asked for than is free."""


class FakeGpu:
    """`DeviceMemory` of the GPU in that file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @classmethod
    def make(cls, file: Path, total_mb: int) -> "FakeGpu":
        file.write_text(json.dumps({"total": total_mb * MIB, "taken": {}, "processes": 0, "refused": 0}))
        return cls(file)

    def free_and_total(self) -> tuple[int, int]:
        with self._state() as state:
            return state["total"] - sum(state["taken"].values()), state["total"]

    def taken(self) -> int:
        with self._state() as state:
            return state["taken"].get(str(os.getpid()), 0)

    def take(self, size_bytes: int) -> None:
        """Allocate; raises `OutOfMemory` as a GPU would."""
        with self._state() as state:
            if size_bytes > state["total"] - sum(state["taken"].values()):
                state["refused"] += 1
            else:
                own = str(os.getpid())
                state["taken"][own] = state["taken"].get(own, 0) + size_bytes
                state["processes"] = max(state["processes"], len(state["taken"]))
                return
        raise OutOfMemory(f"{size_bytes} bytes are not free")

    @property
    def most_processes(self) -> int:
        """How many processes had some of it at a time, at most."""
        with self._state() as state:
            return state["processes"]

    @property
    def refused(self) -> int:
        """How often it was out of memory."""
        with self._state() as state:
            return state["refused"]

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with self._file.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            state["taken"] = {pid: size for pid, size in state["taken"].items() if _is_alive(int(pid))}
            yield state
            file.seek(0)
            file.truncate()
            json.dump(state, file)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
