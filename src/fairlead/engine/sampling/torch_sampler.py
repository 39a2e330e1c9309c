"""Sampling in torch, on any device; also the test oracle of the kernel that samples on a CPU.

The draw inverts the cumulative distribution in vocabulary order. top_k, top_p and min_p are all thresholds on
a row's scores, so only finding them needs sorting. Equally likely tokens are kept or dropped together. Does
not wait for the device.
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fairlead.engine.arrays import upload
from fairlead.engine.devices import runs_our_kernels
from fairlead.engine.sampling.row_parameters import (
    GREEDY_BELOW,
    RowParameters,
    effective_top_k,
    least_scores,
    uniforms,
)
from fairlead.engine.sampling.token_masks import TokenMasks
from fairlead.language.structured.constraint import WORD_BITS

_CANDIDATES = 1024  # enough for top_p in most rows, and far cheaper than sorting a vocabulary
_RUN = 128  # tokens per partial sum in the search for a draw's place
_LARGEST = torch.finfo(torch.float32).max


def choose_by_torch(logits: Tensor, parameters: RowParameters) -> tuple[Tensor, Tensor]:
    """Return the token of each row of `logits` [S, V], int64, and the row's highest logit: [S] each."""
    highest, tokens = logits.max(-1)
    temperatures = parameters.get("temperature")
    if temperatures is not None:
        drawn = np.flatnonzero(temperatures >= GREEDY_BELOW)
        if len(drawn) == len(logits):
            tokens = _draw(logits, highest, parameters)
        elif len(drawn):
            rows = upload(drawn, logits.device)
            tokens[rows] = _draw(logits[rows], highest[rows], parameters.of(drawn))
    return tokens, highest


def _draw(logits: Tensor, highest: Tensor, parameters: RowParameters) -> Tensor:
    """Draw a token from each row [R, V] with its temperature and filters: [R]."""
    device = logits.device
    temperatures = upload(parameters.columns["temperature"].astype(np.float32), device)
    # Relative to the row's highest, which becomes 0: nothing overflows, and +inf is simply the highest.
    scores = (logits - highest.clamp(max=_LARGEST)[:, None]).clamp_(max=0).div_(temperatures[:, None])
    thresholds = _thresholds(scores, parameters)
    weights = scores.exp()
    if thresholds is not None:
        weights.masked_fill_(scores < thresholds[:, None], 0)
    numbers = upload(uniforms(parameters.columns["seed"], parameters.positions), device)
    return _inverse(weights, numbers)


