"""Chooses the next token of every row of logits, in one pass for all; `draws` defines a draw.

On a CPU the compiled kernel chooses (`fairlead._cext.cpustep.choose`), row by row on all threads: for 32
draws of 151,936 tokens torch took 30 ms, and with top_p half a second. Elsewhere torch chooses. Promises that
a broken row fails only that row, and that nothing here waits for the device before `PendingPicks.wait`.
"""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead._cext import cpustep as kernel
from fairlead._cext.inputbatch import InputBatch
from fairlead.engine.inputs import upload
from fairlead.engine.logits import LogitAdjustments, Notes
from fairlead.engine.step import SampledTokens
from fairlead.engine.torch_sampler import GREEDY_BELOW, choose_by_torch, least_scores, uniforms
from fairlead.job import TokenLogprob

if TYPE_CHECKING:
    from typing_extensions import Buffer

THREADS_AT_MOST = 256  # the kernel's limit
_LEAST_LOGPROB = -9999.0  # for −inf, which JSON cannot express
_LARGEST = torch.finfo(torch.float32).max


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """How each of S rows is sampled; arrays [S]. `temperatures` None: all greedy; another one None: all off.

    Off means top_k ≤ 0, top_p 1, min_p 0, negative `logprobs`. `seeds` (uint64) and `positions` (of the token
    to choose) determine the draw. `changes` are applied first.
    """

    temperatures: np.ndarray | None
    top_k: np.ndarray | None
    top_p: np.ndarray | None
    min_p: np.ndarray | None
    logprobs: np.ndarray | None
    seeds: np.ndarray
    positions: np.ndarray
    changes: LogitAdjustments

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
        """Collect the parameters of the sequences in `slots` [S] from the columns that any sequence needs.

        `notes` of the steps before avoid counting all tokens again.
        """

        def column(values: "Buffer", needed: int) -> np.ndarray | None:
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
            changes=LogitAdjustments.gather(batch, slots, positions, eos_token_ids, vocab_size, notes),
        )

    def of(self, rows: np.ndarray) -> Self:
        """Return the parameters of some rows for drawing, without logit changes and log-probabilities."""

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
            changes=LogitAdjustments(),
        )


class PendingPicks:
    """Choices that the device may still be computing; `wait` fetches them.

    `tokens` [S], int64, stay on the device: the next step may begin with them.
    """

    def __init__(self, tokens: Tensor, highest: Tensor, logprobs: "_Logprobs | None") -> None:
        self.tokens = tokens
        self._logprobs = logprobs
        arriving = [tokens.int(), highest, *(logprobs.columns if logprobs else ())]
        # Queued now, after this step and before the next one; `wait` waits for this step's event only.
        self._arriving = [column.to("cpu", non_blocking=True) for column in arriving]
        self._arrived = torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None

    def wait(self) -> SampledTokens:
        """Return one id per row. NaN among the logits, or no token left to choose, is that row's error."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, highest, *columns = (column.numpy() for column in self._arriving)
        failed = np.flatnonzero(~(highest > -np.inf))
        tokens[failed] = -1
        errors = {row: _explain(highest[row]) for row in failed.tolist()}
        logprobs = self._logprobs.read(columns) if self._logprobs else {}
        for row in errors:
            logprobs.pop(row, None)
        return SampledTokens(tokens.data, logprobs, errors)


class _Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the `rows` that requested them; k is the most alternatives that one requested.

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
    """Choose the next token of each row of `logits` [S, V]. `latest` [S]: the one before it."""
    logits = logits.float()
    if not len(logits):  # a step of unfinished prompts only
        return PendingPicks(logits.new_empty(0, dtype=torch.int64), logits.new_empty(0), None)
    adjusted = parameters.changes.apply(logits, latest)
    by = choose_compiled if adjusted.device.type == "cpu" else choose_by_torch
    tokens, highest = by(adjusted, parameters)
    return PendingPicks(tokens, highest, _logprobs(logits, tokens, parameters.logprobs))


def choose_compiled(logits: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """Choose as `choose_by_torch` does, except for rounding; `logits` are on a CPU."""
    rows, vocabulary = logits.shape
    tokens, highest = np.empty(rows, np.int64), np.empty(rows, np.float32)
    temperatures, top_k, top_p = np.zeros(rows, np.float32), np.zeros(rows, np.int32), np.ones(rows)
    least, numbers = np.full(rows, -np.inf, np.float32), np.zeros(rows)
    if parameters.temperatures is not None:
        temperatures[:] = parameters.temperatures
        numbers = uniforms(parameters.seeds, parameters.positions)
        if parameters.top_k is not None:
            top_k[:] = parameters.top_k.clip(0, vocabulary)
        if parameters.top_p is not None:
            top_p[:] = parameters.top_p
        if parameters.min_p is not None:
            least = least_scores(parameters.min_p)
    kernel.choose(
        logits.contiguous().numpy(),
        temperatures,
        top_k,
        top_p,
        least,
        numbers,
        tokens,
        highest,
        greedy_below=GREEDY_BELOW,
        threads=min(torch.get_num_threads(), THREADS_AT_MOST),
    )
    return torch.from_numpy(tokens), torch.from_numpy(highest)


def _logprobs(logits: Tensor, tokens: Tensor, wanted: np.ndarray | None) -> _Logprobs | None:
    """Return the model's own log-probabilities, before temperature, penalties and biases."""
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
