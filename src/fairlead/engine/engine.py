"""The engine: sequences in, steps, tokens out. Uses no text, torch, clock or socket.

A sequence's failure ends that sequence; a step's failure ends the sequences of that step. An ended sequence
frees its slot and blocks at once. The caller bounds the number of sequences (by seats).
"""

import os
from collections.abc import Callable, Collection
from collections.abc import Sequence as ReadOnlySequence

import numpy as np
import numpy.typing as npt

from fairlead._cext.inputbatch import Committed, InputBatch, Step
from fairlead.base.job import Sampling
from fairlead.base.messages import EngineStatistics, Output, Speculation
from fairlead.engine.admission import Predictor
from fairlead.engine.cache_trimming import CacheTrimming, TrimmedCache
from fairlead.engine.live_sequences import LiveSequences
from fairlead.engine.memory import Memory, longest
from fairlead.engine.output_details import NO_DETAILS, TokensOf, step_details
from fairlead.engine.request_validator import Prompt, RequestValidator, UnknownToken
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import Sequence, SequenceStatus
from fairlead.engine.slow_masks import SlowMasks
from fairlead.engine.step import Outcome, Runner, SampledTokens
from fairlead.language.structured.compiler import GrammarCompiler

# The batch's parameters of a prompt to embed: it ends where its first token would be chosen.
ONE_TOKEN = Sampling(max_tokens=1, temperature=0)
# How often grammars and masks are checked while nothing else is under way.
FINDING_POLL_S = 0.0005
# Bound on the logits of scored prompts that are in memory at once.
SCORED_BYTES = 32 * 1024 * 1024