def _inverse(weights: Tensor, numbers: Tensor) -> Tensor:
    """Find where the cumulative sum of `weights` [R, V] passes the fraction `numbers` [R] of the total: [R].

    Finds the run of tokens first, then the token in it: one sum per run instead of one per token.
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
    offset = _passed(within.cumsum(-1, dtype=torch.float64), targets - before)
    return (run * _RUN + offset)[:, 0].clamp_(max=vocabulary - 1)


def _passed(sums: Tensor, targets: Tensor) -> Tensor:
    """Return where ascending `sums` [R, n] pass `targets` [R, 1], never where nothing is added: [R, 1]."""
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)  # a target may be rounded up to the total
    return torch.minimum(torch.searchsorted(sums, targets, right=True), last)


def _thresholds(scores: Tensor, parameters: RowParameters) -> Tensor | None:
    """Return the least score that each row accepts [R], or None if no row filters.

    min_p applies to the whole distribution, top_k to the likeliest tokens, top_p to what those two leave.
    """
    requested_k, requested_p, min_p = (parameters.get(name) for name in ("top_k", "top_p", "min_p"))
    if requested_k is None and requested_p is None and min_p is None:
        return None
    rows, vocabulary = scores.shape
    top_p = np.ones(rows) if requested_p is None else requested_p.astype(np.float64)
    top_k = np.zeros(rows, np.int64) if requested_k is None else effective_top_k(requested_k, vocabulary)
    least = np.full(rows, -np.inf, np.float32) if min_p is None else least_scores(min_p)
    thresholds: Tensor = upload(least, scores.device)
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


def _top(scores: Tensor, least: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Raise the thresholds `least` [R] to those of top_k (0: off) and top_p (1: off)."""
    vocabulary, device = scores.shape[1], scores.device
    nucleus = bool((top_p < 1).any())
    # Candidates only on a CPU: to check whether they suffice, the host would wait for any other device.
    candidates = _CANDIDATES if device.type == "cpu" else vocabulary
    size = min(vocabulary, max(int(top_k.max()), candidates if nucleus else 0))
    best = scores.topk(size).values  # [R, size], descending
    kth = upload(np.maximum(top_k - 1, 0), device)[:, None]
    limited = upload(top_k > 0, device)
    least = torch.where(limited, torch.maximum(least, best.gather(1, kth)[:, 0]), least)
    if not nucleus:
        return least
    share = upload(top_p, device)[:, None]
    weights = scores.exp().masked_fill_(scores < least[:, None], 0)
    required = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    found, enough = _nucleus(best, least, required, is_exhaustive=size == vocabulary)
    while size < vocabulary:  # only on a CPU: elsewhere this would wait for the device
        lacking = (~enough & (share[:, 0] < 1)).nonzero()[:, 0]
        if not len(lacking):
            break
        size = min(vocabulary, 8 * size)
        best = scores[lacking].topk(size).values
        found[lacking], enough[lacking] = _nucleus(
            best, least[lacking], required[lacking], is_exhaustive=size == vocabulary
        )
    return torch.where(share[:, 0] < 1, found, least)


def _nucleus(best: Tensor, least: Tensor, required: Tensor, *, is_exhaustive: bool) -> tuple[Tensor, Tensor]:
    """Return the score where `best` [R, size] reach `required` [R, 1] weight, and whether they do: [R]."""
    sums = _masses(best, least)
    kept = (sums < required).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1)  # index of the last one
    # A row of NaN counts as enough: its comparisons are false, and more candidates would not help.
    enough = torch.full_like(least, is_exhaustive, dtype=torch.bool) | ~(sums[:, -1] < required[:, 0])
    return torch.maximum(least, best.gather(1, kept)[:, 0]), enough


def _masses(ranked: Tensor, least: Tensor) -> Tensor:
    """Return the weight of the first 1, 2, … scores of each row, without those below `least`: [R, size]."""
    return ranked.exp().masked_fill_(ranked < least[:, None], 0).cumsum(-1, dtype=torch.float64)


def without_forbidden(logits: Tensor, masks: TokenMasks) -> Tensor:
    """Return `logits` [S, V], float32, with −inf for the tokens that may not be chosen; for any device."""
    bits = upload(masks.bits.view(np.int32), logits.device)
    mask_of = upload(masks.rows, logits.device)
    if runs_our_kernels(logits.device):
        from fairlead.engine import device_sampling  # which needs Triton

        return device_sampling.without_forbidden(logits, bits, mask_of)
    places = torch.arange(WORD_BITS, device=logits.device)
    allowed = (bits[:, :, None] >> places & 1).bool().flatten(1)[:, : logits.shape[1]]
    allowed_of = torch.where(mask_of[:, None] >= 0, allowed[mask_of.clamp(min=0).long()], True)
    return logits.masked_fill(~allowed_of, float("-inf"))


def log_probabilities(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `logprobs.log_probabilities` does, on any device. `logits` [R, V] are overwritten."""
    logits = logits.clamp_(max=_LARGEST)
    total = logits.logsumexp(-1)
    chosen = logits.gather(1, ids[:, None])
    ranks = (logits >= chosen).sum(-1)
    top, top_ids = logits.topk(min(logits.shape[1], most))
    return chosen[:, 0] - total, ranks, top - total[:, None], top_ids
