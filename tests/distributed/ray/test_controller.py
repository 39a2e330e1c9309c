"""The controller carries out what the state machines decide, with a launcher and a fleet of the test."""

from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import memory_stream_pair

from fairlead.base.config import ClusterConfig, Config, ModelConfig, ReplicasConfig
from fairlead.base.errors import NotFound
from fairlead.base.frame_link import FrameLink
from fairlead.distributed.ray.controller import SILENT_FOR_S, ClusterController
from fairlead.distributed.ray.messages import (
    ReplicaEnded,
    ReplicaPlaced,
    Replicas,
    ReplicaUp,
    RunningReplica,
    StartReplica,
    StopReplica,
    to_launcher_decoder,
)
from fairlead.distributed.ray.orders import start_order
from fairlead.router.dispatch.wait_estimator import Backlog
from fairlead.router.fleet.status import NodeStatus, ReplicaCounts

CLUSTER = ClusterConfig(target_wait_s=5.0, scale_up_after_s=10.0, scale_down_after_s=60.0)
SEATS = 4


def model(**settings) -> ModelConfig:
    settings.setdefault("replicas", ReplicasConfig(max=3))
    return ModelConfig(path=Path("/models/qwen"), name="qwen", **settings)


class Nodes:
    """A fleet of nodes that are up at once. One with jobs is removed only when `finish` is called."""

    def __init__(self, config: Config) -> None:
        self.catalog = SimpleNamespace(config=config)
        self.cluster = SimpleNamespace(report=None)
        self.states: dict[str, str] = {}
        self.busy: dict[str, int] = {}
        self.keys: dict[str, tuple[str, str | None]] = {}
        self.finished = trio.Event()

    def nodes(self) -> list[NodeStatus]:
        return [
            NodeStatus(
                id=each,
                kind="remote",
                models=("qwen",),
                seats=SEATS,
                busy=self.busy.get(each, 0),
                state=state,
            )
            for each, state in self.states.items()
        ]

    async def add_node(self, config) -> None:
        await trio.lowlevel.checkpoint()
        self.states[config.id] = "up"
        self.keys[config.id] = config.url, config.api_key

    async def remove_node(self, node_id: str) -> None:
        if node_id not in self.states:
            raise NotFound(node_id)
        self.states[node_id] = "draining"
        if self.busy.get(node_id):
            await self.finished.wait()
        self.states.pop(node_id, None)


