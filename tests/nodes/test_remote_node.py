"""A remote server goes up and down, and reports its models, seats and load."""

import os
import signal
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from fairlead.base.config import HealthConfig, NodeConfig
from fairlead.base.errors import NodeFailed
from fairlead.nodes.http.client import Upstream, UpstreamTimeouts
from fairlead.nodes.processes.command_process import CommandProcess
from fairlead.nodes.remote_node import RemoteNode, remote_node
from nodes.listening import (
    CollectedDeltas,
    RecordingListener,
    generated,
    quick_health,
    relayed_job,
    stub,
    translated_job,
    upstream_for,
)
from nodes.stub_server import text


def probed_node(server, listener, **options):
    """Return a node that probes the stub every 50 ms."""
    health = options.pop("health", quick_health())
    return RemoteNode("remote", upstream_for(server), listener, health=health, **options)


async def test_node_accepts_jobs_after_its_first_probe_and_is_down_at_its_end():
    listener = RecordingListener()
    async with stub() as server:
        node = probed_node(server, listener, names={"m": "m"}, seats=2)
        with pytest.raises(NodeFailed, match="remote is down"):
            async with node.generate(relayed_job(), CollectedDeltas()):
                pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            await listener.until("up")
            got = await generated(node, relayed_job())
            assert text() == got.text()
            nursery.cancel_scope.cancel()
        assert listener.reports == [("up", "remote", 2), ("down", "remote")]
        assert node.status().connections.idle == 0


async def test_node_is_closed_after_three_failed_probes_and_up_after_a_successful_one():
    listener = RecordingListener()
    async with stub() as server, trio.open_nursery() as nursery:
        node = probed_node(server, listener, names={"m": "m"})
        nursery.start_soon(node.run)
        await listener.until("up")
        server.healthy = False
        await listener.until("closed")
        assert node.status().problem == "it answers GET /v1/models with 503"
        server.healthy = True
        await listener.until("up", 2)
        assert [report[0] for report in listener.reports] == ["up", "closed", "up"]
        assert (node.status().ups, node.status().downs) == (2, 1)
        nursery.cancel_scope.cancel()


