"""What a draw is, in torch: on any device, and the oracle of the kernel that chooses on a CPU.

A draw is made from a number that depends only on the sequence's seed and the token's position, by the
inverse of the distribution's sum in vocabulary order: what shares the batch cannot change it. top_k, top_p
and min_p are all thresholds on a row's scores, so only finding them ever sorts; tokens that are equally
likely stay or go together. Does not wait for the device.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fairlead.engine.devices import runs_our_kernels
from fairlead.engine.inputs import upload

if TYPE_CHECKING:
    from fairlead.engine.sampler import Parameters

GREEDY_BELOW = 1e-5
"""Temperatures; dividing by less overflows what it should sharpen."""
_CANDIDATES = 1024  # enough for top_p in most rows, and far cheaper than sorting a vocabulary
_RUN = 128  # tokens that are added up before the place of a draw is looked for among them
_LARGEST = torch.finfo(torch.float32).max


def choose_by_torch(logits: Tensor, parameters: "Parameters") -> tuple[Tensor, Tensor]:
    """The token of each row of `logits` [S, V], int64, and the row's highest logit: [S] each."""
    highest, tokens = logits.max(-1)
    if parameters.temperatures is not None:
        drawn = np.flatnonzero(parameters.temperatures >= GREEDY_BELOW)
        if len(drawn) == len(logits):
            tokens = _draw(logits, highest, parameters)
        elif len(drawn):
            rows = upload(drawn, logits.device)
            tokens[rows] = _draw(logits[rows], highest[rows], parameters.of(drawn))
    return tokens, highest


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position), float64, of 48 bits: splitmix64 used as a hash."""
    state = _mix(seeds.astype(np.uint64))
    state = _mix(state + positions.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15))
    return np.asarray((state >> np.uint64(16)).astype(np.float64) * 2.0**-48)


def _mix(state: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, one to one, so that neighbours have nothing in common."""
    state = state + np.uint64(0x9E37_79B9_7F4A_7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


def _draw(logits: Tensor, highest: Tensor, parameters: "Parameters") -> Tensor:
    """Draw a token from each row [R, V] at its temperature and filters: [R]."""
    assert parameters.temperatures is not None
    device = logits.device
    temperatures = upload(parameters.temperatures.astype(np.float32), device)
    # Relative to the row's highest, which is 0 then: nothing overflows, and +inf is simply the highest.
    scores = (logits - highest.clamp(max=_LARGEST)[:, None]).clamp_(max=0).div_(temperatures[:, None])
    thresholds = _thresholds(scores, parameters)
    weights = scores.exp()
    if thresholds is not None:
        weights.masked_fill_(scores < thresholds[:, None], 0)
    numbers = upload(uniforms(parameters.seeds, parameters.positions), device)
    return _inverse(weights, numbers)


def _inverse(weights: Tensor, numbers: Tensor) -> Tensor:
    """Find where the sum of `weights` [R, V] passes the part `numbers` [R] (0…1) of the whole: [R].

    First which run of tokens, then which one of it: one sum a run in place of one a token.
    """
    vocabulary = weights.shape[1]
    if short := -vocabulary % _RUN:
        weights = F.pad(weights, (0, short))
    runs = weights.view(len(weights), -1, _RUN)
    sums = runs.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, runs]
    targets = sums[:, -1:] * numbers[:, None]
    run = _passed(sums, targets)
    before = sums.gather(1, (run - 1).clamp_(min=0)).masked_fill_(run == 0, 0)
    within = runs[torch.arange(len(weights), device=weights.device), run[:, 0]]
    place = _passed(within.cumsum(-1, dtype=torch.float64), targets - before)
    return (run * _RUN + place)[:, 0].clamp_(max=vocabulary - 1)


def _passed(sums: Tensor, targets: Tensor) -> Tensor:
    """Where rising `sums` [R, n] pass `targets` [R, 1], and never where nothing is added: [R, 1]."""
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)  # a target may be rounded up to the whole
    return torch.minimum(torch.searchsorted(sums, targets, right=True), last)


