"""What the views use: the gateway, the fleet, and the values that the composition root supplies."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead.base.config import ApiKey, Budget, Config, SelectorConfig
from fairlead.base.errors import ModelNotFound, quoted
from fairlead.generation.gateway import Gateway
from fairlead.generation.metrics.board import BoardAccess, RequestBoard
from fairlead.generation.metrics.job_metrics import FrontCounts
from fairlead.generation.metrics.scope import Scope
from fairlead.language.text.model import TextModel
from fairlead.router.fleet.access import FleetAccess
from fairlead.router.quotas.access import identity_of
from fairlead.router.quotas.budgets import Budgets
from fairlead.router.quotas.key_quotas import KeyQuotas
from fairlead.store.journal import JournalStatistics
from fairlead.store.kept import KeptResponsesStore
from fairlead.store.store import StoreAccess


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that the routes use.

    config: The configuration.
    gateway: Runs jobs.
    fleet: Has the models and nodes.
    models: Our engine's models, by canonical name: their tokenizers are loaded here. Requests for other
        models of the fleet are relayed. May change at run time.
    aliases: Canonical names by other names, of all kinds of models. May change at run time.
    selectors: Names that stand for several models. May change at run time.
    ready: Whether the models to preload are loaded.
    queue_statistics: Returns the totals of the queue.
    estimate: Returns, for a model, tenant and priority, the forecast for a new job: `position`,
        `estimated_wait_s` and `estimated_wait_p90_s`.
    problems: Returns the current problems, by model.
    draining: Whether the server takes no more jobs, because it is about to stop.
    stopping: Whether it was requested to stop, but may still take jobs.
    refresh: Waits until the fleet, the queue's statistics and the counts are up to date, where another
        process has them.
    quotas: Those of all fronts; None: this process has its own.
    counts: Returns what all fronts have counted; None: this process counts alone.
    fronts: How many processes share the clients.
    budgets: What keys, users and teams have spent, if this process has its own quotas.
    store: The keys and the usage that are kept; None: nothing is.
    journal: Returns what this process has counted for the store.
    board: Has the requests that are open or have ended lately, and what is computed of them.
    kept: Has the kept responses of all fronts; None: each process has its own in memory.
    """

    config: Config
    gateway: Gateway
    fleet: FleetAccess
    models: Mapping[str, TextModel]
    aliases: Mapping[str, str]
    selectors: Mapping[str, SelectorConfig] = field(default_factory=dict)
    ready: Callable[[], bool]
    queue_statistics: Callable[[], dict[str, Any]]
    estimate: Callable[[str, str, int, str], Awaitable[dict[str, Any]]]
    problems: Callable[[], Mapping[str, str]] = dict
    draining: Callable[[], bool] = bool
    stopping: Callable[[], bool] = bool
    refresh: Callable[[], Awaitable[None]] = _nothing
    quotas: KeyQuotas | None = None
    counts: Callable[[], FrontCounts] | None = None
    fronts: int = 1
    budgets: Budgets | None = None
    store: StoreAccess | None = None
    journal: Callable[[], JournalStatistics] = JournalStatistics
    board: BoardAccess = field(default_factory=lambda: RequestBoard(list))
    kept: KeptResponsesStore | None = None

    @property
    def stored_budgets(self) -> Mapping[str, Budget]:
        """The budgets of users and teams that the store has, as far as it has been read."""
        keys = None if self.store is None else self.store.keys
        return {} if keys is None else keys.budgets

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
