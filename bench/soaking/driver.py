"""The server under test, in a process that also reports what only it can know, a line of JSON a second.

    python -m soaking.driver FILE DESCRIPTOR

FILE is the configuration, DESCRIPTOR an inherited pipe. A line has the number of Trio's tasks and of the
memory blocks that Python has allocated; the first line has the address.
"""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from fairlead.app import serve
from fairlead.configfile import read_config
from fairlead.reload import Source
from fairlead.telemetry import logs
from fairlead.telemetry.witness import Witness, witness_of

REPORT_S = 1.0


class Announcer:
    """Reports the address through the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def loading(self, model: str, fraction: float, stage: str) -> None:
        """See `fairlead.app.Announcer`."""

    def ready(self, url: str, models: Sequence[str]) -> None:  # noqa: ARG002  # as the protocol has it
        """See `fairlead.app.Announcer`."""
        report(self._descriptor, url=url)

    def failed(self, model: str, reason: str) -> None:
        """See `fairlead.app.Announcer`."""

    def stopping(self) -> None:
        """See `fairlead.app.Announcer`."""


def report(descriptor: int, **values: object) -> None:
    """Write a line; the reader keeps up with one a second."""
    os.write(descriptor, json.dumps(values).encode() + b"\n")


async def _report_statistics(descriptor: int) -> None:
    while True:
        await trio.sleep(REPORT_S)
        tasks = trio.lowlevel.current_statistics().tasks_living
        report(descriptor, tasks=tasks, blocks=sys.getallocatedblocks())


async def _serve(source: Source, descriptor: int, witness: Witness) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_report_statistics, descriptor)
        await serve(source.read(), Announcer(descriptor), source=source, witness=witness)
        nursery.cancel_scope.cancel()


def main() -> None:
    """Serve until SIGTERM."""
    file, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    source = Source(file, lambda: read_config(file, os.environ).config)
    with logs.log_streams():
        logs.configure(json=True)
        with witness_of(source.read()) as witness:
            trio.run(partial(_serve, source, descriptor, witness), strict_exception_groups=True)


if __name__ == "__main__":
    main()
