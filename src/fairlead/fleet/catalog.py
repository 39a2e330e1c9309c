"""The configured models: their names, and what must be known of them before they are loaded."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeGuard

from fairlead.config import AnyModelConfig, Config, ModelConfig, SelectorConfig
from fairlead.text.model import TextModel

Reader = Callable[[ModelConfig], Awaitable[TextModel]]


def has_text(model: AnyModelConfig) -> TypeGuard[ModelConfig]:
    """Return whether a model's requests are tokenized here: its engine runs on this machine."""
    return isinstance(model, ModelConfig) and not model.is_on_cluster


class ModelCatalog:
    """The models of the configuration in force.

    `models` has their settings by name, and `texts` what `read` has returned for the engine's. `aliases` maps
    other names to names, and `selectors` has the names that stand for several models. The last three are
    changed in place when another configuration is applied.
    """

    def __init__(self, config: Config, read: Reader) -> None:
        self.config = config
        self.models: dict[str, AnyModelConfig] = {}
        self.texts: dict[str, TextModel] = {}
        self.aliases: dict[str, str] = {}
        self.selectors: dict[str, SelectorConfig] = {}
        self._read = read

    async def read(self, models: Iterable[AnyModelConfig]) -> dict[str, TextModel]:
        """Read what `texts` needs of these models. Raises `LoadFailed`."""
        return {model.name: await self._read(model) for model in models if has_text(model)}

    def apply(self, config: Config, texts: dict[str, TextModel]) -> None:
        """Use this configuration. `texts` are those of the new and the changed models."""
        self.config = config
        self.models = {model.name: model for model in config.models}
        self.selectors.clear()
        self.selectors.update(config.selectors)
        self.aliases.clear()
        for model in config.models:
            self.aliases.update(dict.fromkeys(model.aliases, model.name))
        self.texts.update(texts)
        for name in list(self.texts):
            if name not in self.models or not has_text(self.models[name]):
                del self.texts[name]

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
