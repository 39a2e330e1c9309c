"""Chooses the next token of every row of logits, in one pass for all.

A draw is made from a number that depends only on the sequence's seed and the token's position, by the
inverse of the distribution's sum in vocabulary order: what shares the batch cannot change it. top_k,
top_p and min_p are all thresholds on a row's logits, so only finding them ever sorts; tokens that are
equally likely stay or go together. Promises that a broken row harms that row alone.
"""

import math
from collections.abc import Collection
from collections.abc import Sequence as ReadOnlySequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead.engine.logits import adjust
from fairlead.engine.sequence import Sequence
from fairlead.engine.step import Pick
from fairlead.job import TokenLogprob

_GREEDY_BELOW = 1e-5  # temperatures; dividing by less overflows what it should sharpen
_CANDIDATES = 1024  # enough for top_p in most rows, and far cheaper than sorting a vocabulary
_LEAST_LOGPROB = -9999.0  # for −inf, which JSON cannot say
_LARGEST = torch.finfo(torch.float32).max


class PendingPicks(msgspec.Struct):
    """Choices that may still be under way on the device; `wait` brings them over."""

    tokens: Tensor
    highest: Tensor
    logprobs: "_Logprobs | None"

    def wait(self) -> list[Pick]:
        """One a row. NaN among the logits, or nothing left to choose, is that row's error."""
        tokens: list[int] = self.tokens.tolist()
        logprobs = self.logprobs.wait() if self.logprobs else {}
        return [
            Pick(token, logprobs.get(row)) if highest > float("-inf") else Pick(-1, error=_explain(highest))
            for row, (token, highest) in enumerate(zip(tokens, self.highest.tolist(), strict=True))
        ]


class _Logprobs(msgspec.Struct):
    """Of those `rows` that asked: the chosen tokens', and the likeliest ones as far as any of them asked."""

    rows: list[int]
    wanted: list[int]
    chosen_ids: Tensor
    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def wait(self) -> dict[int, TokenLogprob]:
        columns = (self.chosen_ids, self.chosen, self.top, self.top_ids)
        found = {}
        for row, k, token, logprob, top, top_ids in zip(
            self.rows, self.wanted, *(column.tolist() for column in columns), strict=True
        ):
            best = tuple(zip(top_ids[:k], top[:k], strict=True))
            found[row] = TokenLogprob(token, logprob, best)
        return found


def choose(
    logits: Tensor, sequences: ReadOnlySequence[Sequence], eos_token_ids: Collection[int]
) -> PendingPicks:
    """Choose the token that each sequence goes on with from its row of `logits` [S, V]."""
    logits = logits.float()
    adjusted = adjust(logits, sequences, eos_token_ids)
    highest, tokens = adjusted.max(-1)  # NaN counts as highest
    drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature >= _GREEDY_BELOW]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        everything = len(drawn) == len(sequences)
        of_drawn = adjusted if everything else adjusted[rows]
        peaks = highest if everything else highest[rows]
        tokens[rows] = _draw(of_drawn, peaks, [sequences[row] for row in drawn])
    return PendingPicks(tokens, highest, _logprobs(logits, tokens, sequences))


