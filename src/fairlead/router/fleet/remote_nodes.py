"""The remote nodes of the fleet. A node is removed only when its jobs have finished."""

from collections.abc import Callable, Collection, Container

import structlog
import trio

from fairlead.base.config import HealthConfig, NodeConfig
from fairlead.base.config.urls import shown_url
from fairlead.base.errors import InvalidRequest, NoNode, NotFound
from fairlead.base.requester import Requester, who
from fairlead.base.supervision import FailureBoundary, log_failure
from fairlead.nodes.processes.health import Outcome
from fairlead.nodes.remote_node import remote_node
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.effects import NodeCounts
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.router.fleet.status import LoadStatus, ModelStatus, NodeAvailability, NodeStatus, RemoteDetails

logger = structlog.get_logger("fairlead.router.fleet")


class RemoteEntry:
    """One remote node. `run` lasts as long as it is in the fleet, until `close`.

    config: its settings.
    dispatcher: what grants its seats.
    nodes: gets the node while it is up.
    health: how it is probed.
    own_instance: the id of this server; a node that reports it is this server.
    may_be_restricted: whether it may have a link-local or metadata address.
    """

    def __init__(
        self,
        config: NodeConfig,
        dispatcher: Dispatcher,
        nodes: NodeRegistry,
        health: HealthConfig,
        own_instance: str,
        *,
        may_be_restricted: bool,
    ) -> None:
        self.config = config
        self.may_be_restricted = may_be_restricted
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._pause_s = (config.health_check or health).interval_s
        self._node = remote_node(
            config, nodes.report, health, own_instance, may_be_restricted=may_be_restricted
        )
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._is_draining = False
        self.is_withdrawn = False  # neither it nor a replacement gets more jobs

    @property
    def models(self) -> frozenset[str]:
        """The models that it has, as last reported; it may be down now."""
        return self._node.models

    @property
    def dialects(self) -> Collection[str] | None:
        """The dialects that it speaks, as far as is known; None: all."""
        return self._node.dialects

    def speaks(self, dialect: str) -> bool:
        """Return whether it speaks a dialect, as far as is known."""
        return self._node.dialects is None or dialect in self._node.dialects

    @property
    def is_dead(self) -> bool:
        """Whether its probes have found that its server is dead."""
        return self._node.is_dead

    @property
    def deaths(self) -> int:
        """How often they have."""
        return self._node.deaths

    @property
    def died_s(self) -> float:
        """How many seconds ago they have, the last time; infinity if never."""
        return trio.current_time() - self._node.died_at

    def count_request(self, outcome: Outcome, tenant: str) -> None:
        """Count a request that another process has sent to it; see `RemoteNode`."""
        self._node.requested(outcome, tenant)

    @property
    def was_probed(self) -> bool:
        """Whether its first probe is over, successful or not."""
        return self._node.was_probed.is_set()

    async def is_this_server(self) -> bool:
        """Return whether it is this server itself; wait for the first probe."""
        await self._node.was_probed.wait()
        return self._node.is_this_server

    async def run(self) -> None:
        """Probe the node until `close`. A failure of the probes is logged, and they start again."""
        try:
            with self._scope:
                while True:
                    await self._run_once()
                    await trio.sleep(self._pause_s)
        finally:
            self._ended.set()

    async def _run_once(self) -> None:
        boundary = FailureBoundary()
        try:
            with boundary:
                await self._node.run()
        finally:
            if boundary.failure is not None:
                log_failure("node failed", boundary.failure, node=self.config.id)
            if self._counts() is not None:  # the node could not report this itself
                self._nodes.remove(self.config.id)

    def change_probes(self, config: NodeConfig, health: HealthConfig) -> bool:
        """Use the settings of a configuration for its probes from now on. Return False if others differ."""
        if config.relaying != self.config.relaying:
            return False
        self.config = config
        self._node.change_check_endpoint(config.check_endpoint)
        self.change_health(health)
        return True

    def change_health(self, health: HealthConfig) -> None:
        """Use these health check settings from now on."""
        health = self.config.health_check or health
        self._pause_s = health.interval_s
        self._node.change_health(health)

    def drain(self) -> trio.Event:
        """Give it no more jobs; return an event that is set when it has none."""
        self._is_draining = True
        return self._dispatcher.close_node(self.config.id)

    async def close(self) -> None:
        """Drain the node, end its probes, and return when both are done."""
        await self.drain().wait()
        self._scope.cancel()
        await self._ended.wait()
        self._dispatcher.scheduler.reopen_node(self.config.id)

    def status(self) -> NodeStatus:
        """Return its status."""
        status = self._node.status()
        counts = self._counts()
        return NodeStatus(
            id=self.config.id,
            kind="remote",
            models=status.models,
            seats=status.seats if status.is_up else 0,
            busy=status.busy if counts is None else counts.busy,
            state=self._state(is_up=status.is_up),
            problem=status.problem,
            ups=status.ups,
            downs=status.downs,
            remote=RemoteDetails(url=shown_url(self.config.url), load=status.load),
        )

    def model_status(self, model: str) -> ModelStatus:
        """Return the status of one of its models, derived from its own: it loads models by itself."""
        status = self.status()
        is_up = status.state == "up"
        return ModelStatus(
            model=model,
            kind="remote",
            node=self.config.id,
            state="ready" if is_up else "draining" if status.state == "draining" else "stopped",
            seats=status.seats,
            busy=status.busy,
            sequences=status.busy,
            load=LoadStatus(progress=float(is_up)),
            problem=status.problem,
        )

    def _counts(self) -> NodeCounts | None:
        return self._dispatcher.scheduler.node_counts(self.config.id)

    def _state(self, *, is_up: bool) -> NodeAvailability:
        if self._is_draining:
            return "draining"
        return "up" if is_up else "down"


