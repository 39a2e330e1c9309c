"""What the system says of processes: memory, CPU time, groups and beginnings. Independent of models."""

import os
import sys
from pathlib import Path

PROC = Path("/proc")


def memory_of(pid: int, *, group: bool = False) -> int:
    """Return the bytes that a process with its children, or its whole group, takes; 0 if that is not known.

    Shared memory counts proportionally (PSS) where the system reports that; else all resident memory counts
    (RSS). Reads files, which may take some milliseconds for a large process.
    """
    if not sys.platform.startswith("linux"):
        return 0
    return sum(map(_bytes_of, members(pid) if group else [pid, *_children(pid)]))


def computed_s(group: int) -> float | None:
    """Return the CPU time of a group's processes so far, in seconds; None if that is not known."""
    if not sys.platform.startswith("linux"):
        return None
    ticks = 0
    for pid in members(group):
        if (fields := _stat_of(pid)) is not None:
            ticks += int(fields[11]) + int(fields[12])  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")


def processes() -> list[int]:
    """Return the ids of all processes that the system shows."""
    return [int(process.name) for process in PROC.iterdir() if process.name.isdecimal()]


def members(group: int) -> list[int]:
    """Return the ids of a group's processes."""
    stats = ((pid, _stat_of(pid)) for pid in processes())
    return [pid for pid, fields in stats if fields is not None and int(fields[2]) == group]


def began_at(pid: int) -> int | None:
    """Return when a process began, in the system's ticks since its start; None if it is gone."""
    fields = _stat_of(pid)
    return None if fields is None else int(fields[19])


def name_of(pid: int) -> bytes:
    """Return the name of a process's program, in at most 15 bytes; empty if it is gone."""
    try:
        return (PROC / str(pid) / "comm").read_bytes().strip()
    except OSError:
        return b""


def _bytes_of(pid: int) -> int:
    for name, field in (("smaps_rollup", b"Pss:"), ("status", b"VmRSS:")):
        try:
            lines = (PROC / str(pid) / name).read_bytes().splitlines()
        except OSError:  # it is gone, or we may not read it, or the system has no such file
            continue
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _children(pid: int) -> list[int]:
    """Return the processes that a process's main thread has started; none if the system lists none."""
    try:
        return [int(child) for child in (PROC / str(pid) / f"task/{pid}/children").read_bytes().split()]
    except OSError:
        return []


def _stat_of(pid: int) -> list[bytes] | None:
    """Return a process's state, parent, group and the following fields; None if it is gone."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name before them is in parentheses, and may contain parentheses.
    return stat.rpartition(b")")[2].split()
