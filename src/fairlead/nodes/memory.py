"""How much memory processes take, as the system counts it. Knows no model."""

import sys
from pathlib import Path

PROC = Path("/proc")


def memory_of(pid: int, *, group: bool = False) -> int:
    """Return the bytes that a process takes, or all of its group; 0 if it is gone or nobody can tell.

    What it shares with others counts in part (PSS), where the system says so; else all that is resident
    (RSS). Reads files, which may take some milliseconds for a large process.
    """
    if not sys.platform.startswith("linux"):
        return 0
    return sum(map(_bytes_of, _members(pid) if group else [pid]))


def _bytes_of(pid: int) -> int:
    for name, field in (("smaps_rollup", b"Pss:"), ("status", b"VmRSS:")):
        try:
            lines = (PROC / str(pid) / name).read_bytes().splitlines()
        except OSError:  # it is gone, or not ours to look at, or the system has no such file
            continue
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _members(group: int) -> list[int]:
    found = []
    for process in PROC.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            stat = (process / "stat").read_bytes()
        except OSError:
            continue
        # The name is in parentheses, and may have some of its own: state, parent and group follow the last.
        if int(stat.rpartition(b")")[2].split()[2]) == group:
            found.append(int(process.name))
    return found
