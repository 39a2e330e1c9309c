"""The nodes as a front reaches them: engines over their sockets, other servers over HTTP.

The dispatcher decides which nodes there are and which of them are up; a front connects to those. The
dispatcher probes servers, and fronts send the requests. So fronts report failed connections, which may stop
new jobs, and end the jobs of a server that the dispatcher has found dead.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from math import inf

import trio

from fairlead.base.config import CommandConfig, NodeConfig
from fairlead.base.errors import NodeFailed, NodeFull
from fairlead.base.grant import Grant
from fairlead.base.job import Job
from fairlead.base.messages import WorkerSpec
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.base.supervision import contain
from fairlead.distributed.supervisor.fleet_state import FleetState
from fairlead.nodes.command_node import command_upstream
from fairlead.nodes.engine_node import EngineNode, attached_engine
from fairlead.nodes.http.client import Upstream
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import Node
from fairlead.nodes.processes.health import Outcome
from fairlead.nodes.remote_node import UNANSWERED, RemoteNode, node_tls, upstream_timeouts
from fairlead.nodes.server_probe import SEATS_AT_MOST
from fairlead.nodes.streams.sink import Sink
from fairlead.router.fleet.catalog import ModelCatalog

# A success is not reported again within this time.
SUCCESS_S = 1.0
MOST_REPORTED = 1000
# An engine accepts a front between two of its steps.
ATTACH_WAIT_S = 10.0


class FrontNodes:
    """The nodes of the latest `FleetState`, as a `NodeSource`.

    name: that of this front.
    catalog: the configured models.
    nursery: has the connections to engines.
    refresh: gets the current state, and calls `update`.
    on_request: gets the id of a remote node, the outcome of a request, and its tenant; see `RemoteNode`. Not
        every success is reported.
    """

    def __init__(
        self,
        name: str,
        catalog: ModelCatalog,
        nursery: trio.Nursery,
        refresh: Callable[[], Awaitable[None]],
        *,
        on_request: Callable[[str, Outcome, str], None] = lambda _node_id, _outcome, _tenant: None,
    ) -> None:
        self._name = name
        self._catalog = catalog
        self._nursery = nursery
        self._engines: dict[str, EngineHandle] = {}
        self._servers: dict[str, tuple[object, RemoteNode]] = {}
        self._retired: list[RemoteNode] = []  # which may have jobs
        self._deaths: dict[str, int] = {}  # of remote nodes, as of the latest state
        self._refresh = refresh
        self._on_request = on_request

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._engines) + len(self._servers)

    def find(self, node_id: str) -> Node:
        """Return the node of a seat, which may have come up since the latest state."""
        if (server := self._servers.get(node_id)) is not None:
            return server[1]
        if (engine := self._engines.get(node_id)) is not None and engine.may_attach:
            return engine
        return _ExpectedNode(node_id, self)

    def serving(self, model: str) -> list[Node]:
        """Return the engine of the model, if there is one; other servers compile no grammars of ours."""
        engine = self._engines.get(f"engine:{model}")
        return [] if engine is None else [engine]

    def update(self, state: FleetState) -> None:
        """Connect to new nodes, and close the connections to those that are gone."""
        engines = {f"engine:{model}": (model, spec) for model, spec in state.engines.items()}
        for node_id, handle in list(self._engines.items()):
            found = engines.get(node_id)
            if found is None or found[1] != handle.spec or not handle.may_attach:
                del self._engines[node_id]
                handle.close()
        for node_id, (model, spec) in engines.items():
            if node_id not in self._engines and model in self._catalog.texts:
                self._engines[node_id] = self._attach(model, spec)
        self._update_servers(state)

    def _update_servers(self, state: FleetState) -> None:
        servers: dict[str, tuple[object, Callable[[], RemoteNode]]] = {}
        for remote in state.remote:
            config = remote.config
            others = remote.dialects, remote.may_be_restricted
            servers[config.id] = (config.relaying, *others), partial(self._remote, config, *others)
        for model, command in state.commands.items():
            servers[f"command:{model}"] = command, partial(_command, command)
        for node_id, (source, _) in list(self._servers.items()):
            if node_id not in servers or servers[node_id][0] != source:
                # Its jobs continue: a new dispatcher may not have added the node to its state yet.
                self._retired.append(self._servers.pop(node_id)[1])
        self._retired = [node for node in self._retired if not node.close_if_idle()]
        for node_id, (source, make) in servers.items():
            if node_id not in self._servers:
                node = make()
                node.came_up()
                self._servers[node_id] = source, node
        for remote in state.remote:
            # It may be up again already. If it is dead, it may have ended to send in the meantime.
            if remote.is_dead or remote.deaths > self._deaths.get(remote.config.id, remote.deaths):
                self._end_jobs(self._servers[remote.config.id][1], died_s=remote.died_s)
        self._deaths = {remote.config.id: remote.deaths for remote in state.remote}

    def _end_jobs(self, dead: RemoteNode, *, died_s: float) -> None:
        dead.found_dead(
            NodeFailed(f"{dead.id} is down: {UNANSWERED}"),
            at=trio.current_time() - died_s,
            silent_s=self._catalog.config.health_check.interval_s,
        )

    def _remote(
        self, config: NodeConfig, dialects: tuple[str, ...] | None, may_be_restricted: bool
    ) -> RemoteNode:
        upstream = Upstream(
            config.url,
            name=config.id,
            api_path=config.api_path,
            api_key=config.api_key,
            speaks_messages="messages" in config.dialects,
            timeouts=upstream_timeouts(config.timeouts),
            tls=node_tls(config),
            may_be_restricted=may_be_restricted,
        )
        return RemoteNode(
            config.id,
            upstream,
            _ignore,
            names=config.model_names,
            # The dispatcher counts the seats, and knows how many there are: a job that comes here has one.
            seats=max(config.seats, SEATS_AT_MOST),
            filters=config.filters,
            answer_bytes=config.answer_bytes,
            dialects=dialects,
            alias_key=config.api_key,
            on_request=_RequestReports(partial(self._on_request, config.id)),
        )

    async def find_now(self, node_id: str) -> Node:
        """Return a node, after getting the dispatcher's current state. Raises `NodeFull`."""
        await self._refresh()
        node = self.find(node_id)
        if isinstance(node, _ExpectedNode):
            raise _unreachable(node_id)
        return node

    def _attach(self, model: str, spec: WorkerSpec) -> "EngineHandle":
        handle = EngineHandle(spec)
        handle.engine = attached_engine(self._catalog.texts[model], spec, handle.report, name=self._name)
        self._nursery.start_soon(contain, f"connection to {model}", handle.run)
        return handle


