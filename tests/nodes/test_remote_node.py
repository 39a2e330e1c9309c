"""A server elsewhere comes and goes, and says what it has."""

import os
import signal
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from fairlead.config import HealthConfig, NodeConfig
from fairlead.errors import NodeFailed
from fairlead.nodes.process import CommandProcess
from fairlead.nodes.remote_node import RemoteNode, remote_node
from fairlead.nodes.upstream import Upstream, UpstreamTimeouts
from nodes.listening import (
    Collected,
    Listening,
    generated,
    quick_health,
    relayed_job,
    stub,
    upstream_of,
)
from nodes.stub_server import text


def probed_node(server, listener, **options):
    """A node that probes the stub every 50 ms."""
    health = options.pop("health", quick_health())
    return RemoteNode("far", upstream_of(server), listener, health=health, **options)


async def test_it_gets_work_when_it_has_been_probed_and_none_when_it_was_taken_out():
    listener = Listening()
    async with stub() as server:
        node = probed_node(server, listener, names={"m": "m"}, seats=2)
        with pytest.raises(NodeFailed, match="far is down"):
            async with node.generate(relayed_job(), Collected()):
                pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            await listener.until("up")
            got = await generated(node, relayed_job())
            assert text() == got.text()
            nursery.cancel_scope.cancel()
        assert [("up", "far", 2), ("down", "far")] == listener.reports
        assert 0 == node.status().connections.idle


async def test_three_failed_probes_take_it_out_and_one_good_one_brings_it_back():
    listener = Listening()
    async with stub() as server, trio.open_nursery() as nursery:
        node = probed_node(server, listener, names={"m": "m"})
        nursery.start_soon(node.run)
        await listener.until("up")
        server.healthy = False
        await listener.until("down")
        server.healthy = True
        await listener.until("up", 2)
        assert ["up", "down", "up"] == [report[0] for report in listener.reports]
        nursery.cancel_scope.cancel()


async def test_a_server_without_health_route_is_asked_for_its_models():
    listener = Listening()
    async with stub() as server, trio.open_nursery() as nursery:
        server.health = False
        nursery.start_soon(probed_node(server, listener, names={"m": "m"}).run)
        await listener.until("up")
        seen = len(server.requests)
        while len(server.requests) < seen + 3:  # noqa: ASYNC110  # the stub tells nobody
            await trio.sleep(0.01)
        assert {"/v1/models"} == {asked.path for asked in server.requests[seen:]}
        nursery.cancel_scope.cancel()


async def test_a_server_whose_models_are_not_told_is_asked_for_them_again_and_again():
    listener = Listening()
    async with stub() as server, trio.open_nursery() as nursery:
        server.models = ["a", "b"]
        node = probed_node(server, listener)
        nursery.start_soon(node.run)
        await listener.until("up")
        assert {"a", "b"} == node.models
        server.models = ["b", "c"]
        await listener.until("seats")
        assert ("seats", "far", 1, ["b", "c"]) == listener.reports[-1]
        got = await generated(node, relayed_job(model="c"))
        assert text() == got.text()
        assert "c" == server.jobs[0].document["model"]
        nursery.cancel_scope.cancel()


async def test_a_fairlead_tells_its_seats_and_load():
    listener = Listening()
    async with stub() as server, trio.open_nursery() as nursery:
        server.seats, server.load = 8, 2
        node = probed_node(server, listener)
        nursery.start_soon(node.run)
        await listener.until("up")
        assert [("up", "far", 8)] == listener.reports
        assert node.status().is_fairlead
        assert 0.25 == node.status().load
        server.seats = 4
        await listener.until("seats")
        assert ("seats", "far", 4, ["m"]) == listener.reports[-1]
        assert 0.5 == node.status().load
        nursery.cancel_scope.cancel()


async def test_seats_that_were_configured_hold_and_a_lie_about_the_load_changes_no_seat():
    listener = Listening()
    async with stub() as server, trio.open_nursery() as nursery:
        server.seats, server.load = 8, 1000
        node = probed_node(server, listener, seats=3)
        nursery.start_soon(node.run)
        await listener.until("up")
        assert [("up", "far", 3)] == listener.reports
        assert 125.0 == node.status().load
        nursery.cancel_scope.cancel()


