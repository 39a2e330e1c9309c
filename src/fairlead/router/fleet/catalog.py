"""The configured models: their names, and what must be known of them before they are loaded."""

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeGuard

import structlog

from fairlead.base.config import AnyModelConfig, Config, ConfigError, ModelConfig, Price, SelectorConfig
from fairlead.base.errors import FaultyModel, LoadFailed
from fairlead.language.text.model import TextModel

logger = structlog.get_logger("fairlead.model")

Reader = Callable[[ModelConfig], Awaitable[TextModel]]


def has_text(model: AnyModelConfig) -> TypeGuard[ModelConfig]:
    """Return whether a model's requests are tokenized here: its engine runs on this machine."""
    return isinstance(model, ModelConfig) and not model.is_on_cluster


class Readings(NamedTuple):
    """What was read of models by name: of those that can be loaded, and why others cannot."""

    texts: dict[str, TextModel]
    faults: dict[str, FaultyModel]


class ModelCatalog:
    """The models of the configuration in force.

    `models` has their settings by name, and `texts` what `read` has returned for the engine's; the others of
    these are in `faults`, with the reason why they cannot be loaded. `aliases` maps other names to names, and
    `selectors` has the names that stand for several models. The last four are changed in place when another
    configuration is applied.
    """

    def __init__(self, config: Config, read: Reader) -> None:
        self.config = config
        self.models: dict[str, AnyModelConfig] = {}
        self.texts: dict[str, TextModel] = {}
        self.faults: dict[str, FaultyModel] = {}
        self.aliases: dict[str, str] = {}
        self.selectors: dict[str, SelectorConfig] = {}
        self._read = read

    def price_of(self, model: str, *, is_batch: bool = False) -> Price | None:
        """Return the price of a model, by its canonical name, or that of batches; None: it has none."""
        return self.config.price_of(model, is_batch=is_batch)

    async def read_all(self) -> Readings:
        """Read what `texts` needs of the configured models; a fault of one does not keep others from it.

        If there is nothing else to serve, the fault is raised: `LoadFailed` or `ConfigError`.
        """
        config = self.config
        readings = await self._read_each(config.models)
        if not config.nodes and len(readings.faults) == len(config.models) > 0:
            if len(config.models) > 1:
                raise LoadFailed("\n".join(fault.message for fault in readings.faults.values()))
            (fault,) = readings.faults.values()
            raise fault.__cause__ or fault
        for name, fault in readings.faults.items():
            logger.error("model cannot be loaded", model=name, reason=fault.reason)
        return readings

    async def read_changed(self, config: Config, changed: Collection[str]) -> Readings:
        """Read what `texts` needs of the models of another configuration that are new or changed.

        Faulty models are read again, because their files may have been repaired. Raises `FaultyModel` if one
        that is new or changed is faulty.
        """
        readings = await self._read_each(
            model for model in config.models if model.name in changed or model.name in self.faults
        )
        for name, fault in readings.faults.items():
            if name in changed:
                raise fault
        return readings

    async def read_faulty(self) -> Readings:
        """Read the faulty models again; return those that have changed."""
        before = dict(self.faults)
        readings = await self._read_each(self.models[name] for name in before)
        changed = {
            name: fault for name, fault in readings.faults.items() if fault.reason != before[name].reason
        }
        return Readings(readings.texts, changed)

    def apply_readings(self, readings: Readings) -> None:
        """Use what was read, as far as the models are configured."""
        for name, fault in readings.faults.items():
            if name in self.models:
                self.texts.pop(name, None)
                self.faults[name] = fault
        for name, text in readings.texts.items():
            if name in self.models:
                self.faults.pop(name, None)
                self.texts[name] = text

    async def _read_each(self, models: Iterable[AnyModelConfig]) -> Readings:
        readings = Readings({}, {})
        for model in models:
            if not has_text(model):
                continue
            try:
                readings.texts[model.name] = await self._read(model)
            except (LoadFailed, ConfigError) as error:
                fault = FaultyModel.of(model.name, str(error))
                fault.__cause__ = error
                readings.faults[model.name] = fault
        return readings

    def apply(self, config: Config, readings: Readings) -> None:
        """Use this configuration. `readings` are those of the new and the changed models."""
        self.config = config
        self.models = {model.name: model for model in config.models}
        self.selectors.clear()
        self.selectors.update(config.selectors)
        self.aliases.clear()
        for model in config.models:
            self.aliases.update(dict.fromkeys(model.aliases, model.name))
        self.apply_readings(readings)
        by_name: tuple[dict[str, Any], ...] = (self.texts, self.faults)
        for known in by_name:
            for name in list(known):
                if name not in self.models or not has_text(self.models[name]):
                    known.pop(name)

    def refuse_faulty(self, model: str) -> None:
        """Raise `FaultyModel` if the model cannot be loaded because of its files or settings."""
        if (fault := self.faults.get(model)) is not None:
            raise FaultyModel.of(model, fault.reason)  # an exception of its own, with its own traceback

    def isolates_tenants(self, model: str) -> bool:
        """Return whether tenants share no cached prefixes of a model; False if it is not configured here."""
        config = self.models.get(model)
        if not isinstance(config, ModelConfig):
            return False
        isolate = config.kv_cache.isolate_tenants
        return self.config.has_several_tenants if isolate == "auto" else isolate

    def sends_loading_state(self, model: str) -> bool:
        """Return whether streamed chats for a configured model report the progress of its load."""
        config = self.models.get(model)
        if config is None:
            return False
        override = config.send_loading_state
        return self.config.send_loading_state if override is None else override