class _RequestReports:
    """Reports the outcomes of requests to a node: all failures, others of a tenant once in `SUCCESS_S`.

    A success resets the dispatcher's count of failures, so the first one after a failure is not held back.
    """

    def __init__(self, report: Callable[[Outcome, str], None]) -> None:
        self._report = report
        self._reported: dict[tuple[Outcome, str], float] = {}  # the latest, and when; since the last failure

    def __call__(self, outcome: Outcome, tenant: str) -> None:
        now = trio.current_time()
        if outcome == "failed" or len(self._reported) >= MOST_REPORTED:
            self._reported.clear()
        if outcome != "failed":
            if now - self._reported.get((outcome, tenant), -inf) < SUCCESS_S:
                return
            self._reported[outcome, tenant] = now
        self._report(outcome, tenant)


class EngineHandle:
    """One connection to an engine, as a node: jobs wait until it is open."""

    engine: EngineNode

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.may_attach = True
        self._settled = trio.Event()
        self._scope = trio.CancelScope()

    @property
    def id(self) -> str:
        """The node's id."""
        return self.engine.id

    @property
    def models(self) -> frozenset[str]:
        """Its model."""
        return self.engine.models

    async def run(self) -> None:
        """Stay connected until the engine ends, or `close`."""
        try:
            with self._scope:
                await self.engine.run()
        except NodeFailed:
            """Reported by the dispatcher, if the engine has ended."""
        finally:
            self.may_attach = False
            self._settled.set()

    def close(self) -> None:
        """Close the connection; its jobs fail."""
        self._scope.cancel()

    def report(self, _node: Node, limits: NodeLimits | None) -> None:
        """Record that the engine is connected; without `limits`, that it is not."""
        if limits is None:
            self.may_attach = False
        else:
            self._settled.set()

    @asynccontextmanager
    async def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: SequenceSeats | None = None
    ) -> AsyncIterator[None]:
        """Start the job; leaving the block in any way ends it and frees what it holds."""
        with trio.move_on_after(ATTACH_WAIT_S):
            await self._settled.wait()
        if not self.engine.is_ready:
            raise _unreachable(self.id)
        async with self.engine.generate(job, into, grant=grant, seats=seats):
            yield

    async def prepare(self, job: Job) -> None:
        """Have the grammar of the job compiled, if it is not, before the job takes a seat."""
        await self.engine.prepare(job)


class _ExpectedNode:
    """A node of a grant that is newer than the front's state."""

    models: frozenset[str] = frozenset()

    def __init__(self, node_id: str, nodes: FrontNodes) -> None:
        self.id = node_id
        self._nodes = nodes

    def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: SequenceSeats | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Start the job; leaving the block in any way ends it and frees what it holds."""
        return self._generate(job, into, grant, seats)

    @asynccontextmanager
    async def _generate(
        self, job: Job, into: Sink, grant: Grant | None, seats: SequenceSeats | None
    ) -> AsyncIterator[None]:
        node = await self._nodes.find_now(self.id)
        async with node.generate(job, into, grant=grant, seats=seats):
            yield


def _command(config: CommandConfig) -> RemoteNode:
    upstream = command_upstream(config)
    return RemoteNode(
        f"command:{config.name}",
        upstream,
        _ignore,
        names={config.name: config.use_model_name or config.name},
        seats=config.concurrency_limit,
        filters=config.filters,
        answer_bytes=config.answer_bytes,
        dialects=config.dialects,
    )


def _unreachable(node_id: str) -> NodeFull:
    """Return the error for a node that has ended; the dispatcher will be informed soon.

    The job has not failed. It gets another seat, but for some time not on this node.
    """
    return NodeFull(f"{node_id} cannot be reached")


def _ignore(_node: Node, _limits: NodeLimits | None) -> None:
    """Do nothing: only the dispatcher needs the node's limits."""