class Launcher:
    """The other end of the connection. Replicas come up a second after they were ordered."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.running: dict[str, RunningReplica] = {}
        self.starts: list[str] = []
        self.stops: list[str] = []
        self.has_room = True
        self.is_there = True
        self._nursery = nursery
        self.link: FrameLink | None = None

    async def connect(self, _path: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if not self.is_there:
            raise OSError
        ours, theirs = memory_stream_pair()
        self.link = FrameLink(ours, to_launcher_decoder)
        self.link.send(Replicas(tuple(self.running.values())))
        self._nursery.start_soon(self.link.run, self._handle)
        return theirs

    def _handle(self, message: StartReplica | StopReplica) -> None:
        match message:
            case StartReplica():
                self.starts.append(message.id)
                self.running[message.id] = RunningReplica(message)
                if self.has_room:
                    self._nursery.start_soon(self._start, message)
            case StopReplica(replica):
                self.stops.append(replica)
                self.end(replica, "was ended")

    async def _start(self, order: StartReplica) -> None:
        await trio.sleep(1.0)
        if order.id in self.running and self.link is not None:
            up = ReplicaUp(order.id, f"http://10.0.0.1:{order.number}", "sk-key")
            self.running[order.id] = RunningReplica(order, "10.0.0.1", up)
            self.link.send(ReplicaPlaced(order.id, "10.0.0.1"))
            self.link.send(up)

    def end(self, replica: str, reason: str) -> None:
        if self.running.pop(replica, None) is not None and self.link is not None:
            self.link.send(ReplicaEnded(replica, reason))


class Server:
    """A controller with its fleet and launcher. `backlog` is the load of the model."""

    def __init__(self, nursery: trio.Nursery, *models: ModelConfig) -> None:
        self.fleet = Nodes(Config(models=models, cluster=CLUSTER))
        self.launcher = Launcher(nursery)
        self.backlog = Backlog(0, 0)
        self.controller = self.make()

    def make(self) -> ClusterController:
        dispatcher = SimpleNamespace(estimator=SimpleNamespace(behind_all=lambda _model: self.backlog))
        return ClusterController(CLUSTER, self.fleet, dispatcher, "", connect=self.launcher.connect)

    @property
    def up(self) -> list[str]:
        return sorted(each for each, state in self.fleet.states.items() if state == "up")

    def report(self) -> tuple[ReplicaCounts, str | None]:
        return self.fleet.cluster.report("qwen")


@asynccontextmanager
async def running(*models: ModelConfig, begun: bool = True):
    async with trio.open_nursery() as nursery:
        server = Server(nursery, *(models or (model(),)))
        nursery.start_soon(server.controller.run)
        if begun:
            await trio.sleep(5)
        yield server
        nursery.cancel_scope.cancel()


async def test_replica_is_a_node_with_a_key_once_it_is_up(autojump_clock):
    async with running(begun=False) as server:
        await trio.sleep(0.5)
        assert server.up == []
        await trio.sleep(5)
        assert server.fleet.keys == {"ray:qwen:1": ("http://10.0.0.1:1", "sk-key")}
        assert server.report() == (ReplicaCounts(wanted=1, up=1), None)


async def test_replicas_follow_the_estimated_wait(autojump_clock):
    async with running() as server:
        server.backlog = Backlog(9, 30)
        server.fleet.busy["ray:qwen:1"] = SEATS
        await trio.sleep(9)
        assert len(server.launcher.starts) == 1
        await trio.sleep(41)
        assert len(server.up) == 3
        server.backlog, server.fleet.busy = Backlog(0, 0), {}
        await trio.sleep(50)
        assert len(server.up) == 3
        await trio.sleep(90)
        assert server.up == ["ray:qwen:1"]
        assert server.launcher.stops == ["ray:qwen:3", "ray:qwen:2"]
        await trio.sleep(500)
        assert server.up == ["ray:qwen:1"]


async def test_replica_ends_when_its_last_job_has_ended(autojump_clock):
    async with running(model(replicas=ReplicasConfig(min=2, max=2))) as server:
        server.fleet.busy = {"ray:qwen:2": 1}
        smaller = model(replicas=ReplicasConfig(min=1, max=1))
        server.fleet.busy["ray:qwen:1"] = 2
        server.fleet.catalog.config = Config(models=(smaller,), cluster=CLUSTER)
        await trio.sleep(100)
        assert server.fleet.states == {"ray:qwen:1": "up", "ray:qwen:2": "draining"}
        assert server.launcher.stops == []
        server.fleet.finished.set()
        await trio.sleep(1)
        assert server.launcher.stops == ["ray:qwen:2"]
        assert server.fleet.states == {"ray:qwen:1": "up"}


async def test_replica_whose_machine_is_lost_is_replaced(autojump_clock):
    async with running() as server:
        server.launcher.end("ray:qwen:1", "died")
        await trio.sleep(5)
        assert server.up == ["ray:qwen:2"]


async def test_problem_of_the_latest_replica_is_reported(autojump_clock):
    async with running() as server:
        server.launcher.has_room = False
        server.launcher.end("ray:qwen:1", "did not start: there is no folder /models/qwen")
        await trio.sleep(5)
        assert server.report()[1] == "a replica did not start: there is no folder /models/qwen"
        await trio.sleep(10)
        assert server.report()[1] == "1 replicas wait for a machine with 1 CPUs and 0 GPUs"


async def test_replica_that_does_not_answer_is_replaced_after_a_time(autojump_clock):
    async with running() as server:
        server.fleet.states["ray:qwen:1"] = "down"
        await trio.sleep(SILENT_FOR_S - 2)
        assert server.launcher.stops == []
        await trio.sleep(10)
        assert server.launcher.stops == ["ray:qwen:1"]
        assert server.fleet.states == {"ray:qwen:2": "up"}


async def test_replica_whose_node_an_operator_removes_is_ended_and_replaced(autojump_clock):
    async with running() as server:
        await server.fleet.remove_node("ray:qwen:1")
        await trio.sleep(5)
        assert server.launcher.stops == ["ray:qwen:1"]
        assert server.up == ["ray:qwen:2"]


@pytest.mark.parametrize("slots", [8, None])
async def test_changed_model_gets_new_replicas_and_a_removed_one_loses_its_own(autojump_clock, slots):
    async with running() as server:
        models = (model(slots=slots),) if slots else ()
        server.fleet.catalog.config = Config(models=models, cluster=CLUSTER)
        await trio.sleep(5)
        assert server.launcher.stops == ["ray:qwen:1"]
        assert server.up == (["ray:qwen:2"] if slots else [])


async def test_next_controller_adopts_the_replicas_and_ends_those_that_differ(autojump_clock):
    old = model(slots=1)
    async with trio.open_nursery() as nursery:
        server = Server(nursery, model())
        for number, config in ((4, model()), (5, old), (6, model())):
            order = start_order(config, config.replicas, number)
            up = ReplicaUp(order.id, "http://10.0.0.1:1", "sk") if number < 6 else None
            server.launcher.running[order.id] = RunningReplica(order, "10.0.0.1", up)
        nursery.start_soon(server.controller.run)
        await server.controller.has_adopted.wait()
        assert server.up == ["ray:qwen:4"]
        await trio.sleep(5)
        assert server.report()[0] == ReplicaCounts(wanted=2, up=1, starting=1)
        assert server.launcher.stops == ["ray:qwen:5"]
        assert server.launcher.starts == []
        nursery.cancel_scope.cancel()


async def test_nodes_of_a_launcher_that_ended_serve_until_they_are_down(autojump_clock):
    async with running() as server:
        server.launcher.is_there = False
        server.launcher.running.clear()
        server.launcher.link.close()
        await trio.sleep(100)
        assert server.report()[1] == "there is no connection to the cluster"
        assert server.up == ["ray:qwen:1"]
        assert server.launcher.starts == ["ray:qwen:1"]
        server.launcher.is_there = True
        await trio.sleep(5)
        assert server.up == ["ray:qwen:1", "ray:qwen:2"]
        server.fleet.states["ray:qwen:1"] = "down"
        await trio.sleep(5)
        assert server.fleet.states == {"ray:qwen:2": "up"}


async def test_without_a_launcher_nothing_is_adopted(autojump_clock):
    async with trio.open_nursery() as nursery:
        server = Server(nursery, model())
        server.launcher.is_there = False
        nursery.start_soon(server.controller.run)
        with trio.fail_after(1):
            await server.controller.has_adopted.wait()
        nursery.cancel_scope.cancel()
