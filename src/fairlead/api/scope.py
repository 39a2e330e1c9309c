"""The scope of a caller: see `telemetry.scope`."""

from collections.abc import Iterable

from fairlead.api.access import identity_of
from fairlead.api.services import Services
from fairlead.config import ApiKey
from fairlead.telemetry.scope import Scope


def scope_of(services: Services, api_key: ApiKey | None) -> Scope:
    """Return what the caller may see: everything, unless its key is for some models only.

    A reload may change what the names of a key mean.
    """
    if api_key is None or not api_key.models:
        return Scope()
    return Scope(frozenset(_models(services, api_key.models)), identity_of(api_key))


def _models(services: Services, names: Iterable[str]) -> Iterable[str]:
    """Yield the models behind names, aliases and selectors; jobs for a selector run on its targets."""
    for name in names:
        selector = services.selectors.get(name)
        for model in (name,) if selector is None else selector.targets:
            yield services.aliases.get(model, model)
