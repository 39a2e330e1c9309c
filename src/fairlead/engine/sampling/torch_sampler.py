"""Sampling in torch, on any device; also the test oracle of the kernel that samples on a CPU.

A draw's random number depends only on the sequence's seed and the token's position, so the rest of the batch
cannot change it. The draw inverts the cumulative distribution in vocabulary order. top_k, top_p and min_p
are all thresholds on a row's scores, so only finding them needs sorting. Equally likely tokens are kept or
dropped together. Does not wait for the device.
"""

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fairlead.engine.devices import runs_our_kernels
from fairlead.engine.inputs import upload

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy, because dividing by them overflows."""
_CANDIDATES = 1024  # enough for top_p in most rows, and far cheaper than sorting a vocabulary
_RUN = 128  # tokens per partial sum in the search for a draw's place
_LARGEST = torch.finfo(torch.float32).max


class RowParameters(msgspec.Struct, frozen=True):
    """The parameters that S rows are drawn with.

    `columns`: arrays [S] by parameter; one that is absent is off in all rows. `seed` (uint64) and `positions`
    (of the token to choose) determine the draw.
    """

    columns: dict[str, np.ndarray]
    positions: np.ndarray

    def get(self, name: str) -> np.ndarray | None:
        """Return a parameter's values [S]; None if it is off in all rows."""
        return self.columns.get(name)

    def of(self, rows: np.ndarray) -> "RowParameters":
        """Return the parameters of some rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return RowParameters(columns, self.positions[rows])


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


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a float64 in [0, 1) of 48 bits for each (seed, position): splitmix64 used as a hash."""
    state = _mix(seeds.astype(np.uint64))
    state = _mix(state + positions.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15))
    return np.asarray((state >> np.uint64(16)).astype(np.float64) * 2.0**-48)


def _mix(state: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, one to one, so that results of neighbors are unrelated."""
    state = state + np.uint64(0x9E37_79B9_7F4A_7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


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


def effective_top_k(top_k: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the numbers of tokens to keep [R], int64; 0 where all are kept."""
    return np.where((top_k > 0) & (top_k < vocabulary), top_k, 0).astype(np.int64)


def least_scores(min_p: np.ndarray) -> np.ndarray:
    """Return the scores [R], float32, of tokens that are `min_p` times as likely as the likeliest."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(min_p.astype(np.float64)).astype(np.float32))


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