def _thresholds(scores: Tensor, parameters: "Parameters") -> Tensor | None:
    """The least score that each row still accepts [R], or None if no row filters.

    min_p looks at the whole distribution, top_k at what is likeliest, top_p at what those two left.
    """
    if parameters.min_p is None and parameters.top_k is None and parameters.top_p is None:
        return None
    rows, vocabulary = scores.shape
    top_p = np.ones(rows) if parameters.top_p is None else parameters.top_p.astype(np.float64)
    top_k = np.zeros(rows, np.int64) if parameters.top_k is None else parameters.top_k.astype(np.int64)
    top_k = top_k.clip(0, vocabulary)
    least = np.full(rows, -np.inf, np.float32) if parameters.min_p is None else least_scores(parameters.min_p)
    thresholds = upload(least, scores.device)
    if runs_our_kernels(scores.device):
        from fairlead.engine import device_sampling  # which needs Triton

        return device_sampling.thresholds(scores, thresholds, top_k, top_p)
    sorting = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(sorting) == rows:
        return _top(scores, thresholds, top_k, top_p)
    if len(sorting):
        some = upload(sorting, scores.device)
        thresholds[some] = _top(scores[some], thresholds[some], top_k[sorting], top_p[sorting])
    return thresholds


def least_scores(min_p: np.ndarray) -> np.ndarray:
    """The least scores [R], float32, of tokens that are `min_p` as likely as the likeliest."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(min_p.astype(np.float64)).astype(np.float32))


def _top(scores: Tensor, least: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Raise the thresholds `least` [R] to those of top_k (0: off) and top_p (1: off)."""
    vocabulary, device = scores.shape[1], scores.device
    nucleus = bool((top_p < 1).any())
    # Whether the candidates are enough can only be asked of a device that is waited for: elsewhere, sort all.
    candidates = _CANDIDATES if device.type == "cpu" else vocabulary
    size = min(vocabulary, max(int(top_k.max()), candidates if nucleus else 0))
    best = scores.topk(size).values  # [R, size], falling
    kth = upload(np.maximum(top_k - 1, 0), device)[:, None]
    limited = upload(top_k > 0, device)
    least = torch.where(limited, torch.maximum(least, best.gather(1, kth)[:, 0]), least)
    if not nucleus:
        return least
    share = upload(top_p, device)[:, None]
    weights = scores.exp().masked_fill_(scores < least[:, None], 0)
    wanted = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    found, enough = _nucleus(best, least, wanted, whole=size == vocabulary)
    while size < vocabulary:  # never on a device that would have to be waited for
        lacking = (~enough & (share[:, 0] < 1)).nonzero()[:, 0]
        if not len(lacking):
            break
        size = min(vocabulary, 8 * size)
        best = scores[lacking].topk(size).values
        found[lacking], enough[lacking] = _nucleus(
            best, least[lacking], wanted[lacking], whole=size == vocabulary
        )
    return torch.where(share[:, 0] < 1, found, least)


def _nucleus(best: Tensor, least: Tensor, wanted: Tensor, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Where the `best` scores [R, size] have come to the weight `wanted` [R, 1], if they have: [R] each."""
    sums = _masses(best, least)
    kept = (sums < wanted).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1)  # the last one's index
    # Of a row of NaN no sum is enough, nor is there more to be had.
    enough = torch.full_like(least, whole, dtype=torch.bool) | ~(sums[:, -1] < wanted[:, 0])
    return torch.maximum(least, best.gather(1, kept)[:, 0]), enough


def _masses(ranked: Tensor, least: Tensor) -> Tensor:
    """The weight of the first 1, 2, … scores of each row, leaving out those below `least`: [R, size]."""
    return ranked.exp().masked_fill_(ranked < least[:, None], 0).cumsum(-1, dtype=torch.float64)
