"""Start a fake child, print its pid once it generates endlessly, and wait to be killed."""

import sys

import trio

from fairlead.errors import FairleadError
from fairlead.job import Sampling
from fairlead.messages import Output, WorkerSpec
from fairlead.worker.client import Worker


async def main(path: str, child: str) -> None:
    worker = Worker(WorkerSpec(path=path), command=[sys.executable, child])

    class Receiver:
        def receive_token(self, _token_id: int) -> None:
            if worker.statistics.steps == 1:
                sys.stdout.write(f"{worker.pid}\n")
                sys.stdout.flush()

        def receive(self, output: Output) -> None:
            raise AssertionError(output)

        def failed(self, error: FairleadError) -> None:
            raise error

    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        worker.sequences.submit([1], Sampling(max_tokens=900_000), Receiver())


trio.run(main, *sys.argv[1:])
