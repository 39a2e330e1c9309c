"""What an eviction policy is (seed 004): a pure decision, asked far more often than swaps happen."""

from collections.abc import Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Knows no queue, no process and no clock; must not log, for most of what it answers never happens."""

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return which of the `running` models must stop so that `target` can be loaded.

        `running` is complete: it has the models that are being loaded, too. It begins with the model that
        was used longest ago; those that work now come last. `target` is not in it.
        """


class KeepEverything:
    """There is room for all: nothing is ever evicted."""

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return the empty set."""
        del target, running
        return frozenset()
