"""Chooses the next token of every row of logits, in one pass for all.

A draw is made from a number that depends only on the sequence's seed and the token's position, by the
inverse of the distribution's sum in vocabulary order: what shares the batch cannot change it. top_k,
top_p and min_p are all thresholds on a row's logits, so only finding them ever sorts; tokens that are
equally likely stay or go together. Promises that a broken row harms that row alone, and that nothing
here waits for the device before `PendingPicks.wait`.
"""

import math
from collections.abc import Collection
from typing import Self

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from typing_extensions import Buffer

from fairlead._cext.inputbatch import InputBatch
from fairlead.engine.inputs import upload
from fairlead.engine.logits import Changes, Notes
from fairlead.engine.step import Picks
from fairlead.job import TokenLogprob

_GREEDY_BELOW = 1e-5  # temperatures; dividing by less overflows what it should sharpen
_CANDIDATES = 1024  # enough for top_p in most rows, and far cheaper than sorting a vocabulary
_RUN = 128  # tokens that are added up before the place of a draw is looked for among them
_LEAST_LOGPROB = -9999.0  # for −inf, which JSON cannot say
_LARGEST = torch.finfo(torch.float32).max


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """How each of S rows is sampled; arrays [S]. `temperatures` None: all greedy; another one None: all off.

    Off is a top_k of 0 or less, a top_p of 1, a min_p of 0, fewer `logprobs` than 0. `seeds` (uint64) and
    `positions` (of the token to choose) fix the draw. `changes` come before everything.
    """

    temperatures: np.ndarray | None
    top_k: np.ndarray | None
    top_p: np.ndarray | None
    min_p: np.ndarray | None
    logprobs: np.ndarray | None
    seeds: np.ndarray
    positions: np.ndarray
    changes: Changes

    @classmethod
    def gather(
        cls,
        batch: InputBatch,
        slots: np.ndarray,
        positions: np.ndarray,
        eos_token_ids: Collection[int],
        vocab_size: int,
        notes: Notes | None = None,
    ) -> Self:
        """Collect the parameters of the sequences in `slots` [S] from the columns that anybody needs.

        `notes` of the steps before save counting all tokens again.
        """

        def column(values: Buffer, needed: int) -> np.ndarray | None:
            return np.asarray(values)[slots] if needed else None

        counters = batch.counters
        return cls(
            temperatures=column(batch.temperature, counters.sampled),
            top_k=column(batch.top_k, counters.top_k),
            top_p=column(batch.top_p, counters.top_p),
            min_p=column(batch.min_p, counters.min_p),
            logprobs=column(batch.logprobs, counters.logprobs),
            seeds=np.asarray(batch.seed)[slots],
            positions=positions,
            changes=Changes.gather(batch, slots, positions, eos_token_ids, vocab_size, notes),
        )

    def of(self, rows: np.ndarray) -> Self:
        """The same of some rows, for drawing: without what was done before and comes after."""

        def some(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[rows]

        return msgspec.structs.replace(
            self,
            temperatures=some(self.temperatures),
            top_k=some(self.top_k),
            top_p=some(self.top_p),
            min_p=some(self.min_p),
            seeds=self.seeds[rows],
            positions=self.positions[rows],
            logprobs=None,
            changes=Changes(),
        )


class PendingPicks:
    """Choices that may still be under way on the device; `wait` brings them over.

    `tokens` [S], int64, stay on the device: the next step may begin with them.
    """

    def __init__(self, tokens: Tensor, highest: Tensor, logprobs: "_Logprobs | None") -> None:
        self.tokens = tokens
        self._logprobs = logprobs
        arriving = [tokens.int(), highest, *(logprobs.columns if logprobs else ())]
        # Sent off now, behind this step and before the next one; `wait` looks at this step's event only.
        self._arriving = [column.to("cpu", non_blocking=True) for column in arriving]
        self._arrived = torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None

    def wait(self) -> Picks:
        """One id a row. NaN among the logits, or nothing left to choose, is that row's error."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, highest, *columns = (column.numpy() for column in self._arriving)
        failed = np.flatnonzero(~(highest > -np.inf))
        tokens[failed] = -1
        errors = {row: _explain(highest[row]) for row in failed.tolist()}
        logprobs = self._logprobs.read(columns) if self._logprobs else {}
        for row in errors:
            logprobs.pop(row, None)
        return Picks(tokens.data, logprobs, errors)


class _Logprobs(msgspec.Struct, frozen=True):
    """Of those `rows` that asked: the chosen tokens', and the likeliest ones as far as any of them asked.

    `columns`: chosen ids and their log-probabilities [R], likeliest log-probabilities and ids [R, k].
    """

    rows: list[int]
    wanted: list[int]
    columns: tuple[Tensor, Tensor, Tensor, Tensor]

    def read(self, columns: list[np.ndarray]) -> dict[int, TokenLogprob]:
        found = {}
        for row, k, token, logprob, top, top_ids in zip(
            self.rows, self.wanted, *(column.tolist() for column in columns), strict=True
        ):
            best = tuple(zip(top_ids[:k], top[:k], strict=True))
            found[row] = TokenLogprob(token, logprob, best)
        return found


def choose(logits: Tensor, parameters: Parameters, latest: Tensor) -> PendingPicks:
    """Choose the token that each row of `logits` [S, V] goes on with. `latest` [S]: the one before it."""
    logits = logits.float()
    if not len(logits):  # a step of prompts that go on: only its end is of interest
        return PendingPicks(logits.new_empty(0, dtype=torch.int64), logits.new_empty(0), None)
    adjusted = parameters.changes.apply(logits, latest)
    highest, tokens = _highest(adjusted)
    if parameters.temperatures is not None:
        drawn = np.flatnonzero(parameters.temperatures >= _GREEDY_BELOW)
        if len(drawn) == len(logits):
            tokens = _draw(adjusted, highest, parameters)
        elif len(drawn):
            rows = upload(drawn, logits.device)
            tokens[rows] = _draw(adjusted[rows], highest[rows], parameters.of(drawn))
    return PendingPicks(tokens, highest, _logprobs(logits, tokens, parameters.logprobs))


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of each row [S, V] and its place, [S] each; NaN counts as highest.

    On a CPU numpy is asked: 0.2 ms for 32 rows of 49,152, for which torch takes 0.9 ms.
    """
    if logits.device.type != "cpu":
        highest, tokens = logits.max(-1)
        return highest, tokens
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(1, tokens[:, None])[:, 0], tokens


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


def _draw(logits: Tensor, highest: Tensor, parameters: Parameters) -> Tensor:
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


def _thresholds(scores: Tensor, parameters: Parameters) -> Tensor | None:
    """The least score that each row still accepts [R], or None if no row filters.

    min_p looks at the whole distribution, top_k at what is likeliest, top_p at what those two left.
    """
    if parameters.min_p is None and parameters.top_k is None and parameters.top_p is None:
        return None
    rows, vocabulary = scores.shape
    min_p = np.zeros(rows) if parameters.min_p is None else parameters.min_p.astype(np.float64)
    top_p = np.ones(rows) if parameters.top_p is None else parameters.top_p.astype(np.float64)
    top_k = np.zeros(rows, np.int64) if parameters.top_k is None else parameters.top_k.astype(np.int64)
    top_k = top_k.clip(0, vocabulary)
    with np.errstate(divide="ignore", invalid="ignore"):
        thresholds = upload(np.log(min_p).astype(np.float32), scores.device)
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


def _logprobs(logits: Tensor, tokens: Tensor, wanted: np.ndarray | None) -> _Logprobs | None:
    """Log-probabilities by the model itself, before temperature, penalties and biases."""
    if wanted is None or not (wanted >= 0).any():
        return None
    asked = np.flatnonzero(wanted >= 0)
    most = wanted[asked].clip(max=logits.shape[1]).tolist()
    rows = upload(asked, logits.device)
    of_asked = logits[rows].clamp_(max=_LARGEST).log_softmax(-1)
    of_asked.clamp_(min=_LEAST_LOGPROB)
    chosen_ids = tokens[rows]
    chosen = of_asked.gather(1, chosen_ids[:, None])[:, 0]
    top, top_ids = of_asked.topk(max(most))
    return _Logprobs(asked.tolist(), most, (chosen_ids, chosen, top, top_ids))


def _explain(highest: float) -> str:
    if math.isnan(highest):
        return "the model's logits are not numbers (NaN)"
    return "no token is left to choose: every one is ruled out"
