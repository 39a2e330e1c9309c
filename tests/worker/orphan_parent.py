"""Starts a fake child, prints its pid once it generates for ever, and waits to be killed."""

import sys

import trio

from fairlead.job import Sampling
from fairlead.worker.client import Worker
from fairlead.worker.wire import Output, WorkerSpec


async def main(path: str, child: str) -> None:
    worker = Worker(WorkerSpec(path=path), command=[sys.executable, child])

    def receive(output: Output) -> None:
        if worker.statistics.steps == 1:
            sys.stdout.write(f"{worker.pid}\n")
            sys.stdout.flush()

    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        worker.submit([1], Sampling(max_tokens=900_000), receive, print)


trio.run(main, *sys.argv[1:])
