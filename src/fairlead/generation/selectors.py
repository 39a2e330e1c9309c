"""Selectors, the names that stand for several models: the target of a request, and the list entries.

A key may use a selector that is among its models, with all its targets. With any other selector it may use
only the targets that are among its models. `swap.selectors` has the strategies of choice.
"""

from collections.abc import Callable, Iterator
from typing import Any

from fairlead.base.config import ApiKey
from fairlead.base.errors import Forbidden, ModelNotFound, quoted
from fairlead.generation.caller import Caller, call_at_end
from fairlead.generation.services import Services
from fairlead.router.swap.selectors import Selection, Target

Allows = Callable[[ApiKey | None, str], bool]


class Selectors:
    """The choice of a selector's target. `allows`: whether a caller may use a model or a selector."""

    def __init__(self, services: Services, allows: Allows) -> None:
        self._services = services
        self._allows = allows
        self._selection = Selection(fronts=services.fronts)

    def has(self, name: str) -> bool:
        """Return whether the name stands for several models."""
        return name in self._services.selectors

    def choose(self, api_key: ApiKey | None, name: str) -> Target:
        """Return the target that a job of the caller would get now. Raises `ModelNotFound` or `Forbidden`."""
        targets = list(self._targets(name))
        if not targets:
            raise ModelNotFound(f"no model that {quoted(name)} stands for is served here", param="model")
        allowed = self._allowed(api_key, name, targets)
        if not allowed:
            raise Forbidden(f"this API key may use no model that {quoted(name)} stands for", param="model")
        return self._selection.choose(name, self._services.selectors[name], allowed)

    def take(self, caller: Caller, name: str) -> Target:
        """Return the target for the caller's job. With `spillover`, it counts until the caller's end."""
        target = self.choose(caller.api_key, name)
        if self._services.selectors[name].strategy == "spillover":
            self._selection.take(name, target.model)
            call_at_end(caller.nursery, self._selection.give_back, name, target.model)
        return target

    def cards(self, api_key: ApiKey | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and entries of the selectors that the caller may use and that are not unlisted."""
        for name, selector in self._services.selectors.items():
            if not selector.unlisted and (card := self.card(api_key, name)) is not None:
                yield name, card

    def card(self, api_key: ApiKey | None, name: str) -> dict[str, Any] | None:
        """Return a selector's entry; None if it does not exist or the caller may use none of its targets."""
        selector = self._services.selectors.get(name)
        targets = [] if selector is None else self._allowed(api_key, name, list(self._targets(name)))
        if selector is None or not targets:
            return None
        about = selector.metadata | {
            "type": "selector",
            "strategy": selector.strategy,
            "targets": [target.name for target in targets],
        }
        if selector.strategy == "spillover":
            about["spillover"] = selector.settings.spillover
        texts = {"name": selector.title.strip(), "description": selector.description.strip()}
        return {name: text for name, text in texts.items() if text} | {"meta": {"llamaswap": about}}

    def _targets(self, name: str) -> Iterator[Target]:
        """Yield the targets that are served, in the configured order."""
        for target in self._services.selectors[name].targets:
            model = self._services.aliases.get(target, target)
            status = self._services.fleet.model(model)
            if status is not None and self._services.serves(model):
                is_remote, is_healthy = status.kind == "remote", status.problem is None
                yield Target(target, model, status.state, is_remote, is_healthy)

    def _allowed(self, api_key: ApiKey | None, name: str, targets: list[Target]) -> list[Target]:
        if self._allows(api_key, name):
            return targets
        return [target for target in targets if self._allows(api_key, target.model)]
