"""What an eviction policy is: a pure decision, asked far more often than swaps happen."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class SwapReason(msgspec.Struct, frozen=True):
    """What is logged of a swap besides the models it evicts.

    `chosen`: the models that may be loaded at the same time from then on. `cost`: what the evictions cost,
    by which the policy chose; 1 a model unless the policy has costs of its own. `rule`: which rule of the
    configuration allows these models together; "" if there is none.
    """

    chosen: tuple[str, ...]
    cost: float
    rule: str = ""


class EvictionPolicy(Protocol):
    """Knows no queue, no process and no clock; must not log, for most of what it answers never happens.

    A class that inherits from it needs `eviction_for` only.
    """

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return which of the `running` models must stop so that `target` can be loaded.

        `running` is complete: it has the models that are being loaded, too. It begins with the model that
        was used longest ago; those that work now come last. `target` is not in it.
        """
        raise NotImplementedError

    def reason_for(self, target: str, running: Sequence[str]) -> SwapReason:
        """Return why these are evicted. Called once a swap, when it starts, after `eviction_for`."""
        evicted = self.eviction_for(target, running)
        return SwapReason(chosen=tuple(sorted({target, *running} - evicted)), cost=len(evicted))


class KeepEverything(EvictionPolicy):
    """There is room for all: nothing is ever evicted."""

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return the empty set."""
        del target, running
        return frozenset()
