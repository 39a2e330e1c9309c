"""What a front does with the state of a dispatcher that has just started, and does not know its nodes yet."""

from types import SimpleNamespace

import msgspec
import pytest
import trio

from fairlead.base.config import Config, NodeConfig
from fairlead.distributed.supervisor.fleet_state import FleetState, RemoteState, encoded
from fairlead.distributed.supervisor.fleet_view import FleetView
from fairlead.distributed.supervisor.front_nodes import FrontNodes
from fairlead.router.dispatch.dispatcher import DispatchStatistics
from fairlead.router.fleet.fleet import SURVEY_S
from nodes.listening import CollectedDeltas, relayed_job, stub
from router.fleet.running_fleet import running_fleet


def state(*remote, knows_nodes=True):
    """Return a state with these remote nodes and nothing else."""
    types = msgspec.structs.fields(DispatchStatistics)
    return FleetState(
        instance="i",
        knows_nodes=knows_nodes,
        is_ready=True,
        problems={},
        models=(),
        nodes=(),
        queue=DispatchStatistics(**{field.name: 0 for field in types}),
        local={},
        remote=remote,
        engines={},
        commands={},
    )


def remote(url, dialects=None, *, may_be_restricted=True):
    return RemoteState(NodeConfig(id="far", url=url), ("m",), dialects, False, may_be_restricted)


@pytest.mark.parametrize("change", ["dialects", "gone"])
async def test_job_goes_on_when_a_new_dispatcher_says_something_else_of_its_node(change):
    async with stub() as server, trio.open_nursery() as nursery:
        nodes = FrontNodes("front", SimpleNamespace(texts={}), nursery, trio.lowlevel.checkpoint)
        nodes.update(state(remote(server.url)))
        deltas = CollectedDeltas()
        async with nodes.find("far").generate(relayed_job(stub={"delay_s": 0.05}), deltas):
            await deltas.first.wait()
            nodes.update(state(remote(server.url, ("openai",))) if change == "dialects" else state())
            await deltas.over.wait()
        assert deltas.error is None
        assert len(nodes) == (change == "dialects")
        nodes.update(state())  # closes the connections
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("may_be_restricted", [True, False])
async def test_front_sends_nothing_to_a_restricted_address_that_the_configuration_does_not_name(
    monkeypatch, may_be_restricted
):
    monkeypatch.setattr("fairlead.nodes.http.links.is_restricted", lambda address: address == "127.0.0.1")
    async with stub() as server, trio.open_nursery() as nursery:
        nodes = FrontNodes("front", SimpleNamespace(texts={}), nursery, trio.lowlevel.checkpoint)
        nodes.update(state(remote(server.url, may_be_restricted=may_be_restricted)))
        deltas = CollectedDeltas()
        async with nodes.find("far").generate(relayed_job(), deltas):
            await deltas.over.wait()
        assert (deltas.error is None) == may_be_restricted
        nodes.update(state())
        nursery.cancel_scope.cancel()


async def test_front_keeps_its_state_until_the_new_dispatcher_has_probed_its_nodes():
    answers = [
        state(knows_nodes=False),  # of the first one: there is nothing to keep
        state(remote("http://a")),
        state(knows_nodes=False),
        state(remote("http://b")),
    ]

    async def ask(_question):
        return encoded(answers.pop(0))

    view = FleetView(Config(models=()), SimpleNamespace(ask=ask), None)
    seen = []
    view.on_change = seen.append
    while answers:
        await view.refresh()
    assert [[each.config.url for each in found.remote] for found in seen] == [[], ["http://a"], ["http://b"]]


async def test_fleet_knows_its_nodes_when_each_was_probed_or_after_a_time(autojump_clock):
    silent = trio.socket.socket()
    await silent.bind(("127.0.0.1", 0))
    silent.listen(1)
    node = NodeConfig(id="far", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    async with running_fleet(nodes=(node,)) as opened:
        assert not opened.fleet.knows_nodes
        await trio.sleep(SURVEY_S)
        assert opened.fleet.knows_nodes
    silent.close()
    async with stub() as server, running_fleet(nodes=(NodeConfig(id="far", url=server.url),)) as opened:
        await opened.until(lambda: opened.fleet.has("m"))
        assert opened.fleet.knows_nodes
