"""A node that takes a given time for its jobs, on the virtual clock."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.job import Delta, Job, Sampling
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import Node
from fairlead.nodes.streams.sink import Sink

LIMITS = NodeLimits(seats=1, max_model_len=1000)


class TimedNode:
    """Sends its first delta after `first_s` and the last after `service_s`; counts its jobs."""

    def __init__(
        self,
        model: str = "m",
        *,
        service_s: float = 10.0,
        first_s: float = 0.0,
        fails: FairleadError | None = None,
    ) -> None:
        self.id = "timed"
        self.models = frozenset({model})
        self.service_s = service_s
        self.first_s = first_s
        self.fails = fails
        self.running = 0
        self.most_running = 0
        self.served: list[str] = []

    @asynccontextmanager
    async def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: object = None
    ) -> AsyncIterator[None]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.served.append(job.tenant)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer, job, into)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.running -= 1

    async def _answer(self, job: Job, into: Sink) -> None:
        await trio.sleep(self.first_s)
        for index in range(job.sequences):
            into.put(Delta(index, text="first ", token_ids=[1]))
        await trio.sleep(self.service_s - self.first_s)
        if self.fails is not None:
            into.fail(self.fails)
        for index in range(job.sequences):
            into.put(Delta(index, text="last", token_ids=[2], finish_reason="stop"))


_node_type: type[Node] = TimedNode  # mypy checks that the protocol is implemented
_numbers = itertools.count()


def job(tenant: str = "A", *, stream: bool = False, n: int = 1, **options: Any) -> Job:
    """Return a job with a prompt of three tokens."""
    return Job(
        id=f"job {next(_numbers)}",
        tenant=tenant,
        model="m",
        prompts=([1, 2, 3],),
        sampling=Sampling(max_tokens=10),
        stream=stream,
        n=n,
        **options,
    )
