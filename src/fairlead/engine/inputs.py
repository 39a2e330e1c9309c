"""A prepared step as the device half reads it: views of its arena and of the batch's block tables.

Owns nothing: what is here is valid until the step's arena is used again.
"""

from typing import Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead._cext.inputbatch import InputBatch, Step


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a step, decodes first: B rows of T tokens in all, S of them sample. All int32.

    Tensors are on the device, arrays on the host (on a CPU both are views of the arena).

    `token_ids` [T], each one the model has; `positions` [T]; `slot_mapping` [T] by KV cache group: block ·
    block_size + offset. `query_starts` [B + 1]: row r's tokens are query_starts[r] … query_starts[r + 1] −
    1. `sequence_lengths` [B]: tokens in the cache after this step. `slots` [B]: row r's line in each
    group's block table, `tables[group]` [slots, blocks a line]. The first `decodes` rows have one token
    each. `sample_rows` [S], rising: the rows whose last token's logits are wanted. `scored_tokens` [P],
    rising: other tokens whose logits are wanted too.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: tuple[Tensor, ...]
    query_starts: np.ndarray
    sequence_lengths: np.ndarray
    slots: np.ndarray
    sample_rows: np.ndarray
    tables: tuple[np.ndarray, ...]
    decodes: int
    scored_tokens: np.ndarray = np.empty(0, np.int64)

    @classmethod
    def read(cls, step: Step, batch: InputBatch, device: torch.device) -> Self:
        """Bring a step to `device`: one copy, of its arena. `token_ids` are still as the arena has them."""
        arena = upload(np.asarray(step.arena), device)
        at, T = step.offsets, step.tokens  # noqa: N806
        groups = len(step.slot_mapping)
        return cls(
            token_ids=arena[at.input_ids : at.input_ids + T],
            positions=arena[at.positions : at.positions + T],
            slot_mapping=tuple(
                arena[at.slot_mapping + group * T : at.slot_mapping + (group + 1) * T]
                for group in range(groups)
            ),
            query_starts=np.asarray(step.query_starts),
            sequence_lengths=np.asarray(step.sequence_lengths),
            slots=np.asarray(step.slots),
            sample_rows=np.asarray(step.sample_rows),
            tables=tuple(np.asarray(batch.block_table(group)) for group in range(groups)),
            decodes=step.decodes,
        )

    @property
    def sample_tokens(self) -> np.ndarray:
        """Where the last token of each sampling row is, among all T: [S]."""
        ends: np.ndarray = self.query_starts[self.sample_rows + 1] - 1
        return ends

    @property
    def logit_tokens(self) -> np.ndarray:
        """Indices of the tokens with logits: sampled tokens, then scored tokens, [S + P]."""
        if not len(self.scored_tokens):
            return self.sample_tokens
        return np.concatenate([self.sample_tokens, self.scored_tokens])


def strangers(batch: InputBatch, slots: np.ndarray, vocab_size: int) -> dict[int, str]:
    """Which of the samples in `slots` have an id outside the vocabulary in their prompt, and what to say.

    A prompt is looked at once, when its first token is about to come.
    """
    first = np.flatnonzero(np.asarray(batch.output_tokens)[slots] == 0)
    return {
        index: f"the prompt has token ids outside 0…{vocab_size - 1}"
        for index in first.tolist()
        if np.asarray(batch.state(int(slots[index])).tokens_view()).max() >= vocab_size
    }


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Bring an array to `device` without waiting for it; on a CPU it stays where it is."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # From memory that the driver may read at any time; torch keeps it until that has happened.
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
