"""The interface of an eviction policy: a pure function, called far more often than models are swapped."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class SwapReason(msgspec.Struct, frozen=True):
    """The facts about a swap that are logged besides the evicted models.

    `chosen`: the models that may be loaded together after it. `cost`: the cost of the evictions, by which the
    policy chose; 1 for each model unless the policy has its own costs. `rule`: the rule of the configuration
    that allows these models together; "" if there is none.
    """

    chosen: tuple[str, ...]
    cost: float
    rule: str = ""


class EvictionPolicy(Protocol):
    """Chooses the models to evict. Depends on no queue, process or clock.

    It must not log, because most of its decisions are not executed. A subclass needs `eviction_for` only.
    """

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return which of the `running` models must stop so that `target` can be loaded.

        `running` is complete: it includes stopping and loading models. Loaded ones are ordered from the least
        recently used to those that work now. `target` is not in it.
        """
        raise NotImplementedError

    def reason_for(self, target: str, running: Sequence[str]) -> SwapReason:
        """Return the reason for the evictions. Called once a swap, when it starts, after `eviction_for`."""
        evicted = self.eviction_for(target, running)
        return SwapReason(chosen=tuple(sorted({target, *running} - evicted)), cost=len(evicted))


class KeepEverything(EvictionPolicy):
    """Never evicts a model."""

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return the empty set."""
        del target, running
        return frozenset()