class Engine:
    """Continuous batching. Reads `overlaps`, `arenas`, `samples_several` and `columns` of the runner.

    `slots`: sequences that hold KV cache at a time; `max_batch`: sequences in one step; `max_model_len`:
    prompt + output tokens of one sequence, and `max_input_tokens` and `max_output_tokens` of each part.
    `blocks_total` and `windows`: blocks and sliding window of each KV cache group.

    With `prefix_cache`, blocks of ended sequences are kept for reuse, and blocks that slid out of the window
    of a running one. They are evicted, one request or one such block at a time, while more than
    `eviction_threshold` of the blocks or of `max_entries` tokens are in use: the least recently used request
    first, or with `first_in_first_out` the oldest. This is checked every `cleanup_interval_s`, whenever
    blocks are needed, and when more than `max_entries` tokens are kept. A sequence has at most `max_entries`
    tokens, too. `hash_key` (16 bytes, random by default) keeps clients from constructing prompts with
    colliding block hashes.

    With `embeds`, a sequence is only a prompt and ends with its vector (`SampledTokens.vectors`). All its
    tokens are computed, in chunks that do not depend on the rest of the batch, so that its vector does not
    either.

    `draw_seed` makes the seed of a sequence without one; `predictor` estimates output lengths; `compiler`
    compiles grammars, None: sequences with one are refused; `slow_masks` keeps masks that take long out of
    steps; `speculation` adds drafts to steps. A step is in flight between
    `plan` and its `commit` or `fail`: one, or two where the runner overlaps.
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
        compiler: GrammarCompiler | None = None,
        slow_masks: SlowMasks | None = None,
        speculation: Speculation | None = None,
        target_step_s: float | None = None,
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
            most_drafts=0 if speculation is None else speculation.drafts,
            one_sample_a_row=not runner.samples_several,
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
        if slow_masks is None and compiler is not None:
            slow_masks = SlowMasks()
        self._scheduler = StepScheduler(
            self._batch,
            self._memory,
            slots=slots,
            max_batch=max_batch,
            max_batched_tokens=max_batched_tokens,
            predictor=predictor,
            even_chunks=embeds,
            most_scored=max(1, SCORED_BYTES // (4 * vocab_size)),
            slow_masks=slow_masks,
            speculation=speculation,
            target_step_s=target_step_s,
        )
        self._steps_at_once = 2 if runner.overlaps else 1
        self._vocab_size = vocab_size
        self._columns = runner.columns
        self._embeds = embeds
        self._compiler = compiler
        self._live = LiveSequences(self._scheduler, compiler, slow_masks)
        self._trimming = CacheTrimming(self._memory, cleanup_interval_s)
        self._under_way: list[Step] = []  # the oldest first
        self._has_no_work = False  # in the latest plan
        self._steps = 0
        self._step_tokens = 0
        self._generated_tokens = 0
        self._draft_tokens = 0
        self._accepted_tokens = 0

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
        embeddings: "npt.NDArray[np.float32] | None" = None,
        tenant: int = 0,
    ) -> None:
        """Queue a sequence behind those of its class (0 is served first).

        `prompt`: token ids, or a buffer of little-endian int32. `max_tokens` is cut to what fits after it.
        A prompt is computed whole and not cached if its log-probabilities are requested. With `embed` the
        result is the prompt's vector, and `sampling` is ignored. `embeddings` [prompt tokens, C]: what the
        network gets in place of the embeddings of the prompt's tokens, scaled as these are. Its ids count as
        in penalties, and it is not cached. After `timeout_s`, counted from the next plan, the sequence ends
        in any state. Sequences with different `salt` never share blocks. Steps divide the tokens of prompts
        among tenants. A sequence that can never run fails alone: the next outcome has the error.
        """
        assert key not in self._live
        self._has_no_work = False
        try:
            if embed != self._embeds:
                raise ValueError(f"this model makes {'vectors, no text' if self._embeds else 'no vectors'}")
            if sampling.grammar is not None and self._compiler is None:
                raise ValueError("this model cannot be constrained by a grammar")
            tokens = self._validator.accept(
                key, prompt, ONE_TOKEN if embed else sampling, self._checked_column("embeddings", embeddings)
            )
        except (ValueError, TypeError, OverflowError) as error:
            self._live.refuse(key, str(error), error.param if isinstance(error, UnknownToken) else None)
            return
        is_scored = sampling.prompt_logprobs is not None and not embed
        hashes = None if is_scored or embeddings is not None else self._memory.new_hashes(salt)
        grammar = None if embed else sampling.grammar
        state = SequenceStatus.PENDING if grammar is None else SequenceStatus.COMPILING
        sequence = Sequence(
            tokens, priority=priority, timeout_s=timeout_s, hashes=hashes, state=state, tenant=tenant
        )
        sequence.scored = 1 if is_scored else None
        sequence.constraint = None if embed else tokens.sampling.constraint
        self._live.add(sequence, grammar=grammar, owner=salt, grammar_bytes=sampling.grammar_bytes)

    def prepare(self, key: int, grammar: str, *, salt: bytes = b"", grammar_bytes: int = 0) -> None:
        """Compile a grammar for sequences to come, which will have this `salt`.

        `grammar_bytes` is as in `Sampling`. An outcome has an output without tokens for `key` when that is
        done, or when the grammar is refused.
        """
        assert key not in self._live
        self._live.prepare(key, grammar, salt, grammar_bytes)

    def abort(self, key: int) -> None:
        """End a sequence without any output for it. One that has ended is ignored.

        Its slot and blocks are free at once; its results of a step in flight are dropped.
        """
        self._live.cancel(key)

    def suspend(self, key: int) -> None:
        """Take a sequence out of steps, from the next plan on; one that has ended is ignored.

        Its slot is free then. Its blocks are kept until memory is needed for others, and nothing that is
        cached can be evicted for them. It has its time limit as before.
        """
        self._live.suspend(key)

    def resume(self, key: int) -> None:
        """Let a suspended sequence go on; any other is ignored.

        It waits for a slot before new sequences of its class, and continues as if it had not been suspended.
        """
        self._has_no_work = False
        self._live.resume(key)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were computed again because their sequence was preempted or suspended."""
        return self._scheduler.recomputed_tokens

    @property
    def compiling(self) -> int:
        """How many sequences and preparations wait for a grammar, or for a mask of one."""
        return self._live.compiling + self._scheduler.held

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing to report until the next `submit`."""
        return not self._live and not self._under_way

    def wait_s(self, now_s: float) -> float | None:
        """Return how long to wait for a message before the next `plan`; None: until one arrives.

        An idle engine still has to trim its cache once, when that is due, and one with nothing but suspended
        sequences has to end those that are out of time.
        """
        if self.idle:
            return self._trimming.wait_s(now_s)
        if self._rests:
            waits_s = self._trimming.wait_s(now_s), self._live.wait_s(now_s)
            return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)
        return FINDING_POLL_S if self._has_no_work and self.compiling and not self._under_way else 0.0

    def trim_if_due(self, now_s: float) -> TrimmedCache | None:
        """Trim the cache of an engine that is idle or waits for its sequences to be resumed, if it is due."""
        return self._trimming.trim_when_idle(now_s) if self.idle or self._rests else None

    def statistics(self) -> EngineStatistics:
        """Return current counts, and totals since the start. Blocks are those of the first group."""
        scheduler, pool = self._scheduler, self._memory.pools[0]
        return EngineStatistics(
            running=scheduler.running,
            pending=scheduler.pending + self._live.compiling,
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
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            suspended=scheduler.suspended,
        )

    # Steps -------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> Step | None:
        """Begin a step and return its work, or None, with no step begun, if there is none.

        Also ends sequences that are out of time and trims the cache if that is due.
        """
        assert len(self._under_way) < self._steps_at_once
        self._live.queue_compiled()
        self._live.end_overdue(now_s)
        self._live.suspend_and_resume()
        self._trimming.trim_if_due(now_s)
        step = self._scheduler.plan(now_s)
        self._has_no_work = step is None
        if step is not None:
            self._trimming.changed = True
            self._under_way.append(step)
        return step

    def commit(self, step: Step, sampled: SampledTokens) -> Outcome:
        """End the oldest step in flight with its results."""
        self._under_way.remove(step)
        self._steps += 1
        self._step_tokens += step.tokens
        committed = self._batch.commit_tokens(step, sampled.token_ids)
        outputs = self._live.take_early_outputs()
        complete = []
        for slot, sample in committed.failed:
            sequence = self._running_in(slot)
            if sample in sampled.complete:
                complete.append(sequence)
            else:
                outputs.append(self._live.fail(sequence, self._failure_reason(sampled, sample)))
        self._scheduler.indexed(committed.filled)
        self._scheduler.rewound(committed.rewound)
        keys: npt.NDArray[np.int64] = np.asarray(committed.keys)
        tokens: npt.NDArray[np.int32] = np.asarray(committed.tokens)
        if self._embeds:
            return Outcome(b"", b"", outputs + self._embedded(sampled, committed))
        self._generated_tokens += len(tokens)
        self._draft_tokens += step.drafts
        self._accepted_tokens += len(tokens) - len(keys)
        details_of = step_details(sampled, committed, self._scheduler, self._live.by_key)
        tokens_of = TokensOf(committed)
        go_on = bytearray(b"\1") * len(keys)  # whether a sequence has nothing else to report, by index
        for _, reason, index in committed.finished:
            go_on[index] = False
            details = details_of.of_tokens.pop(index, NO_DETAILS)
            outputs.append(self._live.complete(committed.keys[index], tokens_of[index], reason, details))
        for sequence in complete:
            details = details_of.of_prompts.pop(sequence.key, NO_DETAILS)
            outputs.append(self._live.complete_without_token(sequence, details))
        for index, details in details_of.of_tokens.items():
            go_on[index] = False
            outputs.append(self._live.report(committed.keys[index], tokens_of[index], details))
        for key, details in details_of.of_prompts.items():
            outputs.append(self._live.report(key, [], details))
        others = np.frombuffer(go_on, np.bool_)
        if len(tokens) == len(keys):
            return Outcome(keys[others].tobytes(), tokens[others].tobytes(), outputs)
        counts: npt.NDArray[np.uint8] = np.asarray(committed.counts)
        of_others = tokens[others.repeat(counts)]
        return Outcome(keys[others].tobytes(), of_others.tobytes(), outputs, counts[others].tobytes())

    def fail(self, step: Step, reason: str) -> Outcome:
        """End a failed step: its sequences fail, the others continue."""
        self._under_way.remove(step)
        outputs = self._live.take_early_outputs()
        for slot in self._batch.cancel_step(step):
            outputs.append(self._live.fail(self._running_in(slot), reason))
        return Outcome(b"", b"", outputs)

    def take_outcome(self) -> Outcome:
        """Return what to report without a step: rejections and timeouts."""
        return Outcome(b"", b"", self._live.take_early_outputs())

    # Helpers -----------------------------------------------------------------------------------------

    @property
    def _rests(self) -> bool:
        """Whether all sequences are suspended, and there is nothing to do or to report."""
        return self._live.rest and not self._under_way

    def _checked_column(
        self, name: str, values: "npt.NDArray[np.float32] | None"
    ) -> "npt.NDArray[np.float32] | None":
        """Return the optional column of a prompt. Raises ValueError if this model does not compute it."""
        if values is None:
            return None
        width = self._columns.get(name)
        if width is None:
            raise ValueError(f"this model takes no {name} in place of tokens")
        if values.ndim != 2 or values.shape[1] != width:
            raise ValueError(f"{name}: {list(values.shape)} numbers, expected {width} for each token")
        return np.ascontiguousarray(values, np.float32)

    def _embedded(self, sampled: SampledTokens, committed: Committed) -> list[Output]:
        """End the sequences that were computed to their last token, each with its vector."""
        outputs = []
        for slot, _, index in committed.finished:
            vector = sampled.vectors[committed.samples[index]]
            outputs.append(self._live.complete_embedding(self._running_in(slot), vector))
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
