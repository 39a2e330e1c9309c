"""The part of the server's state that a caller may see: see `telemetry.scope`."""

from collections.abc import Iterable

from fairlead.base.config import ApiKey
from fairlead.generation.metrics.scope import Scope
from fairlead.generation.services import Services
from fairlead.router.quotas.access import identity_of


def scope_of(services: Services, api_key: ApiKey | None) -> Scope:
    """Return the caller's scope: its key's models and, unless it is an operator's for all, its own tenants.

    Compute it for each request: a reload may change which models the key's names mean.
    """
    if api_key is None:
        return Scope()
    if not api_key.models:
        return Scope(tenant=None if api_key.has_role("operator") else identity_of(api_key))
    return Scope(frozenset(_models(services, api_key.models)), identity_of(api_key))


def _models(services: Services, names: Iterable[str]) -> Iterable[str]:
    """Yield the models that names, aliases and selectors mean; jobs for a selector run on its targets."""
    for name in names:
        selector = services.selectors.get(name)
        for model in (name,) if selector is None else selector.targets:
            yield services.aliases.get(model, model)
