"""All models and nodes of this server, and the nursery they live in.

It carries out: what is loaded when, and who makes room, the desk decides. Everything that anybody wants of it
goes there first, and comes back as `start_swap` and `stop_model`.
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
from fairlead.errors import (
    FairleadError,
    InvalidRequest,
    LoadCancelled,
    LoadFailed,
    ModelNotFound,
    ModelUnloaded,
    NodeFailed,
)
from fairlead.nodes.changes import changes_between
from fairlead.nodes.desk import Desk
from fairlead.nodes.elsewhere import Neighbours
from fairlead.nodes.model_memory import ModelMemory
from fairlead.nodes.model_process import ProcessFactory, make_process
from fairlead.nodes.output import ProcessOutput
from fairlead.nodes.resident import Progress, Resident
from fairlead.nodes.status import Changes, ModelStatus, NodeState, NodeStatus
from fairlead.supervision import FailureBoundary, contain, log_failure
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND

MEASURE_EVERY_S = 10.0

logger = structlog.get_logger("fairlead.fleet")

Reader = Callable[[ModelConfig], Awaitable[TextModel]]


class Fleet:
    """The models of the configuration, those of other servers, and who has them.

    `read` reads what the parent must know of an engine's model. `texts` has that, by name, `aliases` the
    names that models have besides, and `selectors` those that stand for several; they change in place with
    the configuration. `on_progress` is told how far each load is. `instance` is what this server is known by,
    to itself: no other has it. `make_process` makes what runs a model of ours, once a load.
    """

    def __init__(
        self,
        config: Config,
        desk: Desk,
        *,
        read: Reader,
        on_progress: Progress = lambda _model, _fraction, _stage: None,
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
        self._residents: dict[str, Resident] = {}
        self._neighbours = Neighbours(
            desk, self._spawn, ourselves=self.instance, is_ours=lambda model: model in self._configured
        )
        self._memory = ModelMemory()
        self._nursery: trio.Nursery | None = None
        self._is_loaded = False
        self._is_reloading = False
        self._unloaded_early: set[str] = set()  # models whose preloading was ended by an unload

    # Its life ----------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Read what must be known of every model before anybody can ask for one. Raises `LoadFailed`."""
        self._take(self._config, await self._read_all(self._config.models))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep models and nodes until cancelled; report `started` when preloading is over.

        A model that fails to load then is loaded again by its next job; if it is all that the configuration
        has, `LoadFailed` is raised. No other failure of a model or node ends this.
        """
        async with trio.open_nursery() as self._nursery:
            for config in self._config.nodes:
                self._neighbours.add(config, self._config.health_check)
            self._arrange()
            await self._preload()
            self._is_loaded = True
            task_status.started()
            await trio.sleep_forever()  # so that there is a nursery as long as there are jobs

    @property
    def is_ready(self) -> bool:
        """Whether preloading is over, no model of it was unloaded before it was ready, and none has died."""
        if not self._is_loaded or any(resident.is_missed for resident in self._residents.values()):
            return False
        return not any(model.preload and model.name in self._unloaded_early for model in self._config.models)

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong, by model; nothing if all is well. Loading is not being ill."""
        stuck = ((resident.name, resident.stuck) for resident in self._residents.values())
        return {name: reason for name, reason in stuck if reason is not None}

    # What can be known -------------------------------------------------------------------------------

    def models(self) -> list[ModelStatus]:
        """Return every model that is known now: ours, then those that only nodes elsewhere have."""
        ours = [resident.status() for resident in self._residents.values()]
        return ours + self._neighbours.models(but=self._residents)

    def model(self, name: str) -> ModelStatus | None:
        """Return one of them; None if it is not known."""
        resident = self._residents.get(name)
        return self._neighbours.model(name) if resident is None else resident.status()

    def nodes(self) -> list[NodeStatus]:
        """Return every node: one for each model of ours, and those elsewhere."""
        ours = [_node_status(resident.status()) for resident in self._residents.values()]
        return ours + self._neighbours.statuses()

    def load_times(self, model: str) -> tuple[float, float] | None:
        """Return when the load of a model of ours began and ended, by Trio's clock; None if it is not."""
        life = self._residents[model].life if model in self._residents else None
        return None if life is None or not life.was_ready else (life.began_at, life.ready_at)

    def has(self, model: str) -> bool:
        """Whether some node holds the model or could load it."""
        return model in self._configured or self._neighbours.have(model)

    def offers(self, model: str) -> bool:
        """Whether a job for the model may wait for a node; not if all nodes that have it are drained."""
        return model in self._configured or self._neighbours.offer(model)

    def configured(self, model: str) -> AnyModelConfig | None:
        """Return the present configuration of a model of ours."""
        return self._configured.get(model)

    def is_relayed(self, model: str) -> bool:
        """Whether a node may run it that takes requests as clients write them."""
        return isinstance(self._configured.get(model), CommandConfig) or self._neighbours.have(model)

    def output(self, model: str) -> ProcessOutput:
        """Return what the processes of a model of ours have printed.

        Raises `ModelNotFound`, or `InvalidRequest` for a model that is elsewhere.
        """
        return self._resident(model).output

    @property
    def lists_aliases(self) -> bool:
        """Whether aliases are listed as models of their own."""
        return self._config.include_aliases_in_list

    def sends_loading_state(self, model: str) -> bool:
        """Whether streamed chats for a model of ours report the progress of its load."""
        config = self._configured.get(model)
        if config is None:
            return False
        override = config.send_loading_state
        return self._config.send_loading_state if override is None else override

    # What people ask for -----------------------------------------------------------------------------

    async def load(self, model: str) -> None:
        """Have the model loaded, in its turn, and return when it is ready; joins a load under way.

        Raises `LoadFailed`, `ModelNotFound`, `Draining`, or `InvalidRequest` for a model that is elsewhere.
        """
        self._resident(model)
        await self._desk.load(model)

    async def unload(self, model: str, *, force: bool = False, wait: bool = False) -> None:
        """Return when the model's process is gone. Its jobs are finished first; with `force` they fail.

        Jobs and loads that wait for it end with `ModelUnloaded`; with `wait` they wait for its next load.
        Raises as `load`.
        """
        resident = self._resident(model)
        life = resident.life
        waiting = None if wait else ModelUnloaded(f"{model} was unloaded while the request waited for it")
        if life is None:
            resident.end()  # one that has died does not come back by itself
        if life is not None or waiting is not None:
            running = NodeFailed(f"{model} was unloaded") if force else None
            self._desk.unload(model, running, waiting=waiting)
        if life is not None:
            await life.ended.wait()

    async def add_node(self, config: NodeConfig) -> None:
        """Take a node elsewhere into service; return when it was asked how it is, be it well or not.

        Raises `InvalidRequest` if its id is taken, or if it is this very server.
        """
        if config.id in self._neighbours or self._is_ours(config.id):
            raise InvalidRequest(f"id: there is a node {config.id} already", param="id")
        self._neighbours.add(config, self._config.health_check)
        await self._neighbours.meet(config.id)

    async def remove_node(self, node_id: str) -> None:
        """Return when the node is out of service, its jobs finished; others end as in `drain_node`.

        Raises `NotFound`.
        """
        self._refuse_ours(node_id)
        await self._neighbours.remove(node_id)

    def drain_node(self, node_id: str) -> None:
        """Give the node no more jobs; it stays listed. Raises `NotFound`.

        Jobs that wait for one of its models, and that no other node can be given, end with `NoNode`.
        """
        self._refuse_ours(node_id)
        self._neighbours.drain(node_id)

    async def reload(self, config: Config) -> Changes:
        """Go by another configuration. What did not change goes on; what did finishes its jobs and goes.

        Returns when everything is under way. Raises `LoadFailed`, and nothing has changed then; or
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

    # What the desk asks for (Garage) -----------------------------------------------------------------

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

    # What models tell (Keeper) -----------------------------------------------------------------------

    def came_up(self, resident: Resident) -> None:
        """A model is loaded: what it takes can be known."""
        self._unloaded_early.discard(resident.name)
        if resident.kind == "engine":
            self._memory.loaded(resident.name, resident.gpu)
        self._spawn(self._measure, resident)

    def died(self, resident: Resident) -> None:
        """A model is gone by accident: it comes back, if there is room, and after a while."""
        self._spawn(self._revive, resident)

    def _report_progress(self, model: str, fraction: float | None, stage: str) -> None:
        """Report how far a load is. A terminal that is gone does not fail the load."""
        with FailureBoundary() as boundary:
            self._on_progress(model, fraction, stage)
        if boundary.failure is not None:
            log_failure("progress not reported", boundary.failure, model=model)

    # What goes on beside -----------------------------------------------------------------------------

    def _spawn(self, task: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Start a task, the failure of which ends neither its siblings nor the fleet."""
        assert self._nursery is not None, "the fleet runs"
        # Not in the context of the job that happened to be the first: what is logged is not about that.
        name = task.__qualname__
        Context().run(partial(self._nursery.start_soon, name=name), contain, name, task, *arguments)

    async def _preload(self) -> None:
        """Load what is to be there from the start, all at once."""
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
        """Load what a new configuration wants to be there. A failure is logged, and in its status."""
        with suppress(FairleadError):
            await self._desk.load(model)

    async def _revive(self, resident: Resident) -> None:
        await trio.sleep(resident.next_backoff_s())
        # Meanwhile it may have been loaded, unloaded or removed.
        if resident.life is None and resident.has_died and self._residents.get(resident.name) is resident:
            with suppress(FairleadError):  # a failed load is told to `died` again
                await self._desk.load(resident.name, spare=True)

    async def _retire(self, resident: Resident) -> None:
        """Forget a model that is not configured any more, when its last life is over."""
        while (life := resident.life) is not None:
            await life.ended.wait()
        if resident.name not in self._configured:
            del self._residents[resident.name]

    async def _replace(self, node_id: str) -> None:
        """Have a node go when its jobs are finished, if it is there, and come back as it is configured."""
        configured = [node for node in self._config.nodes if node.id == node_id]
        if node_id in self._neighbours:
            await self._neighbours.remove(node_id, for_good=not configured)
        configured = [node for node in self._config.nodes if node.id == node_id]
        if configured and node_id not in self._neighbours:
            self._neighbours.add(configured[0], self._config.health_check)

    async def _measure(self, resident: Resident) -> None:
        """Keep the most that a model was seen to take in this life, if it does not say what it takes."""
        life = resident.life
        while life is not None and resident.life is life:
            await contain("measuring", resident.measure)
            self._memory.measured(resident.name, resident.memory_bytes)
            with trio.move_on_after(MEASURE_EVERY_S):
                await life.ended.wait()

    # The configuration -------------------------------------------------------------------------------

    async def _read_all(self, models: Iterable[AnyModelConfig]) -> dict[str, TextModel]:
        return {model.name: await self._read(model) for model in models if isinstance(model, ModelConfig)}

    def _take(self, config: Config, texts: dict[str, TextModel]) -> None:
        """Go by this configuration, `texts` being those of models that are new or others than before."""
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
                self._residents[model.name] = Resident(
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

    def _resident(self, model: str) -> Resident:
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
    """Return one of our models as a node."""
    states: dict[str, NodeState] = {"ready": "up", "draining": "draining", "loading": "loading"}
    return NodeStatus(
        id=model.node,
        kind=model.kind,
        url=None,
        models=(model.model,),
        seats=model.seats,
        busy=model.busy,
        state=states.get(model.state, "down"),
        problem=model.problem,
        ups=model.loads,
        downs=model.loads - (model.state in ("ready", "draining")),
    )
