"""Models on a cluster: known before a replica is up, and never loaded on this machine."""

import msgspec
import pytest
import trio

from fairlead.base.config import ClusterConfig, NodeConfig, ReplicasConfig
from fairlead.base.errors import InvalidRequest
from fairlead.router.dispatch.wait_estimator import Backlog
from fairlead.router.fleet.status import ReplicaCounts
from nodes.listening import relayed_job, stub
from nodes.stub_server import text
from router.fleet.running_fleet import engine, running_fleet
from router.fleet.test_remote_nodes import QUICK

CLUSTER = ClusterConfig()


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    async def run_cluster(*_):
        await trio.sleep_forever()

    monkeypatch.setattr("fairlead.server.app.refuse_without_ray", lambda _config: None)
    monkeypatch.setattr("fairlead.server.app.run_cluster", run_cluster)


def on_cluster(**settings):
    settings.setdefault("replicas", ReplicasConfig())
    return engine("m", aliases=("other",), preload=True, **settings)


async def test_job_waits_for_a_replica_and_runs_on_it():
    async with stub() as server, running_fleet(on_cluster(), cluster=CLUSTER, health_check=QUICK) as opened:
        fleet = opened.fleet
        assert (fleet.has("m"), fleet.offers("m"), fleet.is_relayed("m")) == (True, True, True)
        assert fleet.speaks("m", "ollama")
        assert (fleet.catalog.texts, fleet.catalog.aliases) == ({}, {"other": "m"})
        assert not fleet.is_ready
        answers = []

        async def ask():
            answers.append(await opened.run_job(relayed_job()))

        async with trio.open_nursery() as clients:
            clients.start_soon(ask)
            await opened.until(lambda: opened.dispatcher.statistics().waiting == 1)
            backlog = opened.dispatcher.estimator.behind_all("m")
            assert (backlog.waiting, backlog.wait_s > 0) == (1, True)
            await fleet.add_node(NodeConfig(id="ray:m:1", url=server.url, models=("m",)))
        assert answers == [text()]
        assert opened.dispatcher.estimator.behind_all("m") == Backlog(0, 0)
        assert fleet.is_ready


async def test_job_that_waits_stays_when_the_last_replica_is_removed():
    async with stub() as server, running_fleet(on_cluster(), cluster=CLUSTER, health_check=QUICK) as opened:
        await opened.fleet.add_node(NodeConfig(id="ray:m:1", url=server.url, models=("m",)))
        async with trio.open_nursery() as clients:
            await opened.fleet.drain_node("ray:m:1")
            clients.start_soon(opened.run_job, relayed_job())
            await opened.until(lambda: opened.dispatcher.statistics().waiting == 1)
            await opened.fleet.remove_node("ray:m:1")
            assert opened.dispatcher.statistics().waiting == 1
            await opened.fleet.add_node(NodeConfig(id="ray:m:2", url=server.url, models=("m",)))


async def test_status_shows_the_replicas_and_their_problem():
    async with running_fleet(on_cluster(), cluster=CLUSTER) as opened:
        counts = ReplicaCounts(wanted=2, starting=1)
        opened.fleet.cluster.report = lambda _model: (counts, "no room")
        (status,) = opened.fleet.models()
        assert (status.kind, status.state, status.aliases) == ("remote", "loading", ("other",))
        assert (status.replicas, status.problem) == (counts, "no room")
        assert opened.fleet.model("m") == status
        assert opened.fleet.nodes() == []


async def test_model_on_the_cluster_cannot_be_loaded_here():
    async with running_fleet(on_cluster(), cluster=CLUSTER) as opened:
        for refused in (opened.fleet.load, opened.fleet.unload):
            with pytest.raises(InvalidRequest):
                await refused("m")
        opened.fleet.keep("m", 5.0)


async def test_reload_moves_a_model_to_the_cluster_and_back():
    here = on_cluster(replicas=None)
    async with running_fleet(here, cluster=CLUSTER) as opened:
        config = opened.fleet.catalog.config
        await opened.until(lambda: opened.fleet.model("m").state == "ready")
        await opened.fleet.reload(msgspec.structs.replace(config, models=(on_cluster(),)))
        await opened.until(lambda: [node.kind for node in opened.fleet.nodes()] == [])
        assert opened.fleet.model("m").kind == "remote"
        await opened.fleet.reload(config)
        await opened.until(lambda: opened.fleet.model("m").state == "ready")
        assert "m" in opened.fleet.catalog.texts
