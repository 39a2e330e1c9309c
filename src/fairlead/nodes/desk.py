"""The interfaces between the fleet and what decides about models and nodes, which is the dispatcher."""

from collections.abc import Mapping
from typing import Protocol

import trio

from fairlead.config import SwapConfig
from fairlead.errors import FairleadError
from fairlead.nodes.gpus import Gpus
from fairlead.nodes.node import NodeCounts
from fairlead.nodes.remote_node import RemoteListener


class Garage(Protocol):
    """Starts and stops the processes of models. Called synchronously; must not call back at once.

    It reports results by `node_up` or `load_failed`, and by `gone` when processes have ended.
    """

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        """Stop the models in `evict`, which are idle or stopping already; load `model` when they are gone."""

    def stop_model(self, model: str) -> None:
        """Stop an idle model, or cancel its load."""


class Desk(RemoteListener, Protocol):
    """Decides which models are loaded: all requests to load or unload a model go through it."""

    def arrange(
        self,
        garage: Garage,
        swap: SwapConfig,
        ttl_s: Mapping[str, float],
        memory_mb: Mapping[str, float],
        gpus: Gpus | None = None,
    ) -> None:
        """Load and unload models through `garage`, and make room for them as the configuration says.

        `ttl_s` has every model that can be loaded: how long it stays loaded without a job (0: forever).
        `memory_mb` is the known memory use of models, `gpus` their GPUs; both are read at each decision.
        """

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Of the requested models, load those with the higher number first; 0 for a model without one."""

    async def load(self, model: str, *, spare: bool = False) -> None:
        """Load a model in the turn of a job that arrives now; return when it is loaded.

        `spare`: only if that evicts no other. Raises `LoadFailed`, `ModelNotFound` or `Draining`.
        """

    def unload(
        self, model: str, error: FairleadError | None = None, *, waiting: FairleadError | None = None
    ) -> None:
        """Stop a model once its running jobs are finished; with `error`, they end with that instead.

        Jobs and loads that wait for it end with `waiting`. If that is None, the jobs wait for its next load,
        and a load that is under way ends with `LoadCancelled`.
        """

    def forget(self, model: str, error: FairleadError | None = None) -> None:
        """Serve a model no longer: what waits for it ends with the error, unless another node has it.

        The default error is `ModelNotFound`.
        """

    def gone(self, models: frozenset[str]) -> None:
        """Note that all processes of these models have ended."""

    def close(self, node_id: str) -> trio.Event:
        """Give a remote node no more jobs; return an event that is set when it has none."""

    def reopen(self, node_id: str) -> None:
        """Let a node of this id have jobs again, from the next time that it comes up."""

    def counts(self, node_id: str) -> NodeCounts | None:
        """Return the counts of a node; None if it is not up."""
