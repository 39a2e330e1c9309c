"""Start a fake child, print its pid once it generates endlessly, and wait to be killed."""

import sys

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling
from fairlead.base.messages import Output, WorkerSpec
from fairlead.nodes.own_engine import OwnEngine


async def main(path: str, child: str) -> None:
    engine = OwnEngine(WorkerSpec(path=path), command=[sys.executable, child])

    class Receiver:
        def receive_token(self, _token_id: int) -> None:
            if engine.sequences.statistics.steps == 1:
                sys.stdout.write(f"{engine.pid}\n")
                sys.stdout.flush()

        def receive(self, output: Output) -> None:
            raise AssertionError(output)

        def failed(self, error: FairleadError) -> None:
            raise error

    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        engine.sequences.submit([1], Sampling(max_tokens=900_000), Receiver(), grant=Grant(1, 1))


trio.run(main, *sys.argv[1:])