class RemoteNodes:
    """All remote nodes, by id.

    dispatcher: what grants their seats.
    nodes: gets those that are up.
    spawn: starts a task in the fleet's nursery.
    own_instance: the id of this server; a node that reports it is this server.
    is_local: returns whether a model can be loaded here.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        nodes: NodeRegistry,
        spawn: Callable[..., None],
        *,
        own_instance: str,
        is_local: Callable[[str], bool],
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = nodes
        self._is_local = is_local
        self._spawn = spawn
        self._own_instance = own_instance
        self._nodes: dict[str, RemoteEntry] = {}

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._nodes

    def has(self, model: str) -> bool:
        """Return whether one of them has the model, as far as is known."""
        return any(model in node.models for node in self._nodes.values())

    def offers(self, model: str) -> bool:
        """Return whether one of them has the model and may get jobs, now or when it is up again."""
        return any(model in node.models and not node.is_withdrawn for node in self._nodes.values())

    def is_up(self, model: str) -> bool:
        """Return whether one of them that takes jobs has the model."""
        found = (node for node in self._nodes.values() if model in node.models)
        return any(node.status().state == "up" for node in found)

    def speak(self, model: str, dialect: str) -> bool:
        """Return whether all that have the model speak the dialect."""
        return all(node.speaks(dialect) for node in self._nodes.values() if model in node.models)

    def add(
        self,
        config: NodeConfig,
        health: HealthConfig,
        *,
        by: Requester | None = None,
        may_be_restricted: bool = True,
    ) -> None:
        """Add a node to the fleet.

        config: its settings; the id must be free.
        health: how it is probed.
        by: who has requested it, here and below.
        may_be_restricted: whether it may have a link-local or metadata address.
        """
        assert config.id not in self._nodes
        node = RemoteEntry(
            config,
            self._dispatcher,
            self._registry,
            health,
            self._own_instance,
            may_be_restricted=may_be_restricted,
        )
        self._nodes[config.id] = node
        self._spawn(node.run)
        logger.info("node added", node=config.id, url=shown_url(config.url), **who(by))

    async def wait_for_probe(self, node_id: str) -> None:
        """Wait for a node's first probe. If it is this server, remove it and raise `InvalidRequest`."""
        node = self._find(node_id)
        if await node.is_this_server():
            if self._nodes.get(node_id) is node:
                await self.remove(node_id)
            raise InvalidRequest(f"url: {shown_url(node.config.url)} is this server itself", param="url")

    def drain(self, node_id: str, *, by: Requester | None = None) -> None:
        """Give a node no more jobs, but keep it in the fleet. Raises `NotFound`.

        Jobs that wait for one of its models, and that no other node can take, end with `NoNode`.
        """
        node = self._find(node_id)
        self._spawn(self._fail_waiting_later, node, self._withdraw(node))
        logger.info("node drained", node=node_id, **who(by))

    async def remove(self, node_id: str, *, for_good: bool = True, by: Requester | None = None) -> None:
        """Remove a node from the fleet; return when its jobs are finished. Raises `NotFound`.

        Waiting jobs end as in `drain`, unless `for_good` is False because another node replaces it.
        """
        node = self._find(node_id)
        if for_good:
            await self._fail_waiting_later(node, self._withdraw(node))
        await node.close()
        if self._nodes.get(node_id) is node:  # another caller may have removed it already
            del self._nodes[node_id]
            logger.info("node removed", node=node_id, **who(by))

    def count_request(self, node_id: str, outcome: Outcome, tenant: str) -> None:
        """Count a request to a node that another process has sent. The node may be gone meanwhile."""
        if (node := self._nodes.get(node_id)) is not None:
            node.count_request(outcome, tenant)

    def change_probes(self, config: NodeConfig, health: HealthConfig) -> bool:
        """Use the configuration of a node for its probes; return False if the node must be replaced."""
        node = self._nodes.get(config.id)
        return node is not None and node.change_probes(config, health)

    def change_health(self, health: HealthConfig) -> None:
        """Use these health check settings for all nodes from now on; drained nodes stay drained."""
        for node in self._nodes.values():
            node.change_health(health)

    def entries(self) -> list[RemoteEntry]:
        """Return all of them."""
        return list(self._nodes.values())

    def statuses(self) -> list[NodeStatus]:
        """Return the status of each node."""
        return [node.status() for node in self._nodes.values()]

    def models(self, *, but: Container[str]) -> list[ModelStatus]:
        """Return the status of each model that a node has, except `but`, preferring a node that is up."""
        names = dict.fromkeys(name for node in self._nodes.values() for name in sorted(node.models))
        found = (self.model(name) for name in names if name not in but)
        return [status for status in found if status is not None]

    def model(self, name: str) -> ModelStatus | None:
        """Return the status of one model, preferring a node that is up; None if no node has it."""
        found = [node.model_status(name) for node in self._nodes.values() if name in node.models]
        return next((status for status in found if status.state == "ready"), found[0] if found else None)

    def _withdraw(self, node: RemoteEntry) -> trio.Event:
        """Drain a node permanently; return an event that is set when it has no jobs."""
        node.is_withdrawn = True
        drained = node.drain()
        self._fail_waiting(node)
        return drained

    async def _fail_waiting_later(self, node: RemoteEntry, drained: trio.Event) -> None:
        """Once the node is drained, end the jobs that it failed meanwhile and that are queued again."""
        await drained.wait()
        self._fail_waiting(node)

    def _fail_waiting(self, node: RemoteEntry) -> None:
        for model in sorted(node.models):
            if not self._is_local(model) and not self.offers(model):
                self._dispatcher.scheduler.remove_model(
                    model, NoNode(f"no node has the model {model} any more")
                )

    def _find(self, node_id: str) -> RemoteEntry:
        if node_id not in self._nodes:
            raise NotFound(f"there is no node {node_id}")
        return self._nodes[node_id]
