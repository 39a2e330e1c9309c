"""The replicas of all models on the cluster: carries out what their state machines decide.

Runs in the process of the fleet. A replica is a node of the fleet from the moment when it
is up until it is drained or gone. Without a connection to the launcher nothing is started or ended.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress

import structlog
import trio

from fairlead.base.config import ClusterConfig
from fairlead.base.errors import FairleadError
from fairlead.base.frame_link import FrameLink
from fairlead.base.supervision import contain, keep_running, log_failure
from fairlead.distributed.ray.cluster_model import ClusterModel, ReplicaEntry, rules_of
from fairlead.distributed.ray.launcher_process import SOCKET
from fairlead.distributed.ray.messages import (
    FromLauncher,
    ReplicaEnded,
    ReplicaPlaced,
    Replicas,
    ReplicaUp,
    RunningReplica,
    StartReplica,
    StopReplica,
    from_launcher_decoder,
)
from fairlead.distributed.ray.orders import node_config, start_order
from fairlead.distributed.ray.replica_set import (
    DrainReplica,
    EndReplica,
    LaunchReplica,
    ModelLoad,
    ReplicaOrder,
    ReplicaSet,
)
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.status import NodeStatus, ReplicaCounts

TICK_S = 1.0
RECONNECT_S = 0.5
# A replica that does not answer for so long is replaced, although Ray has not lost it.
SILENT_FOR_S = 60.0

logger = structlog.get_logger("fairlead.distributed.ray")


class ClusterController:
    """Keeps the replicas of the models in the fleet's configuration.

    cluster: the settings.
    fleet: where replicas become nodes; `run` needs it to run.
    dispatcher: what knows how many jobs wait for each model.
    directory: where the launcher listens.
    connect: connects to the launcher's socket.

    `has_adopted` is set when the replicas that a launcher had already are nodes of the fleet, or if there is
    no launcher yet.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        fleet: Fleet,
        dispatcher: Dispatcher,
        directory: str,
        *,
        connect: Callable[[str], Awaitable[trio.abc.Stream]] = trio.open_unix_socket,
    ) -> None:
        self.has_adopted = trio.Event()
        self._cluster = cluster
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._path = f"{directory}/{SOCKET}"
        self._connect = connect
        self._numbers = itertools.count(1)
        self._models: dict[str, ClusterModel] = {}
        self._entries: dict[str, ReplicaEntry] = {}
        self._lost: set[str] = set()  # nodes whose launcher has ended: removed when they are down
        self._link: FrameLink[FromLauncher] | None = None
        self._nursery: trio.Nursery | None = None
        fleet.cluster.report = self.report

    async def run(self) -> None:
        """Keep the replicas until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(keep_running, "cluster connection", self._stay_connected)
            await keep_running("cluster", self._tick_forever)

    def report(self, model: str) -> tuple[ReplicaCounts, str | None]:
        """Return how many replicas of the model are in each state, and a problem with them."""
        known = self._models.get(model)
        if known is None:
            return ReplicaCounts(), None
        scaling = known.scaling
        counts = ReplicaCounts(
            wanted=scaling.wanted,
            starting=len(scaling.numbers("starting")),
            up=len(scaling.numbers("up")),
            draining=len(scaling.numbers("draining", "ending")),
        )
        unconnected = "there is no connection to the cluster" if self._link is None else None
        return counts, unconnected or known.waiting_for_room() or known.problem

    # Connection --------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        while True:
            try:
                stream = await self._connect(self._path)
            except OSError:
                self.has_adopted.set()
            else:
                self._link = FrameLink(stream, from_launcher_decoder, name="cluster launcher")
                try:
                    await self._link.run(self._handle)
                finally:
                    self._link = None
            await trio.sleep(RECONNECT_S)

    def _handle(self, message: FromLauncher) -> None:
        match message:
            case Replicas(replicas):
                self._reconcile({each.start.id: each for each in replicas})
            case ReplicaPlaced(replica, machine):
                if (entry := self._entries.get(replica)) is not None:
                    entry.machine = machine
                    logger.info("replica placed", node=replica, machine=machine)
            case ReplicaUp(replica):
                if (entry := self._entries.get(replica)) is not None:
                    self._spawn(self._add_node, entry, message)
            case ReplicaEnded(replica, reason):
                self._ended(replica, reason)

    def _reconcile(self, running: Mapping[str, RunningReplica]) -> None:
        """Compare the replicas of a launcher, to which this has just connected, with those known here."""
        self._update_models()
        for replica in self._entries.keys() - running.keys():
            self._lost.add(replica)
            self._ended(replica, "the cluster launcher has ended")
        first = max((each.start.number for each in running.values()), default=0) + 1
        self._numbers = itertools.count(max(first, next(self._numbers)))
        adopted = [each for replica, each in running.items() if replica not in self._entries]
        self._spawn(self._adopt, adopted)
        for replica, entry in self._entries.items():
            if entry.model.scaling.state(entry.number) == "ending":
                self._send(StopReplica(replica))

    async def _adopt(self, running: list[RunningReplica]) -> None:
        """Continue with replicas that an earlier controller has started. Changed ones are ended."""
        async with trio.open_nursery() as nursery:
            for each in running:
                order, model = each.start, self._models.get(each.start.model)
                if model is None or model.digest != order.digest:
                    self._send(StopReplica(order.id))
                    continue
                entry = self._entries[order.id] = model.add(order)
                entry.machine = each.machine
                model.scaling.adopt(order.number)
                if each.up is not None:
                    nursery.start_soon(self._add_node, entry, each.up)
        self.has_adopted.set()

    def _send(self, message: StartReplica | StopReplica) -> None:
        if self._link is not None:
            self._link.send(message)

    # Decisions ---------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            if self._link is not None and self.has_adopted.is_set():
                self._tick()
            await trio.sleep(TICK_S)

    def _tick(self) -> None:
        self._update_models()
        nodes = {status.id: status for status in self._fleet.nodes()}
        self._give_up_silent(nodes)
        for model in self._models.values():
            self._carry_out(model, model.scaling.tick(trio.current_time(), self._load(model, nodes)))
        for replica in list(self._lost):
            if replica not in nodes or nodes[replica].state != "up":
                self._lost.discard(replica)
                self._spawn(self._remove_node, replica)

    def _update_models(self) -> None:
        """Follow the configuration: end the replicas of removed and changed models, and add new models."""
        configured = self._fleet.catalog.config.cluster_models
        for name, model in list(self._models.items()):
            found = configured.get(name)
            if found is None or start_order(*found, 0).digest != model.digest:
                del self._models[name]
                self._carry_out(model, model.scaling.retire_all())
        for name, (config, replicas) in configured.items():
            rules = rules_of(self._cluster, replicas)
            if name in self._models:
                self._models[name].scaling.rules = rules
            else:
                self._models[name] = ClusterModel(config, replicas, ReplicaSet(rules, self._new_numbers()))

    def _new_numbers(self) -> Iterator[int]:
        while True:
            yield next(self._numbers)

    def _load(self, model: ClusterModel, nodes: Mapping[str, NodeStatus]) -> ModelLoad:
        backlog = self._dispatcher.estimator.behind_all(model.config.name)
        up = {
            number: nodes[entry.order.id]
            for number, entry in model.entries.items()
            if entry.order.id in nodes
        }
        return ModelLoad(
            waiting=backlog.waiting,
            wait_s=backlog.wait_s,
            busy={number: status.busy for number, status in up.items()},
            seats={number: status.seats for number, status in up.items()},
        )

    def _give_up_silent(self, nodes: Mapping[str, NodeStatus]) -> None:
        """End replicas that do not answer any more, and those whose nodes were removed by an operator."""
        now = trio.current_time()
        for replica, entry in self._entries.items():
            if entry.model.scaling.state(entry.number) != "up":
                continue
            if replica in nodes and nodes[replica].state != "down":
                entry.silent_since = None
                continue
            entry.silent_since = now if entry.silent_since is None else entry.silent_since
            if replica not in nodes or now - entry.silent_since >= SILENT_FOR_S:
                logger.warning("replica given up", node=replica, was_removed=replica not in nodes)
                self._carry_out(entry.model, entry.model.scaling.drained(entry.number))

    def _carry_out(self, model: ClusterModel, orders: list[ReplicaOrder]) -> None:
        for order in orders:
            replica = model.order(order.number)
            counts = {"node": replica.id, "wanted": model.scaling.wanted}
            match order:
                case LaunchReplica():
                    logger.info("replica requested", **counts)
                    self._entries[replica.id] = model.add(replica)
                    self._send(replica)
                case DrainReplica():
                    logger.info("replica draining", **counts)
                    self._spawn(self._drain, self._entries[replica.id])
                case EndReplica():
                    self._send(StopReplica(replica.id))

    # Events of replicas ------------------------------------------------------------------------------

    async def _add_node(self, entry: ReplicaEntry, up: ReplicaUp) -> None:
        """Make a replica, which takes requests now, a node of the fleet."""
        if not self._is_starting(entry):
            return
        try:
            await self._fleet.add_node(node_config(entry.order, up.url, up.key))
        except FairleadError as error:
            log_failure("replica not added", error, node=up.id)
            self._carry_out(entry.model, entry.model.scaling.drained(entry.number))
            return
        if self._is_starting(entry):
            entry.model.problem = None
            entry.model.scaling.came_up(entry.number, trio.current_time())
        else:
            await self._remove_node(up.id)

    def _is_starting(self, entry: ReplicaEntry) -> bool:
        """Return whether a replica exists and is wanted; meanwhile it may have ended."""
        is_known = self._entries.get(entry.order.id) is entry
        return is_known and entry.model.scaling.state(entry.number) == "starting"

    async def _drain(self, entry: ReplicaEntry) -> None:
        await self._remove_node(entry.order.id)
        self._carry_out(entry.model, entry.model.scaling.drained(entry.number))

    async def _remove_node(self, replica: str) -> None:
        """Remove a replica's node; return when its jobs are finished. It may be gone already."""
        with suppress(FairleadError):
            await self._fleet.remove_node(replica)

    def _ended(self, replica: str, reason: str) -> None:
        entry = self._entries.pop(replica, None)
        if entry is None:
            return
        del entry.model.entries[entry.number]
        scaling = entry.model.scaling
        if scaling.state(entry.number) == "ending":
            logger.info("replica ended", node=replica)
        else:
            entry.model.problem = f"a replica {reason}"
            logger.warning("replica lost", node=replica, machine=entry.machine, reason=reason)
        scaling.ended(entry.number, trio.current_time())
        if replica not in self._lost:
            self._spawn(self._remove_node, replica)

    def _spawn(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Start a task. Its failure ends neither this nor the fleet."""
        assert self._nursery is not None, "the controller runs"
        self._nursery.start_soon(contain, task.__qualname__, task, *arguments)
