"""A gateway over two remote servers, one of which fails: clients get the other's answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError, NodeFailed, NodeRefused
from fairlead.base.formats.server_sent_events import split_events
from fairlead.base.job import Delta, Job, Sampling
from fairlead.base.supervision import unwrap
from fairlead.generation.gateway import Gateway
from fairlead.nodes.remote_node import RemoteNode
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from nodes.listening import relayed_job, stub, upstream_for
from nodes.stub_server import StubServer, text
from upstream_readers import CHAT_READER

BEFORE = [("gone", 0), ("garbage", 0), ("kind", 0), *(("status", status) for status in (204, 302, 500, 502))]
ONLY_STREAMS = [("end", 0)]
Dialects = tuple[tuple[str, ...] | None, tuple[str, ...] | None]
BETWEEN = [("reset", 4), ("end", 4), ("half", 4), ("broken", 4), ("error", 4)]


class Fleet:
    """A gateway in front of a failing and a working server; the failing one is always chosen first.

    `dialects` are those that each speaks; None: all.
    """

    def __init__(self, failing: StubServer, working: StubServer, dialects: Dialects = (None, None)) -> None:
        self.failing, self.working = failing, working
        self.dispatcher = Dispatcher(QueueConfig(), random=Random(0))
        registry = NodeRegistry(self.dispatcher.scheduler)
        self.gateway = Gateway(self.dispatcher, registry, request_timeout_s=60)
        named = (("failing", failing), ("working", working))
        for (name, server), spoken in zip(named, dialects, strict=True):
            upstream = upstream_for(server)
            node = RemoteNode(name, upstream, registry.report, names={"m": "m"}, seats=4, dialects=spoken)
            node.came_up()
        states = self.dispatcher.scheduler._nodes
        states["working"].acquire(0)  # busier than the failing server
        self.idle_statistics = self.dispatcher.statistics()

    async def run_job(self, job: Job) -> bytes:
        """Return all bytes of the answer. Raise the job's error."""
        return b"".join(piece for delta in await self.deltas_of(job) for piece in delta.raw)

    async def deltas_of(self, job: Job) -> list[Delta]:
        """Return all deltas of the answer. Raise the job's error."""
        deltas: list[Delta] = []
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as exchange:
                answer = await exchange.start(self.gateway.serve, job)
                if not job.stream:
                    await answer.deltas.ended()
                while taken := await answer.deltas.take():
                    deltas += taken
                    self.failing.go.release()  # it continues once some of its answer was read
        except* FairleadError as group:
            error = unwrap(group)
        if error is not None:
            raise error  # outside the block, in which Python 3.11.2 would wrap it
        return deltas


@asynccontextmanager
async def fleet(*, dialects: Dialects = (None, None), **behaviour: object) -> AsyncIterator[Fleet]:
    async with stub() as failing, stub() as working:
        failing.behaviour = behaviour
        running = Fleet(failing, working, dialects)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(running.dispatcher.run)
                yield running
                nursery.cancel_scope.cancel()
        assert running.idle_statistics == msgspec.structs.replace(
            running.dispatcher.statistics(), mean_wait_s=0.0, mean_service_s=0.0
        )


def new_job(*, stream: bool = True, **sampling: object) -> Job:
    return msgspec.structs.replace(relayed_job(stream=stream), sampling=Sampling(max_tokens=10, **sampling))


def content(raw: bytes) -> str:
    return "".join(CHAT_READER.read_event(event).text for event in split_events(raw))


@pytest.mark.parametrize(
    ("stream", "how", "after"),
    [*((False, *fault) for fault in BEFORE), *((True, *fault) for fault in BEFORE + ONLY_STREAMS)],
)
async def test_failure_before_the_answer_is_hidden_from_the_client(stream, how, after):
    async with fleet(how=how, after=after) as running:
        raw = await running.run_job(new_job(stream=stream))
        assert (len(running.failing.jobs), len(running.working.jobs)) == (1, 1)
    if stream:
        assert text(8) == content(raw)
        assert raw.count(b"[DONE]") == 1
    else:
        assert text(8) == msgspec.json.decode(raw)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("how", "after"), BETWEEN)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}], ids=["greedy", "seeded"])
async def test_repeatable_stream_resumes_at_the_other_server(how, after, sampling):
    async with fleet(how=how, after=after, waits=True) as running:
        raw = await running.run_job(new_job(**sampling))
        assert (len(running.failing.jobs), len(running.working.jobs)) == (1, 1)
    assert text(8) == content(raw)
    assert raw.count(b"[DONE]") == 1


async def test_unrepeatable_stream_is_an_error_once_some_of_it_was_read():
    async with fleet(how="reset", after=4, waits=True) as running:
        with pytest.raises(NodeFailed):
            await running.run_job(new_job())
        assert len(running.working.jobs) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_jobs_refused_by_a_full_server_run_on_the_other(stream, mock_clock):
    # The clock does not move: a full server would be tried again after a second.
    async with fleet(how="status", after=429) as running:
        for _ in range(3):
            await running.run_job(new_job(stream=stream))
        assert (len(running.failing.jobs), len(running.working.jobs)) == (1, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_request_refused_by_a_server_is_not_sent_to_another(stream):
    async with fleet(how="status", after=422) as running:
        with pytest.raises(NodeRefused) as refused:
            await running.run_job(new_job(stream=stream))
        assert (refused.value.status, len(running.working.jobs)) == (422, 0)
