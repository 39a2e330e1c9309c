"""Chooses one of a selector's models for a job. Pure: takes the models' states and returns a choice.

The three strategies are llama-swap's. Fairlead adds two rules: an unhealthy target (its last load failed, or
its node is down) comes after all healthy ones, and a target that is stopping after those that are not loaded.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from fairlead.base.config import Fault, SelectorConfig
from fairlead.base.config.spelling import KeyPath
from fairlead.nodes.node import ModelState
from fairlead.router.swap.policy import EvictionPolicy

# By the state of a target's model: how long an answer would be delayed, from 0 for least.
_DELAY_RANKS: dict[ModelState, int] = {
    "ready": 0,
    "loading": 1,
    "stopped": 2,
    "draining": 3,
    "stopping": 3,
    "failed": 4,
}


class Target(NamedTuple):
    """One of the models of a selector, in its current state.

    name: its name in the selector's list.
    model: its canonical name.
    state: whether it is loaded.
    is_remote: whether only nodes have it.
    is_healthy: whether it can take jobs.
    """

    name: str
    model: str
    state: ModelState = "stopped"
    is_remote: bool = False
    is_healthy: bool = True

    @property
    def delay_rank(self) -> int:
        """How long an answer would be delayed, from 0 for least."""
        return _DELAY_RANKS[self.state if self.is_healthy else "failed"]

    @property
    def is_avoided(self) -> bool:
        """Whether all others are preferred: it has failed, or is being evicted."""
        return self.delay_rank > _DELAY_RANKS["stopped"]


class Selection:
    """Chooses targets, and counts their unfinished jobs for the strategy `spillover`.

    Each of several `fronts` counts its own jobs, and has its part of the number, rounded up.
    """

    def __init__(self, *, fronts: int = 1) -> None:
        self._fronts = fronts
        self._taken: Counter[tuple[str, str]] = Counter()  # by selector and model
        self._turn = 0

    def choose(self, selector: str, config: SelectorConfig, targets: Sequence[Target]) -> Target:
        """Return the target for a job that arrived now. `targets` is not empty, in the configured order."""
        match config.strategy:
            case "pin":
                return targets[0]
            case "warm":
                return min(targets, key=lambda target: target.delay_rank)
            case "spillover":
                return self._spill_over(selector, ceil(config.settings.spillover / self._fronts), targets)

    def take(self, selector: str, model: str) -> None:
        """Count a job for this target, until `give_back`."""
        self._taken[selector, model] += 1

    def give_back(self, selector: str, model: str) -> None:
        """Stop counting a job of this target that has ended."""
        assert self._taken[selector, model] > 0
        self._taken[selector, model] -= 1
        if not self._taken[selector, model]:
            del self._taken[selector, model]

    def taken(self, selector: str, model: str) -> int:
        """Return how many jobs of the selector the target has now."""
        return self._taken[selector, model]

    def _spill_over(self, selector: str, limit: int, targets: Sequence[Target]) -> Target:
        """Fill the targets in use evenly, up to the limit; then use the next one, if there is one."""
        active = [target for target in targets if self._is_active(selector, target)]
        idle = [target for target in targets if target not in active and not target.is_avoided]
        least = min((self.taken(selector, target.model) for target in active), default=limit)
        if active and (least < limit or not idle):
            tied = [target for target in active if self.taken(selector, target.model) == least]
            self._turn += 1
            return tied[self._turn % len(tied)]
        return (idle or targets)[0]

    def _is_active(self, selector: str, target: Target) -> bool:
        """Return whether it is in use. A model that a remote server has loaded is not, unless it has jobs."""
        if target.is_avoided:
            return False
        is_loaded = target.state in ("ready", "loading") and not target.is_remote
        return is_loaded or self.taken(selector, target.model) > 0


# Checks of a configuration file --------------------------------------------------------------------------


def unknown_targets(selectors: Mapping[str, SelectorConfig], known: Iterable[str]) -> Iterator[KeyPath]:
    """Yield the paths of targets that are not models: they are ignored."""
    known = frozenset(known)
    for name, selector in selectors.items():
        yield from ((name, "targets", i) for i, target in enumerate(selector.targets) if target not in known)


def without_targets(selectors: Mapping[str, SelectorConfig], known: Iterable[str]) -> Iterator[Fault]:
    """Yield the selectors that have no model as a target: every request for them is refused."""
    known = frozenset(known)
    for name, selector in selectors.items():
        if known.isdisjoint(selector.targets):
            targets = ", ".join(selector.targets)
            message = f"none of them is served here ({targets}), so every request for {name} gets 404"
            yield Fault((name, "targets"), message)


def faults_of_spilling(
    selectors: Mapping[str, SelectorConfig], local: Mapping[str, str], policy: EvictionPolicy
) -> Iterator[Fault]:
    """Yield the targets that `policy` cannot load without evicting the selector's other targets.

    `local` maps names and aliases of local models to their names. Each such overflow would cost a swap.
    """
    for name, selector in selectors.items():
        if selector.strategy != "spillover":
            continue
        models = [local[target] for target in selector.targets if target in local]
        for index, target in enumerate(selector.targets):
            model = local.get(target, target)
            others = [other for other in models if other != model]
            if models.count(model) > 1 or selector.targets.count(target) > 1:
                yield Fault((name, "targets", index), f"{model} occurs twice")
            elif target in local and (evicted := policy.eviction_for(model, others)):
                names = ", ".join(sorted(evicted))
                yield Fault((name, "targets", index), f"{model} cannot be loaded together with {names}")
