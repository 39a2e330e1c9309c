"""Chooses the next token of every row of logits, in one pass for all; `torch_sampler` defines a draw.

On a CPU the compiled kernel chooses (`fairlead._cext.cpustep.choose`), row by row on all threads: for 32
draws from 151,936 tokens torch took 30 ms, and with top_p half a second. Elsewhere torch chooses. Guarantees
that a broken row fails only that row, and that nothing here waits for the device before
`PendingSamples.wait`. Imports torch only for logits that are its tensors.
"""

import math
from collections.abc import Collection

import msgspec
import numpy as np

from fairlead._cext import cpustep as kernel
from fairlead._cext.inputbatch import InputBatch
from fairlead.base.job import TokenLogprob
from fairlead.engine.arrays import Array, Arriving, device_of, upload
from fairlead.engine.sampling import logits_processors
from fairlead.engine.sampling.logits_processors import LogitsProcessor, SampledRows
from fairlead.engine.sampling.logprobs import LEAST_LOGPROB, log_probabilities
from fairlead.engine.sampling.parameters import BatchUpdate, SamplingColumns
from fairlead.engine.sampling.row_parameters import (
    GREEDY_BELOW,
    RowParameters,
    effective_top_k,
    least_scores,
    uniforms,
)
from fairlead.engine.sampling.token_masks import ConstrainedSequences, TokenMasks
from fairlead.engine.step import SampledTokens
from fairlead.engine.threads import get_threads


