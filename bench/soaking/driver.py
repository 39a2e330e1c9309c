"""Run the server under test, and report internal counts as one line of JSON a second.

    python -m soaking.driver FILE DESCRIPTOR

FILE is the configuration, DESCRIPTOR an inherited pipe. A line contains the number of Trio's tasks, the
number of memory blocks allocated by Python, and the bytes allocated by glibc's malloc, which do not include
Python's small objects. The first line contains the address.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from fairlead.base.telemetry import logs
from fairlead.generation.request_log import RequestLog, open_request_log
from fairlead.router.fleet.reload import ConfigSource
from fairlead.server.app import serve
from fairlead.server.configfile import read_config

REPORT_S = 1.0


class Announcer:
    """Reports the address through the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """Ignore the progress of loads."""

    def ready(self, url: str, models: Sequence[str]) -> None:  # noqa: ARG002  # the signature is the protocol's
        """Report the address of the server."""
        report(self._descriptor, url=url)

    def failed(self, model: str, reason: str) -> None:
        """Ignore failed loads, which the checks read from the server."""

    def stopping(self) -> None:
        """Ignore the end of the server."""


def report(descriptor: int, **values: object) -> None:
    """Write a line. It does not block, because the reader reads every second."""
    os.write(descriptor, json.dumps(values).encode() + b"\n")


def heap_bytes() -> int:
    """Return the bytes allocated by glibc's malloc in all its arenas; 0 with another C library.

    Unlike the process's memory, this does not include freed memory that malloc keeps.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        return 0
    libc.fdopen.restype = ctypes.c_void_p
    libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    descriptor = os.memfd_create("malloc_info")
    stream = libc.fdopen(os.dup(descriptor), b"w")
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        totals = file.read().decode().rpartition("</heap>")[2]  # the totals follow the sizes of the arenas
    sizes = {kind: int(size) for kind, size in re.findall(r'type="(\w+)".* size="(\d+)"', totals)}
    current = re.search(r'<system type="current" size="(\d+)"', totals)
    assert current is not None
    return int(current[1]) - sizes["fast"] - sizes["rest"] + sizes["mmap"]


async def _report_statistics(descriptor: int) -> None:
    while True:
        await trio.sleep(REPORT_S)
        tasks = trio.lowlevel.current_statistics().tasks_living
        report(descriptor, tasks=tasks, blocks=sys.getallocatedblocks(), heap=heap_bytes())


async def _serve(source: ConfigSource, descriptor: int, request_log: RequestLog) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_report_statistics, descriptor)
        await serve(source.read(None), Announcer(descriptor), source=source, request_log=request_log)
        nursery.cancel_scope.cancel()


def main() -> None:
    """Serve until SIGTERM."""
    file, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    source = ConfigSource(file, lambda running: read_config(file, os.environ, running=running).config)
    with logs.log_streams():
        logs.configure(json=True)
        with open_request_log(source.read(None)) as request_log:
            trio.run(partial(_serve, source, descriptor, request_log), strict_exception_groups=True)


if __name__ == "__main__":
    main()
