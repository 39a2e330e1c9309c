"""The engine: sequences in, steps, tokens out. Knows token ids, not text; no torch, no clock, no socket.

A sequence's failure ends that sequence; a step's failure ends the sequences of that step. An ended sequence
frees its slot and blocks at once. The caller bounds the number of sequences (by seats).
"""

import os
from collections.abc import Callable, Collection
from collections.abc import Sequence as ReadOnlySequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fairlead._cext.inputbatch import Committed, InputBatch, Step
from fairlead.engine.admission import Predictor
from fairlead.engine.deadlines import Deadlines
from fairlead.engine.memory import Memory, longest
from fairlead.engine.output_details import OutputDetails, step_details
from fairlead.engine.request_validator import Prompt, RequestValidator
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import Sequence, SequenceStatus
from fairlead.engine.step import Outcome, Runner, SampledTokens
from fairlead.job import Sampling
from fairlead.messages import EngineStatistics, Output

CLOCK_GRAIN_S = 0.001  # less than this is not worth waiting for
STOPPED = 1  # the reason in `Committed.finished`; any other means the length limit
# The batch's parameters of a prompt to embed: it ends where its first token would be chosen.
ONE_TOKEN = Sampling(max_tokens=1, temperature=0)
# Bound on the logits of scored prompts that are in memory at once.
SCORED_BYTES = 32 * 1024 * 1024


class TrimmedCache(NamedTuple):
    """How many kept requests an idle engine evicted, and the ids of empty blocks by group, ascending."""

    evicted: int
    free: list[list[int]]


