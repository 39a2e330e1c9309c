"""The interface between the engine's scheduling half and its device half: steps in, sampled tokens out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.base.job import TokenLogprob
from fairlead.base.messages import Output

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PromptScores(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens after `position`, or the `error` for which there are none."""

    position: int
    logprobs: list[TokenLogprob]
    error: str | None = None


class SampledTokens(msgspec.Struct, frozen=True):
    """The results of a step's sampling rows.

    `token_ids`: int32 [S], one per sampling row, in the step's order. A negative id fails only that row's
    sequence, for the reason in `errors`. `logprobs`, `errors` and `vectors` are keyed by sample index.
    `vectors` (float32, little-endian) are the embeddings of prompts; token ids of such rows have no meaning.
    `prompt_scores` are keyed by sequence key. `complete`: samples with a negative id whose answer has ended.
    """

    token_ids: "Buffer"
    logprobs: dict[int, TokenLogprob] = {}
    errors: dict[int, str] = {}
    vectors: dict[int, bytes] = {}
    prompt_scores: dict[int, PromptScores] = {}
    complete: frozenset[int] = frozenset()


class PendingStep(Protocol):
    """A launched step. Its results have not been fetched yet."""

    def wait(self) -> SampledTokens:
        """Block until the step is done and return its results."""


class Runner(Protocol):
    """Runs steps over the model and its KV cache, in launch order.

    `overlaps`: `launch` returns before the device is done, so that the next step can be planned meanwhile.
    `arenas`: buffers for the steps' inputs (pinned memory, for example), or how many the batch allocates.
    `samples_several`: a row may sample several times; else it is prepared as several that sample once.
    `columns`: the optional columns that sequences may have, with their widths (`backend.Forward`).
    """

    @property
    def overlaps(self) -> bool: ...
    @property
    def arenas(self) -> "Sequence[Buffer] | int": ...
    @property
    def samples_several(self) -> bool: ...
    @property
    def columns(self) -> Mapping[str, int]: ...

    def launch(self, step: Step, batch: InputBatch) -> PendingStep:
        """Start a step. Its rows must have their blocks already."""

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Return the memory of free blocks to the system, where the device can. Ids by group, ascending."""


class Outcome(msgspec.Struct, frozen=True):
    """What to report after a step, or without one.

    The fields are those of `messages.StepOutputs`.
    """

    keys: bytes
    tokens: bytes
    outputs: list[Output]
    counts: bytes = b""

    def __bool__(self) -> bool:
        return bool(self.keys or self.outputs)
