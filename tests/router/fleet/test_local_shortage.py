"""A lack of descriptors on this machine for connections to a node is not a failure of the node."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from fairlead.base.config import HealthConfig, NodeConfig
from fairlead.base.errors import NodeFull
from fairlead.nodes.http import client as upstream
from fairlead.nodes.http.client import LocalShortage, Upstream, UpstreamFailed
from fairlead.nodes.http.idle_connections import MAX_IDLE
from fairlead.nodes.processes.health import HealthCheck
from fairlead.nodes.processes.liveness import LivenessProbe
from nodes.listening import CollectedDeltas, ready_node, relayed_job, stub, upstream_for
from nodes.stub_server import text
from router.fleet.running_fleet import running_fleet

HEALTH = HealthConfig(interval_s=0.05, failures=2, timeout_s=60.0)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Prevent this process from opening further descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Shortage:
    """Fails every new connection while `lasts` is set, and counts the attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lasts = False
        self.tried = 0
        connect = upstream.connect

        async def scarce(*arguments, **options):
            if self.lasts:
                self.tried += 1
                await trio.lowlevel.checkpoint()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await connect(*arguments, **options)

        monkeypatch.setattr(upstream, "connect", scarce)


@pytest.fixture
def shortage(monkeypatch) -> Shortage:
    return Shortage(monkeypatch)


async def test_connection_without_a_descriptor_raises_local_shortage():
    async with stub() as server:
        pool = upstream_for(server)
        with no_descriptors(), pytest.raises(LocalShortage, match="Too many open files"):
            async with pool.exchange("GET", "/health"):
                pass
        async with pool.exchange("GET", "/health") as answer:
            assert answer.head.status == 200


async def test_unreachable_server_is_not_a_shortage():
    with pytest.raises(UpstreamFailed) as failed:
        async with Upstream("http://127.0.0.1:1", name="far").exchange("GET", "/health"):
            pass
    assert not isinstance(failed.value, NodeFull)


async def test_job_without_a_descriptor_gets_node_full_and_the_node_stays_up(shortage):
    async with stub() as server:
        node = ready_node(server)
        shortage.lasts = True
        for _ in range(2 * HEALTH.failures):
            into = CollectedDeltas()
            async with node.generate(relayed_job(), into):
                await into.over.wait()
            assert isinstance(into.error, NodeFull)
        assert node.status().is_up


async def test_shortage_takes_no_node_down_and_its_jobs_wait(shortage):
    async with stub() as server:
        nodes = (NodeConfig(id="far", url=server.url, seats=4),)
        async with running_fleet(nodes=nodes, health_check=HEALTH) as opened:
            await opened.until(lambda: opened.fleet.nodes()[0].state == "up")
            shortage.lasts = True
            (far,) = opened.fleet._remote._nodes.values()
            far._node._upstream.close()  # so that each probe needs a new connection
            answers = []

            async def run_job() -> None:
                answers.append(await opened.run_job(relayed_job()))

            async with trio.open_nursery() as clients:
                clients.start_soon(run_job)
                await opened.until(lambda: shortage.tried > 2 * HEALTH.failures)
                assert (opened.fleet.nodes()[0].state, opened.fleet.nodes()[0].downs) == ("up", 0)
                assert answers == []
                shortage.lasts = False
            assert answers == [text()]


async def test_node_that_could_not_be_probed_is_not_reported_as_up(shortage):
    shortage.lasts = True
    async with stub() as server:
        nodes = (NodeConfig(id="far", url=server.url),)
        async with running_fleet(nodes=nodes, health_check=HEALTH) as opened:
            await opened.until(lambda: shortage.tried > 3)
            assert opened.fleet.nodes()[0].state == "down"
            shortage.lasts = False
            await opened.until(lambda: opened.fleet.nodes()[0].state == "up")


async def test_command_that_could_not_be_probed_is_not_reported_as_stopped(shortage, autojump_clock):
    shortage.lasts = True
    probe = LivenessProbe(Upstream("http://127.0.0.1:1", name="m"), "/health", group=4711)
    with trio.move_on_after(100) as clock:
        await probe.stopped(HealthCheck(HealthConfig(interval_s=1, failures=2, timeout_s=1)))
    assert clock.cancelled_caught


async def test_number_of_idle_connections_is_bounded():
    async with stub() as server:
        pool = upstream_for(server, capacity=100)

        async def run_job() -> None:
            async with pool.exchange("GET", "/health") as answer:
                await together.wait()
                await answer.read_all(1000)

        together = trio.Event()
        async with trio.open_nursery() as clients:
            for _ in range(MAX_IDLE + 10):
                clients.start_soon(run_job)
            while server.connections < MAX_IDLE + 10:
                await trio.lowlevel.checkpoint()
            together.set()
        assert pool.statistics().idle == MAX_IDLE