async def test_server_that_answers_its_probes_with_errors_keeps_its_running_jobs(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    listener = RecordingListener()
    health = HealthConfig(interval_s=5.0, timeout_s=2.0, failures=2)
    async with stub() as server, trio.open_nursery() as nursery:
        node = probed_node(server, listener, names={"m": "m"}, health=health)
        nursery.start_soon(node.run)
        await listener.until("up")
        into = CollectedDeltas()
        async with node.generate(relayed_job(stub={"waits": True, "after": 3}), into):
            await into.first.wait()
            server.healthy = False
            await listener.until("closed")
            await trio.sleep(60)  # silent, as a server that loads another model may be
            server.go.release()
            await into.over.wait()
        assert (into.error, into.text()) == (None, text())
        server.stalls_probes = True
        await listener.until("down")
        assert node.is_dead
        nursery.cancel_scope.cancel()


async def test_server_without_a_health_route_is_probed_by_its_models_route():
    listener = RecordingListener()
    async with stub() as server, trio.open_nursery() as nursery:
        server.health = False
        nursery.start_soon(probed_node(server, listener, names={"m": "m"}).run)
        await listener.until("up")
        requests_before = len(server.requests)
        while len(server.requests) < requests_before + 3:  # noqa: ASYNC110  # the stub sends no event
            await trio.sleep(0.01)
        assert {request.path for request in server.requests[requests_before:]} == {"/v1/models"}
        nursery.cancel_scope.cancel()


async def test_models_that_are_not_configured_are_queried_repeatedly():
    listener = RecordingListener()
    async with stub() as server, trio.open_nursery() as nursery:
        server.models = ["a", "b"]
        node = probed_node(server, listener)
        nursery.start_soon(node.run)
        await listener.until("up")
        assert node.models == {"a", "b"}
        server.models = ["b", "c"]
        await listener.until("seats")
        assert listener.reports[-1] == ("seats", "remote", 1, ["b", "c"])
        got = await generated(node, relayed_job(model="c"))
        assert text() == got.text()
        assert server.jobs[0].document["model"] == "c"
        nursery.cancel_scope.cancel()


async def test_seats_and_load_of_a_fairlead_are_read():
    listener = RecordingListener()
    async with stub() as server, trio.open_nursery() as nursery:
        server.seats, server.load = 8, 2
        node = probed_node(server, listener)
        nursery.start_soon(node.run)
        await listener.until("up")
        assert listener.reports == [("up", "remote", 8)]
        assert node.status().is_fairlead
        assert node.status().load == 0.25
        server.seats = 4
        await listener.until("seats")
        assert listener.reports[-1] == ("seats", "remote", 4, ["m"])
        assert node.status().load == 0.5
        nursery.cancel_scope.cancel()


async def test_configured_seats_are_not_changed_by_reported_load():
    listener = RecordingListener()
    async with stub() as server, trio.open_nursery() as nursery:
        server.seats, server.load = 8, 1000
        node = probed_node(server, listener, seats=3)
        nursery.start_soon(node.run)
        await listener.until("up")
        assert listener.reports == [("up", "remote", 3)]
        assert node.status().load == 125.0
        nursery.cancel_scope.cancel()


async def test_server_that_serves_jobs_stays_up_when_it_misses_probes(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    listener = RecordingListener()
    health = HealthConfig(interval_s=5.0, timeout_s=1.0, failures=1)
    async with stub() as server, trio.open_nursery() as nursery:
        node = probed_node(server, listener, names={"m": "m"}, health=health)
        nursery.start_soon(node.run)
        await listener.until("up")
        into = CollectedDeltas()
        async with node.generate(relayed_job(stub={"delay_s": 1.0, "words": 12}), into):
            await into.first.wait()
            server.stalls_probes = True
            await into.over.wait()
        assert into.error is None
        await listener.until("down")  # now it answers no request
        nursery.cancel_scope.cancel()


async def test_jobs_of_a_crashed_server_fail_when_it_goes_down(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    listener = RecordingListener()
    health = HealthConfig(interval_s=5.0, timeout_s=2.0, failures=2)
    async with stub() as server, trio.open_nursery() as nursery:
        node = probed_node(server, listener, names={"m": "m"}, health=health)
        nursery.start_soon(node.run)
        await listener.until("up")
        into = CollectedDeltas()
        async with node.generate(relayed_job(stub={"how": "stall", "after": 3}), into):
            await into.first.wait()
            server.stalls_probes = True  # as if it were suspended: connections stay open, nothing arrives
            await into.over.wait()
        assert isinstance(into.error, NodeFailed)
        assert [report[0] for report in listener.reports] == ["up", "down"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("seats", "dialects", "path"), [(None, ("openai",), "/v1/chat/completions"), (8, None, "/v1/messages")]
)
async def test_server_speaks_the_configured_dialects_unless_it_is_a_fairlead(seats, dialects, path):
    listener = RecordingListener()
    async with stub() as server, trio.open_nursery() as nursery:
        server.seats = seats
        node = probed_node(server, listener, names={"m": "m"}, dialects=("openai",))
        nursery.start_soon(node.run)
        await listener.until("up")
        assert node.dialects == dialects
        await generated(node, translated_job())
        assert server.jobs[0].path == path
        nursery.cancel_scope.cancel()


async def test_only_a_fairlead_gets_the_tenant_of_a_job_under_a_name_that_does_not_reveal_it():
    received = {}
    for seats in (8, None):  # a Fairlead, and another server
        listener = RecordingListener()
        async with stub() as server, trio.open_nursery() as nursery:
            server.seats = seats
            node = probed_node(server, listener, names={"m": "m"}, dialects=("openai",))
            nursery.start_soon(node.run)
            await listener.until("up")
            for tenant in ("ana", "ben", "ana", "\u00fc \ud800"):
                await generated(node, msgspec.structs.replace(relayed_job(), tenant=tenant))
            received[seats] = [job.headers.get("x-openwebui-user-id") for job in server.jobs]
            nursery.cancel_scope.cancel()
    ana, ben, again, last = received[8]
    assert ana == again
    assert len({ana, ben, last}) == 3
    assert all(len(name) == 32 and name.isalnum() for name in (ana, ben, last))
    assert received[None] == [None] * 4


async def test_unreachable_server_is_never_up():
    listener = RecordingListener()
    config = NodeConfig(id="remote", url="http://127.0.0.1:1")
    node = remote_node(config, listener, quick_health())
    with trio.move_on_after(0.3):
        await node.run()
    assert listener.reports == []
    assert not node.status().is_up


async def test_names_key_and_filters_come_from_the_configuration():
    listener = RecordingListener()
    async with stub() as server, trio.open_nursery() as nursery:
        from fairlead.base.config import FiltersConfig

        config = NodeConfig(
            id="remote",
            url=f"{server.url}/v1",
            api_key="sk-1",
            seats=3,
            models=("small", "big"),
            model_names={"big": "org/Big"},
            filters=FiltersConfig(strip_params=("top_k",)),
            dialects=("messages",),
        )
        node = remote_node(config, listener, quick_health())
        nursery.start_soon(node.run)
        await listener.until("up")
        assert listener.reports == [("up", "remote", 3)]
        assert node.models == {"small", "big"}
        assert node.dialects == ("messages",)
        await generated(node, translated_job(model="big", top_k=5))
        nursery.cancel_scope.cancel()
    [request] = server.jobs
    assert request.path == "/v1/messages"
    assert request.headers["authorization"] == "Bearer sk-1"
    assert request.document["model"] == "org/Big"
    assert "top_k" not in request.document


@contextmanager
def bound_port():
    """Reserve a port on which the stub can listen, and no other process."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def test_suspended_server_goes_down_and_comes_up_when_resumed(mock_clock):
    mock_clock.rate = 1.0  # real time, which jumps ahead while probes are not answered
    listener = RecordingListener()
    program = Path(__file__).with_name("stub_server.py")
    health = HealthConfig(interval_s=0.05, timeout_s=60.0, failures=2)
    with bound_port() as port:
        timeouts = UpstreamTimeouts(between_bytes_s=float("inf"))
        upstream = Upstream(f"http://127.0.0.1:{port}", name="remote", timeouts=timeouts)
        node = RemoteNode("remote", upstream, listener, names={"m": "m"}, health=health)
        async with trio.open_nursery() as nursery:
            process = CommandProcess("remote", (sys.executable, str(program), "--port", str(port)))
            await nursery.start(process.run)
            nursery.start_soon(node.run)
            await listener.until("up")
            into = CollectedDeltas()
            async with node.generate(relayed_job(stub={"delay_s": 0.05, "words": 1000}), into):
                await into.first.wait()
                os.kill(process.pid, signal.SIGSTOP)
                while not into.over.is_set():
                    await trio.sleep(0.1)
                    mock_clock.jump(health.timeout_s)
            assert isinstance(into.error, NodeFailed)
            assert [report[0] for report in listener.reports] == ["up", "down"]
            os.kill(process.pid, signal.SIGCONT)
            await listener.until("up", 2)
            got = await generated(node, relayed_job())
            assert text() == got.text()
            os.kill(process.pid, signal.SIGKILL)
            await listener.until("down", 2)
            nursery.cancel_scope.cancel()
