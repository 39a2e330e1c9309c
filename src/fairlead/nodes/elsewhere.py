"""Nodes elsewhere and their place in the fleet: they come, are drained, and go, their jobs finished."""

from collections.abc import Callable, Container

import structlog
import trio

from fairlead.config import HealthConfig, NodeConfig
from fairlead.errors import InvalidRequest, NoNode, NotFound
from fairlead.nodes.desk import Desk
from fairlead.nodes.remote_node import remote_node
from fairlead.nodes.status import ModelStatus, NodeState, NodeStatus
from fairlead.supervision import FailureBoundary, log_failure

logger = structlog.get_logger("fairlead.fleet")


class Elsewhere:
    """One configured node. `run` is its time in the fleet; `leave` ends it."""

    def __init__(self, config: NodeConfig, desk: Desk, health: HealthConfig, ourselves: str) -> None:
        self.config = config
        self._desk = desk
        self._pause_s = health.interval_s
        self._node = remote_node(config, desk, health, ourselves)
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        self._is_draining = False
        self.is_withdrawn = False  # it gets no more jobs, nor does a node that takes its place

    @property
    def models(self) -> frozenset[str]:
        """What it has, as far as is known: what it told last, though it may be down."""
        return self._node.models

    async def is_ourselves(self) -> bool:
        """Whether it is this very server, once it was asked."""
        await self._node.met.wait()
        return self._node.is_ourselves

    async def run(self) -> None:
        """Probe it, until it leaves. Whatever else ends its probes is its own failure: they begin again."""
        try:
            with self._scope:
                while True:
                    await self._run_once()
                    await trio.sleep(self._pause_s)
        finally:
            self._over.set()

    async def _run_once(self) -> None:
        boundary = FailureBoundary()
        try:
            with boundary:
                await self._node.run()
        finally:
            if boundary.failure is not None:
                log_failure("node failed", boundary.failure, node=self.config.id)
            if self._desk.counts(self.config.id) is not None:  # it could not report that it is down
                self._desk.node_down(self._node)

    def change_health(self, health: HealthConfig) -> None:
        """Probe it by these settings from now on."""
        self._pause_s = health.interval_s
        self._node.change_health(health)

    def drain(self) -> trio.Event:
        """Give it no more jobs; return what is set when it has none."""
        self._is_draining = True
        return self._desk.close(self.config.id)

    async def leave(self) -> None:
        """Return when it is drained and out of the fleet."""
        await self.drain().wait()
        self._scope.cancel()
        await self._over.wait()
        self._desk.reopen(self.config.id)

    def status(self) -> NodeStatus:
        """Return the picture of it."""
        told = self._node.status()
        counts = self._desk.counts(self.config.id)
        return NodeStatus(
            id=self.config.id,
            kind="remote",
            url=self.config.url,
            models=told.models,
            seats=told.seats if told.is_up else 0,
            busy=told.busy if counts is None else counts.busy,
            state=self._state(is_up=told.is_up),
            load=told.load,
            problem=told.problem,
            ups=told.ups,
            downs=told.downs,
        )

    def model_status(self, model: str) -> ModelStatus:
        """Return the picture of one of its models. What it does with it is its own affair."""
        told = self.status()
        is_up = told.state == "up"
        return ModelStatus(
            model=model,
            kind="remote",
            node=self.config.id,
            state="ready" if is_up else "draining" if told.state == "draining" else "stopped",
            seats=told.seats,
            busy=told.busy,
            sequences=told.busy,
            load_progress=float(is_up),
            problem=told.problem,
        )

    def _state(self, *, is_up: bool) -> NodeState:
        if self._is_draining:
            return "draining"
        return "up" if is_up else "down"