class Engine:
    """Continuous batching. Of the runner it uses only `overlaps` and `arenas`.

    `slots`: sequences that hold KV cache at a time; `max_batch`: sequences in one step; `max_model_len`:
    prompt + output tokens of one sequence, and `max_input_tokens` and `max_output_tokens` of each part.
    `blocks_total` and `windows`: blocks and sliding window of each KV cache group.

    With `prefix_cache`, blocks of ended sequences are kept for reuse. They are evicted, one request at a
    time, while more than `eviction_threshold` of the blocks or of `max_entries` tokens are in use: the least
    recently used request first, or with `first_in_first_out` the oldest. This is checked every
    `cleanup_interval_s`, whenever blocks are needed, and when more than `max_entries` tokens are kept. A
    sequence has at most `max_entries` tokens, too. `hash_key` (16 bytes, random by default) keeps clients
    from constructing prompts whose block hashes collide.

    With `embeds`, a sequence is only a prompt and ends with its vector (`SampledTokens.vectors`). All its
    tokens are computed, in chunks that do not depend on the rest of the batch; so neither does the vector.

    `draw_seed` makes the seed of a sequence without one; `predictor` estimates output lengths. A step is in
    flight between `plan` and its `commit` or `fail`: one, or two where the runner overlaps.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        slots: int,
        max_batch: int,
        max_batched_tokens: int,
        max_model_len: int,
        blocks_total: int | ReadOnlySequence[int],
        block_size: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        draw_seed: Callable[[], int],
        windows: ReadOnlySequence[int | None] = (None,),
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
        max_entries: int | None = None,
        eviction_threshold: float = 0.8,
        cleanup_interval_s: float = 1.0,
        first_in_first_out: bool = False,
        prefix_cache: bool = True,
        hash_key: bytes | None = None,
        predictor: Predictor | None = None,
        embeds: bool = False,
    ) -> None:
        blocks = (blocks_total,) if isinstance(blocks_total, int) else tuple(blocks_total)
        self._validator = RequestValidator(
            longest=min(max_model_len, longest(blocks, windows, block_size), max_entries or max_model_len),
            vocab_size=vocab_size,
            draw_seed=draw_seed,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
        )
        self._batch = InputBatch(
            slots=slots,
            max_batched_tokens=max_batched_tokens,
            max_model_len=self._validator.longest,
            block_size=block_size,
            vocab_size=vocab_size,
            windows=tuple(windows),
            eos_token_ids=tuple(eos_token_ids),
            arenas=runner.arenas,
        )
        self._memory = Memory(
            self._batch,
            blocks_total=blocks,
            windows=windows,
            block_size=block_size,
            max_batched_tokens=max_batched_tokens,
            hash_key=os.urandom(16) if hash_key is None else hash_key,
            max_entries=max_entries,
            threshold=eviction_threshold,
            first_in_first_out=first_in_first_out,
            prefix_cache=prefix_cache and not embeds,
        )
        self._scheduler = StepScheduler(
            self._batch,
            self._memory,
            slots=slots,
            max_batch=max_batch,
            max_batched_tokens=max_batched_tokens,
            predictor=predictor,
            even_chunks=embeds,
            most_scored=max(1, SCORED_BYTES // (4 * vocab_size)),
        )
        self._steps_at_once = 2 if runner.overlaps else 1
        self._vocab_size = vocab_size
        self._embeds = embeds
        self._cleanup_interval_s = cleanup_interval_s
        self._sequences: dict[int, Sequence] = {}
        self._early_outputs: dict[int, Output] = {}  # rejections and timeouts, for the next outcome
        self._untimed: list[Sequence] = []  # since the last plan; their time limits begin with the next one
        self._deadlines = Deadlines()
        self._cleanup_s: float | None = None
        self._is_trimmed = True  # nothing was cached since the last trim while idle
        self._under_way: list[Step] = []  # the oldest first
        self._steps = 0
        self._step_tokens = 0
        self._generated_tokens = 0

    # Public methods ----------------------------------------------------------------------------------

    @property
    def batch(self) -> InputBatch:
        """The batch that a runner launches steps from."""
        return self._batch

    def submit(
        self,
        key: int,
        prompt: Prompt,
        sampling: Sampling,
        *,
        priority: int = 1,
        timeout_s: float | None = None,
        salt: bytes = b"",
        embed: bool = False,
    ) -> None:
        """Queue a sequence behind those of its class (0 is served first).

        `prompt`: token ids, or a buffer of little-endian int32. `max_tokens` is cut to what fits after it.
        A prompt whose log-probabilities are requested is computed whole and is not cached. With `embed` the
        result is the prompt's vector, and `sampling` is ignored. After `timeout_s`, counted from the next
        plan, the sequence ends in any state. Sequences with different `salt` never share blocks. A sequence
        that can never run fails alone: the next outcome has the error.
        """
        assert key not in self._sequences
        assert key not in self._early_outputs
        try:
            if embed != self._embeds:
                raise ValueError(f"this model makes {'vectors, no text' if self._embeds else 'no vectors'}")
            tokens = self._validator.accept(key, prompt, ONE_TOKEN if embed else sampling)
        except (ValueError, TypeError, OverflowError) as error:
            self._early_outputs[key] = Output(key, [], error=str(error))
            return
        is_scored = sampling.prompt_logprobs is not None and not embed
        hashes = None if is_scored else self._memory.new_hashes(salt)
        sequence = Sequence(tokens, priority=priority, timeout_s=timeout_s, hashes=hashes)
        sequence.scored = 1 if is_scored else None
        self._sequences[key] = sequence
        self._scheduler.submit(sequence)
        if timeout_s is not None:
            self._untimed.append(sequence)

    def abort(self, key: int) -> None:
        """End a sequence without any output for it. One that has ended is ignored.

        Its slot and blocks are free at once; its results of a step in flight are dropped.
        """
        self._early_outputs.pop(key, None)
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.become(SequenceStatus.CANCELLED)
            self._scheduler.remove(sequence)
            self._scheduler.cached.pop(key, None)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were computed again because their sequence was preempted."""
        return self._scheduler.recomputed_tokens

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing to report until the next `submit`."""
        return not self._sequences and not self._early_outputs and not self._under_way

    def wait_s(self, now_s: float) -> float | None:
        """Return how long to wait for a message before the next `plan`; None: until one arrives.

        An idle engine still has to trim its cache once, when that is due.
        """
        if not self.idle:
            return 0.0
        if self._is_trimmed or self._cleanup_s is None:
            return None
        left_s = self._cleanup_s + self._cleanup_interval_s - now_s
        return left_s if left_s > CLOCK_GRAIN_S else 0.0

    def trim_if_due(self, now_s: float) -> TrimmedCache | None:
        """Trim the cache of an idle engine, if that is due."""
        if not self.idle or self.wait_s(now_s) != 0.0:
            return None
        self._cleanup_s, self._is_trimmed = now_s, True
        return TrimmedCache(self._memory.trim(), self._memory.free_ids())

    def statistics(self) -> EngineStatistics:
        """Return current counts, and totals since the start. Blocks are those of the first group."""
        scheduler, pool = self._scheduler, self._memory.pools[0]
        return EngineStatistics(
            running=scheduler.running,
            pending=scheduler.pending,
            slots_free=scheduler.slots_free,
            blocks_free=pool.available,
            blocks_total=pool.total,
            steps=self._steps,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            cached_tokens=pool.statistics().cached_tokens,
            cache_usage=(pool.total - pool.available) / pool.total,
            step_tokens=self._step_tokens,
        )

    # Steps -------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> Step | None:
        """Begin a step and return its work, or None, with no step begun, if there is none.

        Also ends sequences that are out of time and trims the cache if that is due.
        """
        assert len(self._under_way) < self._steps_at_once
        self._apply_time_limits(now_s)
        step = self._scheduler.plan()
        if step is not None:
            self._is_trimmed = False
            self._under_way.append(step)
        return step

    def commit(self, step: Step, sampled: SampledTokens) -> Outcome:
        """End the oldest step in flight with its results."""
        self._under_way.remove(step)
        self._steps += 1
        self._step_tokens += step.tokens
        committed = self._batch.commit_tokens(step, sampled.token_ids)
        outputs = self._take_early_outputs()
        for slot, sample in committed.failed:
            outputs.append(self._fail(self._running_in(slot), self._failure_reason(sampled, sample)))
        self._scheduler.indexed(committed.filled)
        keys: npt.NDArray[np.int64] = np.asarray(committed.keys)
        tokens: npt.NDArray[np.int32] = np.asarray(committed.tokens)
        if self._embeds:
            return Outcome(b"", b"", outputs + self._embedded(sampled, committed))
        self._generated_tokens += len(keys)
        details_of = step_details(step, sampled, committed, self._scheduler, self._sequences)
        separate = list({index for _, _, index in committed.finished} | details_of.of_tokens.keys())
        for slot, reason, index in committed.finished:
            details = details_of.of_tokens.pop(index, None) or OutputDetails()
            outputs.append(self._complete(self._running_in(slot), int(tokens[index]), reason, details))
        for index, details in details_of.of_tokens.items():
            outputs.append(self._output(int(keys[index]), [int(tokens[index])], details))
        for key, details in details_of.of_prompts.items():
            outputs.append(self._output(key, [], details))
        if separate:
            keys, tokens = np.delete(keys, separate), np.delete(tokens, separate)
        return Outcome(keys.tobytes(), tokens.tobytes(), outputs)

    def fail(self, step: Step, reason: str) -> Outcome:
        """End a failed step: its sequences fail, the others continue."""
        self._under_way.remove(step)
        outputs = self._take_early_outputs()
        for slot in self._batch.cancel_step(step):
            outputs.append(self._fail(self._running_in(slot), reason))
        return Outcome(b"", b"", outputs)

    def take_outcome(self) -> Outcome:
        """Return what to report without a step: rejections and timeouts."""
        return Outcome(b"", b"", self._take_early_outputs())

    # Helpers: a step ---------------------------------------------------------------------------------

    def _embedded(self, sampled: SampledTokens, committed: Committed) -> list[Output]:
        """End the sequences whose last token was computed, each with its vector."""
        outputs = []
        for slot, _, index in committed.finished:
            sequence = self._running_in(slot)
            self._end(sequence, SequenceStatus.COMPLETED, keep=False)
            vector = sampled.vectors[committed.samples[index]]
            outputs.append(Output(sequence.key, [], finish_reason="stop", vector=vector))
        return outputs

    def _failure_reason(self, sampled: SampledTokens, sample: int) -> str:
        if sample in sampled.errors:
            return sampled.errors[sample]
        token_id = np.asarray(sampled.token_ids)[sample]
        return f"the model picked token id {token_id}, outside 0…{self._vocab_size - 1}"

    def _running_in(self, slot: int) -> Sequence:
        sequence = self._scheduler.running_in(slot)
        assert sequence is not None
        return sequence

    # Helpers: sequences ------------------------------------------------------------------------------

    def _take_early_outputs(self) -> list[Output]:
        outputs = list(self._early_outputs.values())
        self._early_outputs.clear()
        return outputs

    def _apply_time_limits(self, now_s: float) -> None:
        """End sequences that are out of time, and trim the cache if that is due."""
        for sequence in self._untimed:
            if sequence.key in self._sequences and sequence.timeout_s is not None:
                self._deadlines.add(sequence.key, now_s + sequence.timeout_s)
        self._untimed.clear()
        for key in self._deadlines.passed(now_s):
            if key in self._sequences:
                self._early_outputs[key] = self._time_out(self._sequences[key])
        self._deadlines.forget_all_but(self._sequences, len(self._sequences))
        if self._cleanup_s is None or now_s - self._cleanup_s >= self._cleanup_interval_s:
            self._cleanup_s = now_s
            self._memory.trim()

    def _complete(self, sequence: Sequence, token_id: int, reason: int, details: OutputDetails) -> Output:
        if details.error is not None:
            return self._fail(sequence, details.error)
        self._scheduler.admission.predictor.learn(sequence.tokens.output_length)
        self._end(sequence, SequenceStatus.COMPLETED)
        if reason == STOPPED:
            return details.output(sequence.key, [token_id], "stop", token_id)
        return details.output(sequence.key, [token_id], "length")

    def _output(self, key: int, token_ids: list[int], details: OutputDetails) -> Output:
        if details.error is not None:
            return self._fail(self._sequences[key], details.error)
        return details.output(key, token_ids)

    def _time_out(self, sequence: Sequence) -> Output:
        self._end(sequence, SequenceStatus.TIMEOUT)
        reason = f"the request took longer than {sequence.timeout_s:g} s"
        return Output(sequence.key, [], error=reason, code="request_timeout")

    def _fail(self, sequence: Sequence, reason: str) -> Output:
        """Fail a sequence. Its blocks are not cached, because they may contain the cause of the failure."""
        self._end(sequence, SequenceStatus.FAILED, keep=False)
        return Output(sequence.key, [], error=reason)

    def _end(self, sequence: Sequence, final: SequenceStatus, *, keep: bool = True) -> None:
        sequence.become(final)
        del self._sequences[sequence.key]
        self._scheduler.remove(sequence, keep=keep)
        self._scheduler.cached.pop(sequence.key, None)