async def test_a_server_that_answers_others_is_not_ill_when_it_has_no_time_for_a_probe(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    listener = Listening()
    health = HealthConfig(interval_s=5.0, timeout_s=1.0, failures=1)
    async with stub() as server, trio.open_nursery() as nursery:
        node = probed_node(server, listener, names={"m": "m"}, health=health)
        nursery.start_soon(node.run)
        await listener.until("up")
        into = Collected()
        async with node.generate(relayed_job(stub={"delay_s": 1.0, "words": 12}), into):
            await into.first.wait()
            server.stalls_probes = True
            await into.over.wait()
        assert into.error is None
        await listener.until("down")  # now it answers nobody
        nursery.cancel_scope.cancel()


async def test_a_server_that_dies_fails_its_jobs_when_it_is_taken_out(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    listener = Listening()
    health = HealthConfig(interval_s=5.0, timeout_s=2.0, failures=2)
    async with stub() as server, trio.open_nursery() as nursery:
        node = probed_node(server, listener, names={"m": "m"}, health=health)
        nursery.start_soon(node.run)
        await listener.until("up")
        into = Collected()
        async with node.generate(relayed_job(stub={"how": "stall", "after": 3}), into):
            await into.first.wait()
            server.stalls_probes = True  # as if it were stopped: connections stay open, nothing comes
            await into.over.wait()
        assert isinstance(into.error, NodeFailed)
        assert ["up", "down"] == [report[0] for report in listener.reports]
        nursery.cancel_scope.cancel()


async def test_a_server_that_is_not_there_is_never_up():
    listener = Listening()
    config = NodeConfig(id="far", url="http://127.0.0.1:1")
    node = remote_node(config, listener, quick_health())
    with trio.move_on_after(0.3):
        await node.run()
    assert [] == listener.reports
    assert not node.status().is_up


async def test_the_configuration_says_names_key_and_filters():
    listener = Listening()
    async with stub() as server, trio.open_nursery() as nursery:
        from fairlead.config import FiltersConfig

        config = NodeConfig(
            id="far",
            url=f"{server.url}/v1",
            api_key="sk-1",
            seats=3,
            models=("small", "big"),
            model_names={"big": "org/Big"},
            filters=FiltersConfig(strip_params=("top_k",)),
        )
        node = remote_node(config, listener, quick_health())
        nursery.start_soon(node.run)
        await listener.until("up")
        assert [("up", "far", 3)] == listener.reports
        assert {"small", "big"} == node.models
        await generated(node, relayed_job(model="big", top_k=5))
        nursery.cancel_scope.cancel()
    [asked] = server.jobs
    assert "/v1/chat/completions" == asked.path
    assert "Bearer sk-1" == asked.headers["authorization"]
    assert "org/Big" == asked.document["model"]
    assert "top_k" not in asked.document


@contextmanager
def held_port():
    """A port on which the stub can listen, and nobody else comes to."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


async def test_a_server_that_is_stopped_and_goes_on_leaves_and_comes_back(mock_clock):
    mock_clock.rate = 1.0  # time goes by, and faster while probes are not answered
    listener = Listening()
    program = Path(__file__).with_name("stub_server.py")
    health = HealthConfig(interval_s=0.05, timeout_s=60.0, failures=2)
    with held_port() as port:
        timeouts = UpstreamTimeouts(between_bytes_s=float("inf"))
        upstream = Upstream(f"http://127.0.0.1:{port}", name="far", timeouts=timeouts)
        node = RemoteNode("far", upstream, listener, names={"m": "m"}, health=health)
        async with trio.open_nursery() as nursery:
            process = CommandProcess("far", (sys.executable, str(program), "--port", str(port)))
            await nursery.start(process.run)
            nursery.start_soon(node.run)
            await listener.until("up")
            into = Collected()
            async with node.generate(relayed_job(stub={"delay_s": 0.05, "words": 1000}), into):
                await into.first.wait()
                os.kill(process.pid, signal.SIGSTOP)
                while not into.over.is_set():
                    await trio.sleep(0.1)
                    mock_clock.jump(health.timeout_s)
            assert isinstance(into.error, NodeFailed)
            assert ["up", "down"] == [report[0] for report in listener.reports]
            os.kill(process.pid, signal.SIGCONT)
            await listener.until("up", 2)
            got = await generated(node, relayed_job())
            assert text() == got.text()
            os.kill(process.pid, signal.SIGKILL)
            await listener.until("down", 2)
            nursery.cancel_scope.cancel()
