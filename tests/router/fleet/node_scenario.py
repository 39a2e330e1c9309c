"""Fault points in the lifecycle of a remote node, from joining to removal."""

import socket

import trio

from fairlead.base.config import HealthConfig, NodeConfig
from fairlead.base.errors import FairleadError
from fairlead.base.job import Job
from fairlead.dialects.openai.events import ChunkReader
from fairlead.nodes import server_probe
from fairlead.nodes.http import client as upstream
from fairlead.nodes.http.client import Upstream
from fairlead.nodes.http.links import PlainLink
from fairlead.nodes.http.response_parser import ResponseParser
from fairlead.nodes.processes.health import Breaker
from fairlead.nodes.streams import relay, upstream_stream
from fairlead.nodes.streams.relay_sink import RelaySink
from fairlead.router.dispatch.scheduler import Scheduler
from nodes.listening import relayed_job
from nodes.stub_server import StubServer, text
from router.fleet.fault_points import (
    QUEUE,
    FaultPoints,
    Step,
    assert_no_more,
    ends,
    is_struck,
    noting,
    resource_counts,
)
from router.fleet.running_fleet import RunningFleet, engine, question, running_fleet
from router.fleet.simulated_child import SimulatedProcesses

HEALTH = HealthConfig(interval_s=1.0, failures=2, timeout_s=20.0)

# Steps that must be reached: a missing one means that its wrapper no longer applies.
STEPS: set[Step] = {
    *(
        ("join", name)
        for name in ("resolve", "connect", "link send", "link receive", "parse feed", "models_of")
    ),
    *(("join", name) for name in ("probed", "node_up")),
    *(
        ("relay", name)
        for name in ("rewrite_model", "link send", "parse feed", "read_event", "put", "requested")
    ),
    *(("change", name) for name in ("seats_changed", "pool resize")),
    *(("down", name) for name in ("probed", "seats_changed", "node_down", "pool close")),
    *(("up", name) for name in ("node_up", "probed")),
    *(("removal", name) for name in ("close_node", "node_down", "reopen_node", "pool close")),
}


async def node_scenario(points: FaultPoints, problems: list[str]) -> None:
    """Add a node, let it serve, change, go down and come up, remove it; then check that nothing is left."""
    server = StubServer()
    server.seats = 2
    async with trio.open_nursery() as children:
        serve_on_socketpairs(points, children, server)
        points.replace(trio.lowlevel, "open_process", SimulatedProcesses(children).open_process)
        wrap_relaying(points)
        async with running_fleet(engine("other"), health_check=HEALTH, queue=QUEUE) as opened:
            await opened.fleet.load("other")
            await trio.sleep(1)
            before = resource_counts(opened)
            for phase, happen in _PHASES.items():
                if not points.has_struck:
                    with points.phase(phase):
                        await happen(opened, server)
                        await trio.sleep(3.3)  # so that the next phase begins between two probes
                    struck_in = phase
            server.healthy, server.refuses = True, False
            await _check(opened, server, before, problems, struck_in)
        children.cancel_scope.cancel()


def serve_on_socketpairs(points: FaultPoints, nursery: trio.Nursery, server: StubServer) -> None:
    """Connect every client to the server by a socket pair. TCP may deliver late on a busy machine, and
    virtual time would not wait for it.
    """

    async def open_tcp_stream(_host: str, _port: int) -> trio.SocketStream:
        points.reach("resolve")
        await trio.lowlevel.checkpoint()
        ours, theirs = (trio.socket.from_stdlib_socket(end) for end in socket.socketpair())
        nursery.start_soon(server._connection, trio.SocketStream(theirs))
        return trio.SocketStream(ours)

    points.replace(trio, "open_tcp_stream", open_tcp_stream)


def wrap_relaying(points: FaultPoints) -> None:
    """Make fault points of the functions that relaying and probing use."""
    points.wrap(upstream, "connect", "connect")
    for name in ("send", "receive", "is_stale", "close"):
        points.wrap(PlainLink, name, f"link {name}")
    for name in ("feed", "end"):
        points.wrap(ResponseParser, name, f"parse {name}")
    for module, names in (
        (server_probe, ("instance_of", "load_of", "models_of")),
        (relay, ("rewrite_model",)),
        (upstream_stream, ("split_events",)),
        (ChunkReader, ("read_response", "read_event", "read_plain")),
    ):
        for name in names:
            points.wrap(module, name, name)
    for name in ("put", "backpressure"):
        points.wrap(RelaySink, name, name)
    for name in ("probed", "requested"):
        points.wrap(Breaker, name, name)
    for name in ("close_stale", "close", "resize"):
        points.wrap(Upstream, name, f"pool {name}")
    for name in ("node_up", "node_down", "seats_changed"):
        points.wrap(Scheduler, name, name, lambda _self, node_id, *_: is_struck(node_id))
    for name in ("close_node", "reopen_node"):
        points.wrap(Scheduler, name, name)


async def run_job(opened: RunningFleet, job: Job) -> None:
    """Relay a job. Any failure must reach its client as a `FairleadError`."""
    error = await ends(opened.run_job, job)
    assert error is None or isinstance(error, FairleadError), repr(error)


async def _join(opened: RunningFleet, server: StubServer) -> None:
    await ends(opened.fleet.add_node, NodeConfig(id="far", url=server.url))


async def _relay(opened: RunningFleet, _server: StubServer) -> None:
    async with trio.open_nursery() as clients:
        for number, stream in enumerate((True, False, True)):
            clients.start_soon(run_job, opened, relayed_job(request_id=f"r{number}", stream=stream))


async def _change(_opened: RunningFleet, server: StubServer) -> None:
    server.seats = 5
    await trio.sleep(3)


async def _go_down(opened: RunningFleet, server: StubServer) -> None:
    async with trio.open_nursery() as clients:
        clients.start_soon(run_job, opened, relayed_job(stub={"words": 100, "delay_s": 2}))
        await trio.sleep(1)
        server.healthy = False
        await trio.sleep(3)  # closed to new jobs
        server.refuses = True


async def _come_up(_opened: RunningFleet, server: StubServer) -> None:
    server.healthy, server.refuses = True, False
    await trio.sleep(3)


async def _remove(opened: RunningFleet, _server: StubServer) -> None:
    await ends(opened.fleet.remove_node, "far")


_PHASES = {
    "join": _join,
    "relay": _relay,
    "change": _change,
    "down": _go_down,
    "up": _come_up,
    "removal": _remove,
}


async def _check(
    opened: RunningFleet, server: StubServer, before: dict[str, int], problems: list[str], struck_in: str
) -> None:
    def far() -> list[str]:
        return [status.state for status in opened.fleet.nodes() if status.id == "far"]

    with noting(problems, "the other model does not serve"):
        await opened.run_job(question("other"))
    with noting(problems, "the node does not come back"):
        if struck_in == "removal" and far():
            await opened.fleet.remove_node("far")
        if not far():
            await opened.fleet.add_node(NodeConfig(id="far", url=server.url))
        await opened.until(lambda: far() == ["up"], within_s=20)
        for stream in (True, False):
            assert await opened.run_job(relayed_job(stream=stream)) == (text() if stream else "")
    with noting(problems, "the node cannot be removed"):
        await opened.fleet.remove_node("far")
    with noting(problems, "it leaves something"):
        await assert_no_more(opened, before)
        assert server.connections == 0, "connections"
