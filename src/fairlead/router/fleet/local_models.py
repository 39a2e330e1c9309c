"""The local models: starts and stops them as the scheduler decides, and restarts those that died."""

from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec
import trio

from fairlead.base.config import Config, KeepSwap
from fairlead.base.errors import FairleadError, LoadCancelled, LoadFailed, ModelUnloaded
from fairlead.base.supervision import contain
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.catalog import Readings
from fairlead.router.fleet.managed_model import ManagedModel
from fairlead.router.fleet.model_memory import ModelMemory
from fairlead.router.swap.policies import policy_for

MEASURE_EVERY_S = 10.0


class LocalModels(dict[str, ManagedModel]):
    """The `ManagedModel` of each configured model, by name; also of removed ones until they have stopped.

    config: the settings.
    dispatcher: what grants the seats.
    spawn: starts a task in the fleet's nursery.
    make_model: calls `ManagedModel` with the options that are not given here.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        spawn: Callable[..., None],
        make_model: Callable[..., ManagedModel],
    ) -> None:
        super().__init__()
        self._config = config
        self._dispatcher = dispatcher
        self._spawn = spawn
        self._make_model = make_model
        self._memory = ModelMemory()
        self._unloaded_early: set[str] = set()  # models that were unloaded during preloading

    @property
    def are_ready(self) -> bool:
        """Whether no unload has interrupted preloading, and no model waits for its restart."""
        if any(model.restarts.is_missing for model in self.values()):
            return False
        return not any(
            model.preload and model.name in self._unloaded_early for model in self._config.local_models
        )

    # Configuration -----------------------------------------------------------------------------------

    def configure(self, config: Config, readings: Readings) -> None:
        """Use this configuration. `readings` are those of the new, the changed and the repaired models."""
        self._config = config
        self._memory.configure(config.local_models)
        for each in config.local_models:
            text, fault = readings.texts.get(each.name), readings.faults.get(each.name)
            model = self.get(each.name)
            if model is None:
                model = self[each.name] = self._make_model(
                    each,
                    text,
                    on_loaded=self._loaded,
                    on_died=lambda died: self._spawn(self._restart, died),
                    health=config.health_check,
                )
            elif msgspec.structs.replace(model.config, price=each.price) != each or text is not None:
                model.config, model.text = each, text
            if fault is not None or text is not None:
                model.fault = fault
            model.change_health(config.health_check)

    def schedule(self) -> None:
        """Configure the scheduler and its clock: which models are loaded, and which evicted for them."""
        config, memory = self._config, self._memory
        self._dispatcher.scheduler.prioritize(config.priorities)
        self._dispatcher.models.configure(
            policy_for(config.swap, memory.memory_mb, memory.gpus),
            {model.name: model.ttl_s for model in config.local_models},
            start_swap=self._start_swap,
            stop_model=self._stop_model,
        )

    async def adopt(self, names: Iterable[str]) -> None:
        """Continue with the processes of these models, which run already; return when they are up, or ended.

        No model may be loaded before.
        """
        for name in names:
            model = self[name]
            model.begin(self._spawn)
            assert model.instance is not None
            await model.instance.settled.wait()

    async def preload(self) -> list[LoadFailed]:
        """Load all models that are to be preloaded, at once; return the failures."""
        failures: list[LoadFailed] = []

        async def load(model: str) -> None:
            try:
                await self._dispatcher.models.load(model)
            except (LoadCancelled, ModelUnloaded):
                self._unloaded_early.add(model)
            except LoadFailed as error:
                failures.append(error)
            except FairleadError:
                """The server stops, or the model was removed from the configuration."""

        async with trio.open_nursery() as nursery:
            for model in self._config.local_models:
                if model.preload and self[model.name].fault is None:
                    nursery.start_soon(load, model.name)
        return failures

    async def retire(self, name: str) -> None:
        """Forget a model that is no longer configured, once its processes are gone."""
        model = self[name]
        while (instance := model.instance) is not None:
            await instance.ended.wait()
        if all(each.name != name for each in self._config.local_models):
            del self[name]

    # Decisions of the scheduler ----------------------------------------------------------------------

    def _start_swap(self, model: str, evict: frozenset[str]) -> None:
        evicted = [self[name] for name in sorted(evict) if name in self]
        instances = [each.instance for each in evicted if each.instance is not None]
        for each in evicted:
            each.evict()
        if not isinstance(self._config.swap, KeepSwap):
            for each in self.values():
                if each.name != model:
                    each.give_up()
        self[model].begin(self._spawn, [instance.ended for instance in instances])

    def _stop_model(self, model: str) -> None:
        self[model].end()

    # Events of models --------------------------------------------------------------------------------

    def _loaded(self, model: ManagedModel) -> None:
        """Record where a model was loaded; its memory use can be measured now."""
        self._unloaded_early.discard(model.name)
        if model.config.kind == "engine":
            self._memory.loaded(model.name, model.gpu)
        self._spawn(self._measure, model)

    async def _restart(self, model: ManagedModel) -> None:
        """Load a model that died, after a backoff and if there is room."""
        await trio.sleep(model.restarts.next_backoff_s())
        # Meanwhile it may have been loaded, unloaded or removed.
        if model.instance is None and model.restarts.is_due and self.get(model.name) is model:
            with suppress(FairleadError):  # after a failed load, `on_died` is called again
                await self._dispatcher.models.load(model.name, only_if_free=True)

    async def _measure(self, model: ManagedModel) -> None:
        """Measure a model while it runs. The maximum counts if the configuration does not give its memory."""
        instance = model.instance
        while instance is not None and model.instance is instance:
            await contain("measuring", model.measure)
            self._memory.measured(model.name, model.memory_bytes)
            with trio.move_on_after(MEASURE_EVERY_S):
                await instance.ended.wait()
