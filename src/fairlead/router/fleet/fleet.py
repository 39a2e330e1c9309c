"""All models and nodes of this server, and the nursery in which they run.

A request to load or unload a model goes to the scheduler first, which decides; `LocalModels` executes its
decisions, and the models and nodes report the results to it.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from contextvars import Context
from functools import partial
from math import inf
from secrets import token_hex
from typing import Any

import msgspec
import structlog
import trio

from fairlead.base.config import Config, NodeConfig
from fairlead.base.errors import FairleadError, InvalidRequest, ModelNotFound, ModelUnloaded, NodeFailed
from fairlead.base.requester import Requester, who
from fairlead.base.supervision import FailureBoundary, contain, log_failure
from fairlead.nodes.model_process import ProcessFactory, make_process
from fairlead.nodes.processes.health import Outcome
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.catalog import ModelCatalog, Reader, Readings
from fairlead.router.fleet.changes import changes_between
from fairlead.router.fleet.cluster_models import ClusterModels
from fairlead.router.fleet.discovery import Lookup, NodeDiscovery, address_of, look_up, refuse_restricted
from fairlead.router.fleet.local_models import LocalModels
from fairlead.router.fleet.managed_model import ManagedModel, OnProgress
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.router.fleet.remote_nodes import RemoteEntry, RemoteNodes
from fairlead.router.fleet.status import ConfigChanges, ModelStatus, NodeStatus

SURVEY_S = 5.0
# The files of faulty models are read again after this time: somebody may have repaired them.
REREAD_S = 30.0

logger = structlog.get_logger("fairlead.router.fleet")


class Fleet:
    """The models of the configuration, those of other servers, and the nodes that have them.

    config: the settings. The configured models are in `catalog`.
    dispatcher: what grants the seats of the nodes.
    nodes: gets the nodes that are up.
    read: reads what the parent must know of an engine's model.
    on_progress: called with the progress of each load.
    make_process: makes what runs a local model, once per load.
    adopted: models whose processes run already; their first load only connects to these.
    lookup: returns the addresses of a name.

    `instance` is a unique id by which this server recognizes itself.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        nodes: NodeRegistry,
        *,
        read: Reader,
        on_progress: OnProgress = lambda _model, _fraction, _stage: None,
        make_process: ProcessFactory = make_process,
        adopted: Collection[str] = (),
        lookup: Lookup = look_up,
    ) -> None:
        self.instance = token_hex(16)
        self._adopted = adopted
        self.catalog = ModelCatalog(config, read)
        self._dispatcher = dispatcher
        self._on_progress = on_progress
        make_model = partial(
            ManagedModel,
            scheduler=dispatcher.scheduler,
            nodes=nodes,
            on_progress=self._report_progress,
            make_process=make_process,
        )
        self._local = LocalModels(config, dispatcher, self._spawn, make_model)
        self._remote = RemoteNodes(
            dispatcher,
            nodes,
            self._spawn,
            own_instance=self.instance,
            is_local=lambda model: model in self.catalog.models,
        )
        self.cluster = ClusterModels(self.catalog, self._remote)
        self._lookup = lookup
        self._began_s = inf
        self._discoveries: dict[str, NodeDiscovery] = {}
        self._nursery: trio.Nursery | None = None
        self.has_adopted = trio.Event()
        self._is_preloaded = False
        self._is_reloading = False
        self._watches_faulty = False

    # Life cycle --------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Read what must be known of every model before it can be requested.

        Faulty models are not loaded, and have a problem in their status. Raises `LoadFailed` or `ConfigError`
        if there are no others.
        """
        self._apply(self.catalog.config, await self.catalog.read_all())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run models and nodes until cancelled; call `started()` when preloading is over.

        A model that fails to preload is loaded again by its next job. If the configuration has nothing but
        that model, `LoadFailed` is raised. No other failure of a model or node ends this.
        """
        async with trio.open_nursery() as self._nursery:
            self._began_s = trio.current_time()
            config = self.catalog.config
            for node in config.nodes:
                self._add_configured(node)
            self._local.schedule()
            self._watch_faulty()
            await self._local.adopt(name for name in self._adopted if name in self._local)
            self.has_adopted.set()
            failures = await self._local.preload()
            if failures and len(config.models) == 1 and not config.nodes and config is self.catalog.config:
                raise failures[0]
            self._is_preloaded = True
            task_status.started()
            await trio.sleep_forever()  # jobs need the nursery

    @property
    def is_ready(self) -> bool:
        """Whether preloading is over, no unload has interrupted it, and no model waits for its restart.

        Models on the cluster that always have replicas must have one that is up.
        """
        return self._is_preloaded and self._local.are_ready and self.cluster.are_ready

    @property
    def knows_nodes(self) -> bool:
        """Whether every configured node was looked up and probed, or there was time for it."""
        if trio.current_time() >= self._began_s + SURVEY_S:
            return True
        return all(found.has_answer for found in self._discoveries.values()) and all(
            entry.was_probed for entry in self._remote.entries()
        )

    @property
    def problems(self) -> dict[str, str]:
        """Why models are unhealthy, by name; empty if none is. A model that is loading is healthy."""
        stuck = ((model.name, model.stuck) for model in self._local.values())
        return {name: reason for name, reason in stuck if reason is not None}

    # Queries -----------------------------------------------------------------------------------------

    def models(self) -> list[ModelStatus]:
        """Return the status of every known model: local ones, then those that only remote nodes have."""
        local = [model.status() for model in self._local.values()]
        on_cluster = [status for status in self.cluster.statuses() if status.model not in self._local]
        known = {status.model for status in (*local, *on_cluster)}
        return local + on_cluster + self._remote.models(but=known)

    def model(self, name: str) -> ModelStatus | None:
        """Return the status of one model; None if it is not known."""
        model = self._local.get(name)
        if model is not None:
            return model.status()
        return self.cluster.status(name) or self._remote.model(name)

    def nodes(self) -> list[NodeStatus]:
        """Return the status of every node: one for each local model, and the remote ones."""
        local = [model.status().as_node() for model in self._local.values()]
        return local + self._remote.statuses()

    def count_request(self, node_id: str, outcome: Outcome, tenant: str) -> None:
        """Count a request that a front has sent to a remote node; see `RemoteNode`."""
        self._remote.count_request(node_id, outcome, tenant)

    def remote_entries(self) -> list[RemoteEntry]:
        """Return the remote nodes."""
        return self._remote.entries()

    def load_times(self, model: str) -> tuple[float, float] | None:
        """Return when the load of a local model began and ended, by Trio's clock; None if not loaded."""
        instance = self._local[model].instance if model in self._local else None
        return None if instance is None or not instance.was_ready else (instance.began_at, instance.ready_at)

    def expires_in_s(self, model: str) -> float:
        """Return the time until a loaded local model is unloaded if it gets no job; infinite: no limit."""
        return self._dispatcher.models.expires_in_s(model, is_busy=bool(self._local[model].status().busy))

    def gpu_bytes(self, model: str) -> int:
        """Return the GPU memory that a local model takes; 0 if it is on none."""
        return gpu.taken_bytes if (gpu := self._local[model].gpu) is not None else 0

    def has(self, model: str) -> bool:
        """Return whether a node has the model or could load it."""
        return model in self.catalog.models or self._remote.has(model)

    def offers(self, model: str) -> bool:
        """Return whether a job for the model may wait for a node; not if all that have it are drained."""
        return model in self.catalog.models or self._remote.offers(model)

    def is_relayed(self, model: str) -> bool:
        """Return whether the model may run on a node that takes requests as clients write them."""
        config = self.catalog.models.get(model)
        return (config is not None and config.is_relayed) or self._remote.has(model)

    def speaks(self, model: str, dialect: str) -> bool:
        """Return whether all servers that jobs for the model may be relayed to speak the dialect."""
        config = self.catalog.models.get(model)
        local = config is None or not config.is_relayed or dialect in config.dialects
        return local and self._remote.speak(model, dialect)

    def output(self, model: str) -> ProcessOutput:
        """Return what the processes of a local model have printed.

        Raises `ModelNotFound`, or `InvalidRequest` for a model of a remote node.
        """
        return self._local_model(model).output

    # Operations --------------------------------------------------------------------------------------

    async def load(self, model: str, *, by: Requester | None = None) -> None:
        """Load the model in its turn and return when it is ready; join a load that is under way.

        `by`, here and below: who has requested it; None: the server itself. Raises `LoadFailed`,
        `ModelNotFound`, `Draining`, or `InvalidRequest` for a model of a remote node.
        """
        self._local_model(model)
        self.catalog.refuse_faulty(model)
        _log("load requested", by, model=model)
        await self._dispatcher.models.load(model, by=by)

    async def unload(
        self, model: str, *, force: bool = False, wait: bool = False, by: Requester | None = None
    ) -> None:
        """Unload the model; return when its process is gone.

        model: its name.
        force: fail its jobs; otherwise they finish first.
        wait: jobs and loads that wait for it wait for its next load; otherwise they end with `ModelUnloaded`.
        by: who has requested it.

        Raises as `load` does.
        """
        local = self._local_model(model)
        _log("unload requested", by, model=model, force=force, wait=wait)
        instance = local.instance
        waiting = None if wait else ModelUnloaded(f"{model} was unloaded while the request waited for it")
        if instance is None:
            local.end()  # a model that has died is not restarted any more
        if instance is not None or waiting is not None:
            running = NodeFailed(f"{model} was unloaded") if force else None
            self._dispatcher.unload(model, running, waiting=waiting, by=by)
        if instance is not None:
            await instance.ended.wait()

    def keep(self, model: str, ttl_s: float, *, by: Requester | None = None) -> None:
        """Keep a local model loaded for this time without a job; see `ModelLifecycle.keep`."""
        if model in self.catalog.models and model in self._local:
            _log("time to live changed", by, model=model, ttl_s=ttl_s)
            self._dispatcher.models.keep(model, ttl_s)

    async def add_node(self, config: NodeConfig, *, by: Requester | None = None) -> None:
        """Add a remote node; return after its first probe, whether that succeeded or not.

        A node that somebody has requested has no link-local or metadata address, unless the configuration
        has a node there. Raises `InvalidRequest` if it has, if its id is taken, if it is this server itself,
        or if it stands for several.
        """
        if config.is_discovered:
            raise InvalidRequest("url: only a configuration may have a name to look up", param="url")
        if config.id in self._remote or self._is_local(config.id):
            raise InvalidRequest(f"id: there is a node {config.id} already", param="id")
        may_be_restricted = by is None or self._is_configured(config)
        if not may_be_restricted:
            await refuse_restricted(config, self._lookup)
            if config.id in self._remote:  # added meanwhile
                raise InvalidRequest(f"id: there is a node {config.id} already", param="id")
        self._remote.add(config, self.catalog.config.health_check, by=by, may_be_restricted=may_be_restricted)
        await self._remote.wait_for_probe(config.id)

    async def remove_node(self, node_id: str, *, by: Requester | None = None) -> None:
        """Remove a remote node; return when its jobs are finished. Waiting jobs end as in `drain_node`.

        Raises `NotFound`.
        """
        self._refuse_local(node_id)
        await self._remote.remove(node_id, by=by)

    async def drain_node(self, node_id: str, *, by: Requester | None = None) -> None:
        """Give the remote node no more jobs, but keep it listed. Raises `NotFound`.

        Jobs that wait for one of its models, and that no other node can take, end with `NoNode`.
        """
        self._refuse_local(node_id)
        self._remote.drain(node_id, by=by)

    async def reload(self, config: Config) -> ConfigChanges:
        """Apply another configuration. Unchanged parts continue; changed ones finish their jobs and end.

        Returns when all changes are under way. Raises `LoadFailed`, in which case nothing has changed, or
        `InvalidRequest` while another reload is under way.
        """
        if self._is_reloading:
            raise InvalidRequest("another reload is under way")
        self._is_reloading = True
        changes = changes_between(self.catalog.config, config)
        changed = {*changes.models_added, *changes.models_changed}
        try:
            readings = await self.catalog.read_changed(config, changed)
        finally:
            self._is_reloading = False
        self._apply(config, readings)
        self._local.schedule()
        self._watch_faulty()
        for name in (*changes.models_changed, *changes.models_removed):
            self._dispatcher.unload(name)
        local = {model.name for model in config.local_models}
        for name in (*changes.models_changed, *changes.models_removed):
            if name in self._local and name not in local:
                self._spawn(self._local.retire, name)
        for name in changes.models_removed:
            self._dispatcher.scheduler.remove_model(name)
        for model in config.local_models:
            if model.name in changed and model.preload:
                self._spawn(self._load_in_background, model.name)
        changed_nodes = [node for node in config.nodes if node.id in changes.nodes_changed]
        replaced = [node.id for node in changed_nodes if not self._change_probes(node)]
        for node_id in (*changes.nodes_removed, *replaced, *changes.nodes_added):
            self._spawn(self._replace, node_id)
        logger.info("configuration reloaded", **msgspec.structs.asdict(changes))
        return changes

    # Background tasks --------------------------------------------------------------------------------

    def _watch_faulty(self) -> None:
        """Read faulty models again from time to time, if there are any."""
        if self.catalog.faults and not self._watches_faulty:
            self._watches_faulty = True
            self._spawn(self._reread_faulty)

    async def _reread_faulty(self) -> None:
        """Use faulty models once their files have been repaired; return when there are none."""
        try:
            while self.catalog.faults:
                await trio.sleep(REREAD_S)
                config, readings = self.catalog.config, await self.catalog.read_faulty()
                if config is not self.catalog.config or self._is_reloading:
                    continue  # which reads them, too
                self.catalog.apply_readings(readings)
                self._local.configure(config, readings)
                for model in config.local_models:
                    if model.name in readings.texts:
                        logger.info("model can be loaded again", model=model.name)
                        if model.preload:
                            self._spawn(self._load_in_background, model.name)
        finally:
            self._watches_faulty = False

    def _report_progress(self, model: str, fraction: float | None, stage: str) -> None:
        """Report the progress of a load. A closed terminal does not fail the load."""
        with FailureBoundary() as boundary:
            self._on_progress(model, fraction, stage)
        if boundary.failure is not None:
            log_failure("progress not reported", boundary.failure, model=model)

    def _spawn(self, task: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Start a task. Its failure ends neither its siblings nor the fleet."""
        assert self._nursery is not None, "the fleet runs"
        # In an empty context: its log lines must not refer to the job that started it.
        name = task.__qualname__
        Context().run(partial(self._nursery.start_soon, name=name), contain, name, task, *arguments)

    async def _load_in_background(self, model: str) -> None:
        """Load a model that a new configuration preloads. A failure is logged, and shown in its status."""
        with suppress(FairleadError):
            await self._dispatcher.models.load(model)

    async def _replace(self, node_id: str) -> None:
        """Remove a remote node when its jobs are finished; add it again if it is still configured."""
        configured = [node for node in self.catalog.config.nodes if node.id == node_id]
        if (discovery := self._discoveries.pop(node_id, None)) is not None:
            await discovery.close()
        if node_id in self._remote:
            await self._remote.remove(node_id, for_good=not configured)
        configured = [node for node in self.catalog.config.nodes if node.id == node_id]
        if configured and node_id not in self._remote and node_id not in self._discoveries:
            self._add_configured(configured[0])

    # Helpers -----------------------------------------------------------------------------------------

    def _add_configured(self, node: NodeConfig) -> None:
        """Add a remote node of the configuration, or look up the nodes that it stands for."""
        if not node.is_discovered:
            self._remote.add(node, self.catalog.config.health_check)
            return
        discovery = NodeDiscovery(
            node,
            add=self._add_discovered,
            remove=self._remove_discovered,
            spawn=self._spawn,
            lookup=self._lookup,
        )
        self._discoveries[node.id] = discovery
        self._spawn(discovery.run)

    def _add_discovered(self, node: NodeConfig) -> None:
        if node.id not in self._remote:
            self._remote.add(node, self.catalog.config.health_check)

    async def _remove_discovered(self, node_id: str) -> None:
        if node_id in self._remote:
            await self._remote.remove(node_id, for_good=False)

    def _apply(self, config: Config, readings: Readings) -> None:
        """Use this configuration. `readings` are those of the new and the changed models."""
        self.catalog.apply(config, readings)
        self._local.configure(config, readings)
        self._remote.change_health(config.health_check)

    def _change_probes(self, node: NodeConfig) -> bool:
        """Use a node's configuration for its probes; return False if the node must be replaced."""
        health, discovery = self.catalog.config.health_check, self._discoveries.get(node.id)
        if discovery is None:
            return self._remote.change_probes(node, health)
        found = discovery.change_probes(node)
        for each in found or ():
            self._remote.change_probes(each, health)
        return found is not None

    def _local_model(self, model: str) -> ManagedModel:
        if model in self._local and model in self.catalog.models:
            return self._local[model]
        if self.has(model):
            raise InvalidRequest(f"the model {model} is on another server", param="model")
        raise ModelNotFound(f"the model {model} is not served here", param="model")

    def _is_configured(self, node: NodeConfig) -> bool:
        """Return whether the configuration has a node at the same address."""
        return any(address_of(node) == address_of(known) for known in self.catalog.config.nodes)

    def _is_local(self, node_id: str) -> bool:
        return any(model.node_id == node_id for model in self._local.values())

    def _refuse_local(self, node_id: str) -> None:
        if self._is_local(node_id):
            raise InvalidRequest(f"the node {node_id} is a local model: unload that", param="id")


def _log(event: str, by: Requester | None, **fields: object) -> None:
    """Log an operation that somebody has requested; the server's own are logged where they take effect."""
    if by is not None:
        logger.info(event, **fields, **who(by))
