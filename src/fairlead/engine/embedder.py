"""Runs steps of texts to embed; each ends with its vector. Loaded in place of `runner.ModelRunner`.

Owns the sums of texts with tokens in several steps. Chooses no tokens: an id in its results only means
that the text has ended. Independent of the queue and the wire protocol.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.engine.forward import TorchForward
from fairlead.engine.inputs import Inputs, out_of_vocabulary_rows
from fairlead.engine.models.pooler import Pooler
from fairlead.engine.step import SampledTokens
from fairlead.language.checkpoint.pooling import Pooling

if TYPE_CHECKING:
    from typing_extensions import Buffer


class EmbeddingRunner:
    """`fairlead.engine.step.Runner` over a model that was made for embeddings, or to score texts.

    The rows of its steps must have their blocks, and all tokens of a text must be run, in order.
    `slots`: how many texts can be in progress.
    """

    samples_several = False
    columns: ClassVar[dict[str, int]] = {}
    overlaps = False  # a step samples no tokens with which the next one could begin

    def __init__(
        self, forward: TorchForward, pooling: Pooling, *, slots: int, arenas: "Sequence[Buffer] | int"
    ) -> None:
        self.forward = forward
        self.arenas = arenas
        self._pooler = Pooler(
            pooling,
            slots=slots,
            hidden_size=forward.model.shape.hidden_size,
            device=forward.device,
            score=forward.model.score,
        )

    @torch.inference_mode()
    def launch(self, step: Step, batch: InputBatch) -> "LaunchedTexts":
        """Run all tokens of a step through the layers, and make the vector of each text that ends in it."""
        forward = self.forward
        inputs = Inputs.read(step, batch, forward.device)
        if np.asarray(step.input_ids).max() >= forward.vocab_size:
            # Such a text fails when it ends; an index out of range would fail the whole step.
            ids = inputs.token_ids
            inputs = msgspec.structs.replace(inputs, token_ids=ids.masked_fill(ids >= forward.vocab_size, 0))
        vectors = self._pooler.add(
            forward.states(inputs),
            inputs.query_starts,
            inputs.sequence_lengths,
            inputs.slots,
            np.searchsorted(inputs.query_starts, inputs.sample_tokens, side="right") - 1,
        )
        errors = out_of_vocabulary_rows(batch, np.asarray(step.sample_slots), forward.vocab_size)
        return LaunchedTexts(vectors, errors)

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Return the memory of free blocks, by KV cache group, to the system where the device can."""
        for group, ids in enumerate(blocks):
            self.forward.release(group, ids)


class LaunchedTexts:
    """`fairlead.engine.step.PendingStep` of this runner."""

    def __init__(self, vectors: Tensor, errors: dict[int, str]) -> None:
        self._vectors = vectors
        self._errors = errors

    def wait(self) -> SampledTokens:
        vectors = self._vectors.cpu().numpy().astype("<f4", copy=False)  # [S, C]
        errors = dict.fromkeys(_not_finite(vectors), "the model's vector has a NaN or infinity")
        errors |= self._errors
        token_ids = np.zeros(len(vectors), np.int32)
        token_ids[list(errors)] = -1
        made = {index: row.tobytes() for index, row in enumerate(vectors) if index not in errors}
        return SampledTokens(token_ids.data, {}, errors, made)


def _not_finite(vectors: np.ndarray) -> list[int]:
    found: list[int] = np.flatnonzero(~np.isfinite(vectors).all(-1)).tolist()
    return found
