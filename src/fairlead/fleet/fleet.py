"""All models and nodes of this server, and the nursery in which they run.

Executes the load and eviction decisions of the dispatcher. All requests to load or unload a model go to the
dispatcher first, and result in calls of `start_swap` and `stop_model`.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from secrets import token_hex
from typing import Any

import msgspec
import structlog
import trio

from fairlead.config import (
    AnyModelConfig,
    CommandConfig,
    Config,
    KeepSwap,
    ModelConfig,
    NodeConfig,
    SelectorConfig,
)
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import (
    FairleadError,
    InvalidRequest,
    LoadCancelled,
    LoadFailed,
    ModelNotFound,
    ModelUnloaded,
    NodeFailed,
)
from fairlead.fleet.changes import changes_between
from fairlead.fleet.managed_model import ManagedModel, OnProgress
from fairlead.fleet.model_memory import ModelMemory
from fairlead.fleet.remote_nodes import RemoteNodes
from fairlead.fleet.status import ConfigChanges, ModelStatus, NodeAvailability, NodeStatus
from fairlead.nodes.model_process import ProcessFactory, make_process
from fairlead.process.output import ProcessOutput
from fairlead.supervision import FailureBoundary, contain, log_failure
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND

MEASURE_EVERY_S = 10.0

logger = structlog.get_logger("fairlead.fleet")

Reader = Callable[[ModelConfig], Awaitable[TextModel]]


class Fleet:
    """The models of the configuration, those of other servers, and the nodes that have them.

    `read` reads what the parent must know of an engine's model. `texts` has that, by name. `aliases` has
    further names of models, and `selectors` names that stand for several models. All three change in place
    with the configuration. `on_progress` is called with the progress of each load. `instance` is a unique id
    by which this server recognizes itself. `make_process` makes what runs a local model, once per load.
    """

    def __init__(
        self,
        config: Config,
        desk: Dispatcher,
        *,
        read: Reader,
        on_progress: OnProgress = lambda _model, _fraction, _stage: None,
        engine_command: Sequence[str] = COMMAND,
        make_process: ProcessFactory = make_process,
    ) -> None:
        self.instance = token_hex(16)
        self.texts: dict[str, TextModel] = {}
        self.aliases: dict[str, str] = {}
        self.selectors: dict[str, SelectorConfig] = {}
        self._config = config
        self._configured: dict[str, AnyModelConfig] = {}
        self._desk = desk
        self._read = read
        self._on_progress = on_progress
        self._engine_command = engine_command
        self._make_process = make_process
        self._residents: dict[str, ManagedModel] = {}
        self._neighbours = RemoteNodes(
            desk, self._spawn, ourselves=self.instance, is_ours=lambda model: model in self._configured
        )
        self._memory = ModelMemory()
        self._nursery: trio.Nursery | None = None
        self._is_loaded = False
        self._is_reloading = False
        self._unloaded_early: set[str] = set()  # models whose preloading was ended by an unload

    # Life cycle --------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Read what must be known of every model before it can be requested. Raises `LoadFailed`."""
        self._take(self._config, await self._read_all(self._config.models))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run models and nodes until cancelled; call `started()` when preloading is over.

        A model that fails to preload is loaded again by its next job. If the configuration has nothing but
        that model, `LoadFailed` is raised. No other failure of a model or node ends this.
        """
        async with trio.open_nursery() as self._nursery:
            for config in self._config.nodes:
                self._neighbours.add(config, self._config.health_check)
            self._arrange()
            await self._preload()
            self._is_loaded = True
            task_status.started()
            await trio.sleep_forever()  # jobs need the nursery

    @property
    def is_ready(self) -> bool:
        """Whether preloading is over, no unload has interrupted it, and no model waits for its restart."""
        if not self._is_loaded or any(resident.is_missed for resident in self._residents.values()):
            return False
        return not any(model.preload and model.name in self._unloaded_early for model in self._config.models)

    @property
    def problems(self) -> dict[str, str]:
        """Why models are unhealthy, by name; empty if none is. A model that is loading is healthy."""
        stuck = ((resident.name, resident.stuck) for resident in self._residents.values())
        return {name: reason for name, reason in stuck if reason is not None}

    # Queries -----------------------------------------------------------------------------------------

    def models(self) -> list[ModelStatus]:
        """Return the status of every known model: local ones, then those that only remote nodes have."""
        ours = [resident.status() for resident in self._residents.values()]
        return ours + self._neighbours.models(but=self._residents)

    def model(self, name: str) -> ModelStatus | None:
        """Return the status of one model; None if it is not known."""
        resident = self._residents.get(name)
        return self._neighbours.model(name) if resident is None else resident.status()

    def nodes(self) -> list[NodeStatus]:
        """Return the status of every node: one for each local model, and the remote ones."""
        ours = [_node_status(resident.status()) for resident in self._residents.values()]
        return ours + self._neighbours.statuses()

    def load_times(self, model: str) -> tuple[float, float] | None:
        """Return when the load of a local model began and ended, by Trio's clock; None if not loaded."""
        life = self._residents[model].life if model in self._residents else None
        return None if life is None or not life.was_ready else (life.began_at, life.ready_at)

    def has(self, model: str) -> bool:
        """Return whether a node has the model or could load it."""
        return model in self._configured or self._neighbours.have(model)

    def offers(self, model: str) -> bool:
        """Return whether a job for the model may wait for a node; not if all that have it are drained."""
        return model in self._configured or self._neighbours.offer(model)

    def configured(self, model: str) -> AnyModelConfig | None:
        """Return the current configuration of a local model."""
        return self._configured.get(model)

    def is_relayed(self, model: str) -> bool:
        """Return whether the model may run on a node that takes requests as clients write them."""
        return isinstance(self._configured.get(model), CommandConfig) or self._neighbours.have(model)

    def output(self, model: str) -> ProcessOutput:
        """Return what the processes of a local model have printed.

        Raises `ModelNotFound`, or `InvalidRequest` for a model of a remote node.
        """
        return self._resident(model).output

    @property
    def lists_aliases(self) -> bool:
        """Whether aliases are listed as models of their own."""
        return self._config.include_aliases_in_list

    def sends_loading_state(self, model: str) -> bool:
        """Return whether streamed chats for a local model report the progress of its load."""
        config = self._configured.get(model)
        if config is None:
            return False
        override = config.send_loading_state
        return self._config.send_loading_state if override is None else override

    # Operations --------------------------------------------------------------------------------------

    async def load(self, model: str) -> None:
        """Load the model in its turn and return when it is ready; join a load that is under way.

        Raises `LoadFailed`, `ModelNotFound`, `Draining`, or `InvalidRequest` for a model of a remote node.
        """
        self._resident(model)
        await self._desk.load(model)

    async def unload(self, model: str, *, force: bool = False, wait: bool = False) -> None:
        """Unload the model; return when its process is gone. Its jobs finish first; with `force` they fail.

        Jobs and loads that wait for it end with `ModelUnloaded`; with `wait` they wait for its next load.
        Raises as `load` does.
        """
        resident = self._resident(model)
        life = resident.life
        waiting = None if wait else ModelUnloaded(f"{model} was unloaded while the request waited for it")
        if life is None:
            resident.end()  # a model that has died is not restarted any more
        if life is not None or waiting is not None:
            running = NodeFailed(f"{model} was unloaded") if force else None
            self._desk.unload(model, running, waiting=waiting)
        if life is not None:
            await life.ended.wait()

    async def add_node(self, config: NodeConfig) -> None:
        """Add a remote node; return after its first probe, whether that succeeded or not.

        Raises `InvalidRequest` if its id is taken, or if it is this very server.
        """
        if config.id in self._neighbours or self._is_ours(config.id):
            raise InvalidRequest(f"id: there is a node {config.id} already", param="id")
        self._neighbours.add(config, self._config.health_check)
        await self._neighbours.meet(config.id)

    async def remove_node(self, node_id: str) -> None:
        """Remove a remote node; return when its jobs are finished. Waiting jobs end as in `drain_node`.

        Raises `NotFound`.
        """
        self._refuse_ours(node_id)
        await self._neighbours.remove(node_id)

    def drain_node(self, node_id: str) -> None:
        """Give the remote node no more jobs, but keep it listed. Raises `NotFound`.

        Jobs that wait for one of its models, and that no other node can take, end with `NoNode`.
        """
        self._refuse_ours(node_id)
        self._neighbours.drain(node_id)

    async def reload(self, config: Config) -> ConfigChanges:
        """Apply another configuration. Unchanged parts continue; changed ones finish their jobs and end.

        Returns when all changes are under way. Raises `LoadFailed`, in which case nothing has changed, or
        `InvalidRequest` while another reload is under way.
        """
        if self._is_reloading:
            raise InvalidRequest("another reload is under way")
        self._is_reloading = True
        changes = changes_between(self._config, config)
        news = {*changes.models_added, *changes.models_changed}
        try:
            texts = await self._read_all(model for model in config.models if model.name in news)
        finally:
            self._is_reloading = False
        self._take(config, texts)
        self._arrange()
        for name in (*changes.models_changed, *changes.models_removed):
            self._desk.unload(name)
        for name in changes.models_removed:
            self._spawn(self._retire, self._residents[name])
            self._desk.forget(name)
        for model in config.models:
            if model.name in news and model.preload:
                self._spawn(self._load_or_say, model.name)
        for node_id in (*changes.nodes_removed, *changes.nodes_changed, *changes.nodes_added):
            self._spawn(self._replace, node_id)
        logger.info("configuration reloaded", **msgspec.structs.asdict(changes))
        return changes

    # Called by the dispatcher (Garage) ---------------------------------------------------------------

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        """See `Garage`."""
        leaving = [self._residents[name] for name in sorted(evict) if name in self._residents]
        lives = [resident.life for resident in leaving if resident.life is not None]
        for resident in leaving:
            resident.evict()
        if not isinstance(self._config.swap, KeepSwap):
            for resident in self._residents.values():
                if resident.name != model:
                    resident.give_up()
        self._residents[model].begin(self._spawn, [life.ended for life in lives])

    def stop_model(self, model: str) -> None:
        """See `Garage`."""
        logger.info("unloading model", model=model)
        self._residents[model].end()

    # Called by models (Keeper) -----------------------------------------------------------------------

    def came_up(self, resident: ManagedModel) -> None:
        """Handle a loaded model: its memory use can be measured now."""
        self._unloaded_early.discard(resident.name)
        if resident.kind == "engine":
            self._memory.loaded(resident.name, resident.gpu)
        self._spawn(self._measure, resident)

    def died(self, resident: ManagedModel) -> None:
        """Handle a model that died: restart it after a backoff, if there is room."""
        self._spawn(self._revive, resident)

    def _report_progress(self, model: str, fraction: float | None, stage: str) -> None:
        """Report the progress of a load. A closed terminal does not fail the load."""
        with FailureBoundary() as boundary:
            self._on_progress(model, fraction, stage)
        if boundary.failure is not None:
            log_failure("progress not reported", boundary.failure, model=model)

    # Background tasks --------------------------------------------------------------------------------

    def _spawn(self, task: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Start a task whose failure ends neither its siblings nor the fleet."""
        assert self._nursery is not None, "the fleet runs"
        # In an empty context: its log lines must not refer to the job whose request started it.
        name = task.__qualname__
        Context().run(partial(self._nursery.start_soon, name=name), contain, name, task, *arguments)

    async def _preload(self) -> None:
        """Load all models that are to be preloaded, at once."""
        config = self._config
        failed: list[LoadFailed] = []

        async def load(model: str) -> None:
            try:
                await self._desk.load(model)
            except (LoadCancelled, ModelUnloaded):
                self._unloaded_early.add(model)
            except LoadFailed as error:
                failed.append(error)
            except FairleadError:
                """The server stops, or the model was removed from the configuration."""

        async with trio.open_nursery() as nursery:
            for model in config.models:
                if model.preload:
                    nursery.start_soon(load, model.name)
        if failed and len(config.models) == 1 and not config.nodes and config is self._config:
            raise failed[0]

    async def _load_or_say(self, model: str) -> None:
        """Load a model that a new configuration preloads. A failure is logged, and shown in its status."""
        with suppress(FairleadError):
            await self._desk.load(model)

    async def _revive(self, resident: ManagedModel) -> None:
        await trio.sleep(resident.next_backoff_s())
        # Meanwhile it may have been loaded, unloaded or removed.
        if resident.life is None and resident.has_died and self._residents.get(resident.name) is resident:
            with suppress(FairleadError):  # after a failed load, `died` is called again
                await self._desk.load(resident.name, spare=True)

    async def _retire(self, resident: ManagedModel) -> None:
        """Forget a model that is no longer configured, once its processes are gone."""
        while (life := resident.life) is not None:
            await life.ended.wait()
        if resident.name not in self._configured:
            del self._residents[resident.name]

    async def _replace(self, node_id: str) -> None:
        """Remove a remote node when its jobs are finished; add it again if it is still configured."""
        configured = [node for node in self._config.nodes if node.id == node_id]
        if node_id in self._neighbours:
            await self._neighbours.remove(node_id, for_good=not configured)
        configured = [node for node in self._config.nodes if node.id == node_id]
        if configured and node_id not in self._neighbours:
            self._neighbours.add(configured[0], self._config.health_check)

    async def _measure(self, resident: ManagedModel) -> None:
        """Measure a model while it runs. The maximum counts if the configuration does not give its memory."""
        life = resident.life
        while life is not None and resident.life is life:
            await contain("measuring", resident.measure)
            self._memory.measured(resident.name, resident.memory_bytes)
            with trio.move_on_after(MEASURE_EVERY_S):
                await life.ended.wait()

    # Configuration -----------------------------------------------------------------------------------

    async def _read_all(self, models: Iterable[AnyModelConfig]) -> dict[str, TextModel]:
        return {model.name: await self._read(model) for model in models if isinstance(model, ModelConfig)}

    def _take(self, config: Config, texts: dict[str, TextModel]) -> None:
        """Apply this configuration. `texts` are those of the new and the changed models."""
        self._config = config
        self._configured = {model.name: model for model in config.models}
        self.texts.update(texts)
        self.selectors.clear()
        self.selectors.update(config.selectors)
        self.aliases.clear()
        self._memory.configure(config.models)
        for model in config.models:
            text = texts.get(model.name)
            if (resident := self._residents.get(model.name)) is None:
                self._residents[model.name] = ManagedModel(
                    model,
                    text,
                    self._desk,
                    self,
                    on_progress=self._report_progress,
                    health=config.health_check,
                    engine_command=self._engine_command,
                    make_process=self._make_process,
                )
            elif resident.config != model:
                resident.config, resident.text = model, text
            self._residents[model.name].change_health(config.health_check)
            self.aliases.update(dict.fromkeys(model.aliases, model.name))
        self._neighbours.change_health(config.health_check)
        engines = {model.name for model in config.models if isinstance(model, ModelConfig)}
        for name in self.texts.keys() - engines:
            del self.texts[name]

    def _arrange(self) -> None:
        ttl_s = {model.name: model.ttl_s for model in self._config.models}
        self._desk.prefer(self._config.priorities)
        self._desk.arrange(self, self._config.swap, ttl_s, self._memory.memory_mb, self._memory.gpus)

    def _resident(self, model: str) -> ManagedModel:
        if model in self._configured:
            return self._residents[model]
        if self._neighbours.have(model):
            raise InvalidRequest(f"the model {model} is on another server", param="model")
        raise ModelNotFound(f"the model {model} is not served here", param="model")

    def _is_ours(self, node_id: str) -> bool:
        return any(resident.node_id == node_id for resident in self._residents.values())

    def _refuse_ours(self, node_id: str) -> None:
        if self._is_ours(node_id):
            raise InvalidRequest(f"the node {node_id} is a model of ours: unload that", param="id")


def _node_status(model: ModelStatus) -> NodeStatus:
    """Return a local model's status as that of a node."""
    states: dict[str, NodeAvailability] = {"ready": "up", "draining": "draining", "loading": "loading"}
    return NodeStatus(
        id=model.node,
        kind=model.kind,
        models=(model.model,),
        seats=model.seats,
        busy=model.busy,
        state=states.get(model.state, "down"),
        problem=model.problem,
        ups=model.counts.loads,
        downs=model.counts.loads - (model.state in ("ready", "draining")),
    )
