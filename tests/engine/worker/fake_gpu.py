"""A GPU that only counts memory: processes allocate it, and its release is their end, as on a real one.

It is a file, so that processes share it: its size, what each process has allocated, the largest number of
processes at a time, and the number of refused allocations.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairlead.engine.device_memory import DeviceMemory

MIB = 1024 * 1024


class OutOfMemory(RuntimeError):
    """Less memory is free than was requested."""


class FakeGpu(DeviceMemory):
    """Implements `DeviceMemory` for the GPU in that file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @classmethod
    def make(cls, file: Path, total_mb: int) -> "FakeGpu":
        file.write_text(json.dumps({"total": total_mb * MIB, "allocated": {}, "processes": 0, "refused": 0}))
        return cls(file)

    def free_and_total(self) -> tuple[int, int]:
        with self._state() as state:
            return state["total"] - sum(state["allocated"].values()), state["total"]

    def taken(self) -> int:
        with self._state() as state:
            return int(state["allocated"].get(str(os.getpid()), 0))

    def allocate(self, size_bytes: int) -> None:
        """Allocate memory; raise `OutOfMemory` if not enough is free."""
        with self._state() as state:
            if size_bytes > state["total"] - sum(state["allocated"].values()):
                state["refused"] += 1
            else:
                own = str(os.getpid())
                state["allocated"][own] = state["allocated"].get(own, 0) + size_bytes
                state["processes"] = max(state["processes"], len(state["allocated"]))
                return
        raise OutOfMemory(f"{size_bytes} bytes are not free")

    @property
    def most_processes(self) -> int:
        """The largest number of processes that had memory at the same time."""
        with self._state() as state:
            return int(state["processes"])

    @property
    def refused(self) -> int:
        """How many allocations were refused."""
        with self._state() as state:
            return int(state["refused"])

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with self._file.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            state["allocated"] = {
                pid: size for pid, size in state["allocated"].items() if _is_alive(int(pid))
            }
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