class Neighbours:
    """All nodes elsewhere, by id. `spawn` starts a task that lasts as long as the fleet.

    `ourselves` is who we say that we are: a node that says the same is not elsewhere. `is_ours` says whether
    a model can be loaded here.
    """

    def __init__(
        self, desk: Desk, spawn: Callable[..., None], *, ourselves: str, is_ours: Callable[[str], bool]
    ) -> None:
        self._desk = desk
        self._is_ours = is_ours
        self._spawn = spawn
        self._ourselves = ourselves
        self._nodes: dict[str, Elsewhere] = {}

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._nodes

    def have(self, model: str) -> bool:
        """Whether one of them has the model, as far as is known."""
        return any(model in node.models for node in self._nodes.values())

    def offer(self, model: str) -> bool:
        """Whether one of them has the model and may be given jobs, now or when it is up again."""
        return any(model in node.models and not node.is_withdrawn for node in self._nodes.values())

    def add(self, config: NodeConfig, health: HealthConfig) -> None:
        """Take a node into the fleet. Its id must be free."""
        assert config.id not in self._nodes
        node = self._nodes[config.id] = Elsewhere(config, self._desk, health, self._ourselves)
        self._spawn(node.run)
        logger.info("node added", node=config.id, url=config.url)

    async def meet(self, node_id: str) -> None:
        """Return when a node was asked how it is. Raises `InvalidRequest`, and it is gone, if it is us."""
        node = self._find(node_id)
        if await node.is_ourselves():
            if self._nodes.get(node_id) is node:
                await self.remove(node_id)
            raise InvalidRequest(f"url: {node.config.url} is this server itself", param="url")

    def drain(self, node_id: str) -> None:
        """Give a node no more jobs; it stays. Raises `NotFound`.

        Jobs that wait for one of its models, and that no other node can be given, end with `NoNode`.
        """
        node = self._find(node_id)
        self._spawn(self._end_waiting_later, node, self._withdraw(node))
        logger.info("node drained", node=node_id)

    async def remove(self, node_id: str, *, for_good: bool = True) -> None:
        """Return when a node is out of the fleet, its jobs finished. Raises `NotFound`.

        Jobs that wait end as in `drain`; unless it is not `for_good`, because another takes its place.
        """
        node = self._find(node_id)
        if for_good:
            await self._end_waiting_later(node, self._withdraw(node))
        await node.leave()
        if self._nodes.get(node_id) is node:  # who else had asked for it may have been first
            del self._nodes[node_id]
            logger.info("node removed", node=node_id)

    def change_health(self, health: HealthConfig) -> None:
        """Probe all of them by these settings from now on; one that is drained stays so."""
        for node in self._nodes.values():
            node.change_health(health)

    def statuses(self) -> list[NodeStatus]:
        """Return the picture of each."""
        return [node.status() for node in self._nodes.values()]

    def models(self, *, but: Container[str]) -> list[ModelStatus]:
        """Return the picture of each model that one of them has: one that is up, if there is one."""
        names = dict.fromkeys(name for node in self._nodes.values() for name in sorted(node.models))
        found = (self.model(name) for name in names if name not in but)
        return [status for status in found if status is not None]

    def model(self, name: str) -> ModelStatus | None:
        """Return the picture of one model, of a node that is up if there is one; None if nobody has it."""
        found = [node.model_status(name) for node in self._nodes.values() if name in node.models]
        return next((status for status in found if status.state == "ready"), found[0] if found else None)

    def _withdraw(self, node: Elsewhere) -> trio.Event:
        """Drain a node for good; return what is set when it has no jobs."""
        node.is_withdrawn = True
        drained = node.drain()
        self._end_waiting(node)
        return drained

    async def _end_waiting_later(self, node: Elsewhere, drained: trio.Event) -> None:
        """End the jobs that came back to the queue because the node failed them while it was drained."""
        await drained.wait()
        self._end_waiting(node)

    def _end_waiting(self, node: Elsewhere) -> None:
        for model in sorted(node.models):
            if not self._is_ours(model) and not self.offer(model):
                self._desk.forget(model, NoNode(f"no node has the model {model} any more"))

    def _find(self, node_id: str) -> Elsewhere:
        if node_id not in self._nodes:
            raise NotFound(f"there is no node {node_id}")
        return self._nodes[node_id]
