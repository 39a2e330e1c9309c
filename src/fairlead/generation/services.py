"""What the views use: the gateway, the fleet, and the values that the composition root supplies."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead.base.config import ApiKey, Config, SelectorConfig
from fairlead.base.errors import ModelNotFound, quoted
from fairlead.generation.gateway import Gateway
from fairlead.generation.metrics.job_metrics import FrontCounts
from fairlead.generation.metrics.scope import Scope
from fairlead.language.text.model import TextModel
from fairlead.router.fleet.access import FleetAccess
from fairlead.router.quotas.access import identity_of
from fairlead.router.quotas.key_quotas import KeyQuotas


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that the routes use.

    `models` are the engine's, by canonical name: their tokenizers are loaded here. Requests for other models
    of `fleet` are relayed. `aliases` maps other names to canonical ones, of all kinds of models, and
    `selectors` has the names that stand for several. All three may change at run time.

    `estimate` returns, for a model, tenant and priority, the forecast for a new job: `position`,
    `estimated_wait_s` and `estimated_wait_p90_s`. `problems` returns the current problems, by model;
    `draining` whether the server takes no more jobs, because it is about to stop, and `stopping` whether it
    was requested to stop, but may still take jobs. `refresh` waits until the fleet, the queue's statistics
    and the counts are up to date, where another process has them. `quotas` and `counts`: those of all
    fronts, if there are several; if not, the routes have their own. `fronts`: how many processes share the
    clients.
    """

    config: Config
    gateway: Gateway
    fleet: FleetAccess
    models: Mapping[str, TextModel]
    aliases: Mapping[str, str]
    selectors: Mapping[str, SelectorConfig] = field(default_factory=dict)
    ready: Callable[[], bool]
    queue_statistics: Callable[[], dict[str, Any]]
    estimate: Callable[[str, str, int], Awaitable[dict[str, Any]]]
    problems: Callable[[], Mapping[str, str]] = dict
    draining: Callable[[], bool] = bool
    stopping: Callable[[], bool] = bool
    refresh: Callable[[], Awaitable[None]] = _nothing
    quotas: KeyQuotas | None = None
    counts: Callable[[], FrontCounts] | None = None
    fronts: int = 1

    def canonical(self, name: str) -> str:
        """Return the canonical name of a model, from its name or an alias. Raises `ModelNotFound`.

        The model may be faulty: see `ModelCatalog.refuse_faulty`.
        """
        model = self.aliases.get(name, name)
        if not self.serves(model) and not self.is_faulty(model):
            raise ModelNotFound(f"model {quoted(name)} not found: it is not served here", param="model")
        return model

    def is_faulty(self, model: str) -> bool:
        """Return whether the model of this canonical name is configured, but cannot be loaded."""
        return model in self.fleet.catalog.faults

    def serves(self, model: str) -> bool:
        """Return whether jobs for the model of this canonical name can be taken.

        An engine's model that is being removed still has a node, but no tokenizer any more.
        """
        return model in self.models or self.fleet.is_relayed(model)

    def scope_of(self, api_key: ApiKey | None) -> Scope:
        """Return the scope of a key: its models and, unless it is an operator's for all, its own tenants.

        Compute it for each request: a reload may change which models the key's names mean.
        """
        if api_key is None:
            return Scope()
        if not api_key.models:
            return Scope(tenant=None if api_key.has_role("operator") else identity_of(api_key))
        return Scope(frozenset(self._models_of(api_key.models)), identity_of(api_key))

    def _models_of(self, names: Iterable[str]) -> Iterable[str]:
        """Yield the models that names, aliases and selectors mean; jobs for a selector run on its targets."""
        for name in names:
            selector = self.selectors.get(name)
            for model in (name,) if selector is None else selector.targets:
                yield self.aliases.get(model, model)
