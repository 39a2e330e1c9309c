"""Who decides about models and nodes: what the fleet tells it, and asks of it. The dispatcher is one."""

from collections.abc import Mapping
from typing import Protocol

import trio

from fairlead.config import SwapConfig
from fairlead.errors import FairleadError
from fairlead.nodes.gpus import Gpus
from fairlead.nodes.node import NodeCounts
from fairlead.nodes.remote_node import RemoteListener


class Garage(Protocol):
    """Who starts and stops the processes of models. Called synchronously; must not call back at once.

    What came of it is told through `node_up` or `load_failed`, and `gone` when processes have ended.
    """

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        """Stop those of `evict`, which are idle or stopping already; load `model` when they are gone."""

    def stop_model(self, model: str) -> None:
        """Stop a model, which is idle, or end its load."""


class Desk(RemoteListener, Protocol):
    """It alone decides which models are loaded: whoever wants one, or wants one gone, says so here."""

    def arrange(
        self,
        garage: Garage,
        swap: SwapConfig,
        ttl_s: Mapping[str, float],
        memory_mb: Mapping[str, float],
        gpus: Gpus | None = None,
    ) -> None:
        """Have models loaded and unloaded by `garage`, as the configuration says they make room.

        `ttl_s` has every model that can be loaded: it is unloaded when it had no job for so long (0: never).
        `memory_mb` is what models take, as far as is known, and `gpus` where; they are read at each decision.
        """

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Of the models that are wanted, load those with the higher number first; 0 of whom none is said."""

    async def load(self, model: str, *, spare: bool = False) -> None:
        """Have a model loaded when a job for it that came now would have; return when it is.

        `spare`: only when that evicts none. Raises `LoadFailed`, `ModelNotFound` or `Draining`.
        """

    def unload(
        self, model: str, error: FairleadError | None = None, *, waiting: FairleadError | None = None
    ) -> None:
        """Have a model stopped once the jobs that it has are finished; with an error, they end with that.

        Jobs and loads that wait for it end with `waiting`; if that is None, they wait for its next load.
        """

    def forget(self, model: str, error: FairleadError | None = None) -> None:
        """A model is not served any more: what waits for it ends with the error, unless another node has it.

        By default that is `ModelNotFound`.
        """

    def gone(self, models: frozenset[str]) -> None:
        """Nothing is left of the processes of these models."""

    def close(self, node_id: str) -> trio.Event:
        """Give a node elsewhere no more jobs; return what is set when it has none."""

    def reopen(self, node_id: str) -> None:
        """A node of this name may have jobs again, from its next life on."""

    def counts(self, node_id: str) -> NodeCounts | None:
        """Return what is counted of a node; None if it is not up."""