class Sampler:
    """Samples the rows of one batch's steps. Has the parameters' columns and the logits processors' state.

    `vocab_size` is the width of the logits. The steps must be sampled in their order.
    """

    def __init__(self, batch: InputBatch, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.batch = batch
        self.columns = SamplingColumns(batch.slots)
        self._processors = [
            processor(self.columns, vocab_size, eos_token_ids)
            for processor in logits_processors.LOGITS_PROCESSORS
        ]
        self._constrained = ConstrainedSequences(vocab_size)
        self._always = any(processor.always for processor in self._processors)
        self._version = 0  # of the batch, at the latest update

    def update_state(self) -> BatchUpdate | None:
        """Read which sequences joined and left the batch, and return them; `sample` calls it."""
        changes = self.batch.changes(self._version)
        if changes.version == self._version:
            return None
        self._version = changes.version
        update = BatchUpdate(changes.removed, [(slot, self.batch.state(slot)) for slot in changes.added])
        self.columns.update_state(update)
        self._constrained.update_state(update)
        for processor in self._processors:
            processor.update_state(update)
        return update

    @property
    def constrains(self) -> bool:
        """Whether any sequence in the batch has a constraint. Call `update_state` first."""
        return len(self._constrained) > 0

    def process(self, logits: Array, rows: SampledRows) -> Array:
        """Return `logits` [S, V], float32, as the logits processors change them; `logits` is not modified."""
        needed = [processor for processor in self._processors if processor.applies_to(rows)]
        if not needed:
            return logits
        on_host = isinstance(logits, np.ndarray)
        processed = logits.copy() if on_host else logits.clone()
        with np.errstate(all="ignore"):  # NaN fails its row later
            for processor in needed:
                if on_host and not processor.takes_arrays:
                    _apply_to_tensors(processor, processed, rows)
                else:
                    processor.apply(processed, rows)
        return processed

    def parameters(self, rows: SampledRows) -> RowParameters:
        """Return the parameters that the rows are drawn with."""
        return RowParameters(self.columns.gather(rows.slots), rows.positions)

    def sample(self, logits: Array, rows: SampledRows, *, processes_logits: bool = True) -> "PendingSamples":
        """Choose the next token of each row of `logits` [S, V].

        Without `processes_logits` (`Step.processes_logits`) only processors that always apply are needed.
        """
        self.update_state()
        if not isinstance(logits, np.ndarray):
            logits = logits.float()
        processed = self.process(logits, rows) if processes_logits or self._always else logits
        return choose(logits, processed, self.parameters(rows), self._constrained.masks(rows))


class PendingSamples:
    """Choices that the device may still be computing; `wait` fetches them.

    `tokens` [S], int64, stay on the device: the next step may begin with them. `explained`: why rows have no
    token left, where that is known. `complete`: rows that need none.
    """

    def __init__(
        self,
        tokens: Array,
        highest: Array,
        logprobs: "_Logprobs | None",
        explained: dict[int, str] | None = None,
        complete: frozenset[int] = frozenset(),
    ) -> None:
        self.tokens = tokens
        self._logprobs = logprobs
        self._explained = explained or {}
        self._complete = complete
        ids = tokens.astype(np.int32) if isinstance(tokens, np.ndarray) else tokens.int()
        # Queued now, after this step and before the next one; `wait` waits for this step's event only.
        self._arriving = Arriving([ids, highest, *(logprobs.columns if logprobs else ())])

    def wait_for_tokens(self) -> np.ndarray:
        """Return the chosen ids [S] as soon as the device has them."""
        return self._arriving.wait()[0]

    def wait(self) -> SampledTokens:
        """Return one id per row. NaN among the logits, or no token left to choose, is that row's error."""
        tokens, highest, *columns = self._arriving.wait()
        failed = np.flatnonzero(~(highest > -np.inf))
        tokens[failed] = -1
        without_token = failed.tolist()
        errors = {
            row: self._explained.get(row) or _explain(highest[row])
            for row in without_token
            if row not in self._complete
        }
        logprobs = self._logprobs.read(columns) if self._logprobs else {}
        for row in without_token:
            logprobs.pop(row, None)
        return SampledTokens(tokens.data, logprobs, errors, complete=self._complete)


class _Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the `rows` that requested them; k is the largest number in `requested`.

    `columns`: chosen ids and their log-probabilities [R], likeliest log-probabilities and ids [R, k].
    """

    rows: list[int]
    requested: list[int]
    columns: tuple[Array, Array, Array, Array]

    def read(self, columns: list[np.ndarray]) -> dict[int, TokenLogprob]:
        found = {}
        for row, k, token, logprob, top, top_ids in zip(
            self.rows, self.requested, *(column.tolist() for column in columns), strict=True
        ):
            best = tuple(zip(top_ids[:k], top[:k], strict=True))
            found[row] = TokenLogprob(token, logprob, best)
        return found


def choose(
    logits: Array, processed: Array, parameters: RowParameters, masks: TokenMasks | None = None
) -> PendingSamples:
    """Choose a token of each row of `processed` [S, V] within `masks`; log-probabilities are of `logits`."""
    device = device_of(processed)
    if not len(logits):  # a step of unfinished prompts only
        nothing = upload(np.empty(0, np.int64), device), upload(np.empty(0, np.float32), device)
        return PendingSamples(*nothing, None)
    tokens: Array
    highest: Array
    if device is None or device.type == "cpu":
        array = processed if device is None else processed.contiguous().numpy()
        tokens, highest = (upload(found, device) for found in choose_compiled(array, parameters, masks))
    else:
        from fairlead.engine.sampling.torch_sampler import choose_by_torch, without_forbidden

        allowed = processed if masks is None else without_forbidden(processed, masks)
        tokens, highest = choose_by_torch(allowed, parameters)
    logprobs = _logprobs(logits, tokens, parameters.get("logprobs"))
    if masks is None:
        return PendingSamples(tokens, highest, logprobs)
    return PendingSamples(tokens, highest, logprobs, masks.errors, masks.complete)


def choose_compiled(
    logits: np.ndarray, parameters: RowParameters, masks: TokenMasks | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Choose as `torch_sampler.choose_by_torch` does, except for rounding."""
    rows, vocabulary = logits.shape
    tokens, highest = np.empty(rows, np.int64), np.empty(rows, np.float32)
    temperatures, top_k, top_p = np.zeros(rows, np.float32), np.zeros(rows, np.int32), np.ones(rows)
    least, numbers = np.full(rows, -np.inf, np.float32), np.zeros(rows)
    if (requested := parameters.get("temperature")) is not None:
        temperatures[:] = requested
        numbers = uniforms(parameters.columns["seed"], parameters.positions)
        if (requested := parameters.get("top_k")) is not None:
            top_k[:] = effective_top_k(requested, vocabulary)
        if (requested := parameters.get("top_p")) is not None:
            top_p[:] = requested
        if (requested := parameters.get("min_p")) is not None:
            least = least_scores(requested)
    kernel.choose(
        logits,
        temperatures,
        top_k,
        top_p,
        least,
        numbers,
        tokens,
        highest,
        greedy_below=GREEDY_BELOW,
        threads=get_threads(),
        masks=None if masks is None else masks.bits,
        mask_rows=None if masks is None else masks.rows,
    )
    return tokens, highest


def _logprobs(logits: Array, tokens: Array, requested: np.ndarray | None) -> _Logprobs | None:
    """Return the model's own log-probabilities, before temperature, penalties and biases."""
    if requested is None or not (requested >= 0).any():
        return None
    listed = np.flatnonzero(requested >= 0)
    most = requested[listed].clip(max=logits.shape[1]).tolist()
    rows = upload(listed, device_of(logits))
    chosen_ids = tokens[rows]
    chosen, _, top, top_ids = log_probabilities(logits[rows], chosen_ids, max(most))
    columns = chosen_ids, chosen.clip(LEAST_LOGPROB), top.clip(LEAST_LOGPROB), top_ids
    return _Logprobs(listed.tolist(), most, columns)


def _apply_to_tensors(processor: LogitsProcessor, logits: np.ndarray, rows: SampledRows) -> None:
    """Let a processor that is written in torch change `logits`, which a tensor shares."""
    import torch

    latest = rows.latest
    if isinstance(latest, np.ndarray):
        rows = rows._replace(latest=torch.from_numpy(latest))
    with torch.inference_mode():
        processor.apply(torch.from_numpy(logits), rows)


def _explain(highest: float) -> str:
    if math.isnan(highest):
        return "the model's logits are not numbers (NaN)"
    return "no token is left to choose: every one is ruled out"