def uniforms(seeds: ReadOnlySequence[int], positions: ReadOnlySequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (seed, position), float64, of 48 bits: splitmix64 used as a hash."""
    state = _mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64))
    state = _mix(state + np.array(positions, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15))
    return np.asarray((state >> np.uint64(16)).astype(np.float64) * 2.0**-48)


def _mix(state: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, one to one, so that neighbours have nothing in common."""
    state = state + np.uint64(0x9E37_79B9_7F4A_7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


def _draw(logits: Tensor, highest: Tensor, sequences: list[Sequence]) -> Tensor:
    """Draw a token from each row [R, V] at its sequence's temperature and filters: [R]."""
    device = logits.device
    samplings = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device)
    # Relative to the row's highest, which is 0 then: nothing overflows, and +inf is simply the highest.
    scores = (logits - highest.clamp(max=_LARGEST)[:, None]).clamp_(max=0).div_(temperatures[:, None])
    thresholds = _thresholds(scores, sequences)
    weights = scores.exp()
    if thresholds is not None:
        weights.masked_fill_(scores < thresholds[:, None], 0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    numbers = uniforms([s.seed for s in sequences], [len(s.token_ids) for s in sequences])
    # Below 1 by 2⁻⁴⁸ at least, so never rounded up to the sum; «right» skips what has no weight.
    targets = sums[:, -1:] * torch.from_numpy(numbers).to(device)[:, None]
    return torch.searchsorted(sums, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def _thresholds(scores: Tensor, sequences: list[Sequence]) -> Tensor | None:
    """The least score that each row still accepts [R], or None if no row filters.

    min_p looks at the whole distribution, top_k at what is likeliest, top_p at what those two left.
    """
    samplings = [sequence.sampling for sequence in sequences]
    vocabulary = scores.shape[1]
    min_p = np.array([s.min_p for s in samplings], dtype=np.float64)
    top_k = np.array([min(s.top_k, vocabulary) if s.top_k > 0 else 0 for s in samplings])
    top_p = np.array([s.top_p for s in samplings], dtype=np.float64)
    sorting = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(sorting) and not min_p.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.log(min_p)
    thresholds = torch.from_numpy(least).to(scores)
    if len(sorting):
        rows = torch.from_numpy(sorting).to(scores.device)
        of_sorting = scores if len(sorting) == len(scores) else scores[rows]
        thresholds[rows] = _top(of_sorting, thresholds[rows], top_k[sorting], top_p[sorting])
    return thresholds


def _top(scores: Tensor, least: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Raise the thresholds `least` [R] to those of top_k (0: off) and top_p (1: off)."""
    vocabulary = scores.shape[1]
    nucleus = bool((top_p < 1).any())
    size = min(vocabulary, max(int(top_k.max()), _CANDIDATES if nucleus else 0))
    best = scores.topk(size).values  # [R, size], falling
    kth = torch.from_numpy(np.maximum(top_k - 1, 0)).to(scores.device)[:, None]
    limited = torch.from_numpy(top_k > 0).to(scores.device)
    least = torch.where(limited, torch.maximum(least, best.gather(1, kth)[:, 0]), least)
    if not nucleus:
        return least
    share = torch.from_numpy(top_p).to(scores.device)[:, None]
    weights = scores.exp().masked_fill_(scores < least[:, None], 0)
    wanted = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    sums = _masses(best, least)
    if size < vocabulary and bool(((sums[:, -1:] < wanted) & (share < 1)).any()):
        best = scores.sort(-1, descending=True).values
        sums = _masses(best, least)
    kept = (sums < wanted).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1)  # the last one's index
    found = torch.maximum(least, best.gather(1, kept)[:, 0])
    return torch.where(share[:, 0] < 1, found, least)


def _masses(ranked: Tensor, least: Tensor) -> Tensor:
    """The weight of the first 1, 2, … scores of each row, leaving out those below `least`: [R, size]."""
    return ranked.exp().masked_fill_(ranked < least[:, None], 0).cumsum(-1, dtype=torch.float64)


def _logprobs(logits: Tensor, tokens: Tensor, sequences: ReadOnlySequence[Sequence]) -> _Logprobs | None:
    """Log-probabilities by the model itself, before temperature, penalties and biases."""
    asked = [(row, s.sampling.logprobs) for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
    if not asked:
        return None
    wanted = [min(max(k, 0), logits.shape[1]) for _, k in asked]
    rows = torch.tensor([row for row, _ in asked], device=logits.device)
    of_asked = logits[rows].clamp_(max=_LARGEST).log_softmax(-1)
    of_asked.clamp_(min=_LEAST_LOGPROB)
    chosen_ids = tokens[rows]
    chosen = of_asked.gather(1, chosen_ids[:, None])[:, 0]
    top, top_ids = of_asked.topk(max(wanted))
    return _Logprobs([row for row, _ in asked], wanted, chosen_ids, chosen, top, top_ids)


def _explain(highest: float) -> str:
    if math.isnan(highest):
        return "the model's logits are not numbers (NaN)"
    return "no token is left to choose: every one is ruled out"
