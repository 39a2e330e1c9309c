"""The seam between the pure half of the engine and the device half: a plan goes in, picks come out."""

from typing import Protocol

import msgspec

from fairlead.engine.sequence import Plan
from fairlead.job import TokenLogprob


class Pick(msgspec.Struct, frozen=True):
    """The token a chunk's sequence goes on with, or the `error` that ends that sequence alone."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class PendingStep(Protocol):
    """A step under way on the device."""

    def wait(self) -> list[Pick | None]:
        """Block until it is done; one entry a chunk, in the plan's order, None where it did not sample."""


class Runner(Protocol):
    """Runs plans over the model and its KV cache."""

    def launch(self, plan: Plan) -> PendingStep:
        """Start a step; the plan's chunks have their blocks already."""
