"""What a sequence's own parameters do to its logits before a token is chosen: penalties, biases, bans.

Every id that a client named is checked against the logits' width; one that names no token changes nothing.
"""

from collections.abc import Collection
from collections.abc import Sequence as ReadOnlySequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead.engine.sequence import Sequence

_BANNED = float("-inf")


def adjust(logits: Tensor, sequences: ReadOnlySequence[Sequence], eos_token_ids: Collection[int]) -> Tensor:
    """Return [S, V] logits, float32, with each sequence's penalties, biases and `min_tokens` applied.

    In this order: the repetition penalty divides (or multiplies what is negative), frequency and presence
    penalties are subtracted, biases added, ends banned. The given tensor stays as it is.
    """
    vocabulary = logits.shape[1]
    changes = (
        _penalties(sequences, vocabulary),
        _biases(sequences, vocabulary),
        _bans(sequences, eos_token_ids, vocabulary),
    )
    if not any(changes):
        return logits
    logits = logits.clone()
    for change in changes:
        if change is not None:
            change.apply(logits)
    return logits


class _Change(msgspec.Struct, frozen=True):
    """For each place (row, id), none of them twice: a factor away from 0…∞, then an addition; −inf bans."""

    rows: np.ndarray
    ids: np.ndarray
    factors: np.ndarray
    additions: np.ndarray

    def apply(self, logits: Tensor) -> None:
        rows, ids = (
            torch.from_numpy(self.rows).to(logits.device),
            torch.from_numpy(self.ids).to(logits.device),
        )
        factors, additions = (
            torch.from_numpy(self.factors).to(logits),
            torch.from_numpy(self.additions).to(logits),
        )
        before = logits[rows, ids]
        after = torch.where(before > 0, before / factors, before * factors) + additions
        logits[rows, ids] = after.masked_fill_(additions == _BANNED, _BANNED)  # even where +inf − inf is NaN


def _penalties(sequences: ReadOnlySequence[Sequence], vocabulary: int) -> _Change | None:
    parts = []
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        repetition = sampling.repetition_penalty
        if repetition == 1 and not sampling.frequency_penalty and not sampling.presence_penalty:
            continue
        ids, where = np.unique(np.array(sequence.token_ids, dtype=np.int64), return_inverse=True)
        counts = np.bincount(where[sequence.prompt_length :], minlength=len(ids))  # in the output only
        with np.errstate(invalid="ignore"):  # an infinite penalty makes NaN, which fails this row alone
            costs = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        real = (ids >= 0) & (ids < vocabulary)
        rows, factors = np.full(len(ids), row), np.full(len(ids), repetition, dtype=np.float64)
        parts.append((rows[real], ids[real], factors[real], -costs[real].astype(np.float64)))
    return _Change(*map(np.concatenate, zip(*parts, strict=True))) if parts else None


def _biases(sequences: ReadOnlySequence[Sequence], vocabulary: int) -> _Change | None:
    return _additions(
        [
            (row, token_id, bias)
            for row, sequence in enumerate(sequences)
            for token_id, bias in sequence.sampling.logit_bias.items()
            if 0 <= token_id < vocabulary
        ]
    )


def _bans(
    sequences: ReadOnlySequence[Sequence], eos_token_ids: Collection[int], vocabulary: int
) -> _Change | None:
    """No end before `min_tokens`: neither the client's stop ids nor, unless it ignores them, the model's."""
    bans = []
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sequence.output_length < sampling.min_tokens:
            ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
            bans += [(row, token_id, _BANNED) for token_id in ends if 0 <= token_id < vocabulary]
    return _additions(bans)


def _additions(entries: list[tuple[int, int, float]]) -> _Change | None:
    if not entries:
        return None
    rows, ids, amounts = (np.array(column) for column in zip(*entries, strict=True))
    return _Change(rows, ids, np.ones(len(rows)), amounts.astype(np.float64))
