"""The seam between the pure half of the engine and the device half: a step goes in, picks come out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.job import TokenLogprob
from fairlead.worker.wire import Output

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PromptScores(msgspec.Struct, frozen=True):
    """Log-probabilities of a prompt's tokens, those after the one at `position`; or why there are none."""

    position: int
    logprobs: list[TokenLogprob]
    error: str | None = None


class Picks(msgspec.Struct, frozen=True):
    """What a step's sampling rows go on with.

    `token_ids`: int32 [S], one a sampling row of the step, in its order; a negative one ends that row's
    sequence alone, for the reason in `errors`. `logprobs` and `errors` are by sample index, and so are the
    `vectors` (float32, little-endian) of prompts that were to be embedded, whose token ids mean nothing.
    `prompt_scores` are by the key of their sequence.
    """

    token_ids: "Buffer"
    logprobs: dict[int, TokenLogprob] = {}
    errors: dict[int, str] = {}
    vectors: dict[int, bytes] = {}
    prompt_scores: dict[int, PromptScores] = {}


class PendingStep(Protocol):
    """A step under way on the device."""

    def wait(self) -> Picks:
        """Block until it is done."""


class Runner(Protocol):
    """Runs steps over the model and its KV cache, in the order of their launches.

    `overlaps`: `launch` returns before the device is done, so that the next step can be planned meanwhile.
    `arenas`: buffers for the steps' inputs (pinned memory, say), or how many the batch may make itself.
    """

    @property
    def overlaps(self) -> bool: ...
    @property
    def arenas(self) -> "Sequence[Buffer] | int": ...

    def launch(self, step: Step, batch: InputBatch) -> PendingStep:
        """Start a step; its rows have their blocks already."""

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Give the memory of free blocks back, where the device can: ids by group, ascending."""


class Outcome(msgspec.Struct, frozen=True):
    """What is to be told after a step, or without one.

    A sequence that got one more token and nothing else is in `keys` (little-endian int64) and, at the same
    place, `tokens` (int32); whatever else there is to say is in `outputs`. No sequence is in both.
    """

    keys: bytes
    tokens: bytes
    outputs: list[Output]

    def __bool__(self) -> bool:
        return bool(self.keys or self.outputs)
