"""The engine: sequences in, steps, tokens out. Knows tokens, not text; no torch, no clock, no socket.

A sequence's failure ends that sequence, a step's failure ends the sequences of that step. What has ended
gives back its slot and blocks at once. Its caller bounds how many sequences it holds (by seats).
"""

from collections.abc import Callable, Collection

import msgspec

from fairlead.engine.blocks import BlockPool
from fairlead.engine.scheduler import Scheduler
from fairlead.engine.sequence import Chunk, Plan, Sequence, State
from fairlead.engine.slots import SlotPool
from fairlead.engine.step import Pick, Runner
from fairlead.job import FinishReason, Sampling
from fairlead.worker.wire import EngineStatistics, Output

FAILED_STEPS_BOUND = 3


class Engine:
    """Continuous batching over one runner.

    `slots`: sequences that hold KV cache at a time; `max_batch`: sequences in one step; `max_model_len`:
    prompt + output tokens of one sequence. `draw_seed` makes the seed of a sequence that brings none.
    `report_failure` is told why a step failed. Between `plan` and its `commit` or `fail` a step is under
    way; `step` does all of it.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        slots: int,
        max_batch: int,
        max_batched_tokens: int,
        max_model_len: int,
        blocks_total: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        draw_seed: Callable[[], int],
        report_failure: Callable[[Exception], object] | None = None,
    ) -> None:
        self._runner = runner
        self._slots = SlotPool(slots)
        self._blocks = BlockPool(blocks_total, block_size)
        self._scheduler = Scheduler(
            slots=self._slots,
            blocks=self._blocks,
            max_batch=max_batch,
            max_batched_tokens=max_batched_tokens,
        )
        self._longest = min(max_model_len, blocks_total * block_size)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._draw_seed = draw_seed
        self._report_failure = report_failure
        self._sequences: dict[int, Sequence] = {}
        self._refused: dict[int, Output] = {}
        self._under_way: Plan | None = None
        self._aborted_under_way: list[Sequence] = []
        self._steps_failed_in_a_row = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    # From outside ------------------------------------------------------------------------------------

    def submit(self, key: int, prompt: list[int], sampling: Sampling) -> None:
        """Put a sequence in line; the engine keeps `prompt` and appends to it.

        `max_tokens` is cut to what fits behind the prompt. A sequence that cannot run fails alone: the next
        step's outputs say why.
        """
        assert key not in self._sequences
        assert key not in self._refused
        reason = self._why_not(prompt, sampling)
        if reason is not None:
            self._refused[key] = Output(key, [], error=reason)
            return
        max_tokens = min(sampling.max_tokens, self._longest - len(prompt))
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        seed = self._draw_seed() if sampling.seed is None else sampling.seed
        sequence = Sequence(key, prompt, sampling, seed=seed)
        self._sequences[key] = sequence
        self._scheduler.submit(sequence)

    def abort(self, key: int) -> None:
        """End a sequence that nobody wants; no output will name it. One that has ended is ignored.

        What it holds is free at once, or at the commit of the step that is under way.
        """
        self._refused.pop(key, None)
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        held = sequence.state is State.PROCESSING
        sequence.become(State.CANCELLED)
        if held and self._under_way is not None:
            self._aborted_under_way.append(sequence)  # the device may still be writing to its blocks
        else:
            self._scheduler.remove(sequence)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing to tell until the next `submit`."""
        return not self._sequences and not self._refused and self._under_way is None

    def statistics(self) -> EngineStatistics:
        """Counts as of now; `steps` and the tokens since the start."""
        return EngineStatistics(
            running=self._scheduler.running,
            pending=self._scheduler.pending,
            slots_free=self._slots.free,
            blocks_free=self._blocks.free,
            blocks_total=self._blocks.total,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    # Steps -------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run one step, if there is work, and return what is to be told.

        A step that the runner raises in fails its own sequences; the third in a row is raised: such a
        runner is beyond help.
        """
        plan = self.plan()
        if plan is None:
            return self._take_refused()
        try:
            picks = self._runner.launch(plan).wait()
        except Exception as error:
            self._steps_failed_in_a_row += 1
            if self._steps_failed_in_a_row == FAILED_STEPS_BOUND:
                raise
            if self._report_failure is not None:
                self._report_failure(error)
            return self.fail(plan, f"the engine's step failed: {type(error).__name__}: {error}")
        self._steps_failed_in_a_row = 0
        return self.commit(plan, picks)

    def plan(self) -> Plan | None:
        """Begin a step: its work, or None (and no step) when there is none."""
        assert self._under_way is None
        self._under_way = self._scheduler.plan()
        return self._under_way

    def commit(self, plan: Plan, picks: list[Pick | None]) -> list[Output]:
        """End a step by what it picked: one entry a chunk, None where the chunk did not sample."""
        outputs = self._end_step(plan)
        for chunk, pick in zip(plan.chunks, picks, strict=True):
            assert chunk.samples == (pick is not None)
            sequence = chunk.sequence
            if sequence.state is not State.PROCESSING:
                continue
            self._count_prompt(chunk)
            sequence.computed += chunk.count
            if pick is not None:
                outputs.append(self._extend(sequence, pick))
        self._steps += 1
        return outputs

    def fail(self, plan: Plan, reason: str) -> list[Output]:
        """End a step that went wrong: its sequences fail, the others go on."""
        outputs = self._end_step(plan)
        for chunk in plan.chunks:
            if chunk.sequence.state is State.PROCESSING:
                outputs.append(self._fail(chunk.sequence, reason))
        return outputs

    # Helpers -----------------------------------------------------------------------------------------

    def _why_not(self, prompt: list[int], sampling: Sampling) -> str | None:
        """Why a sequence can never run, or None."""
        if not prompt:
            return "the prompt is empty"
        if len(prompt) >= self._longest:
            return f"the prompt has {len(prompt)} tokens; with one of output, {self._longest} fit"
        if sampling.max_tokens < 1:
            return f"max_tokens is {sampling.max_tokens}, and must be at least 1"
        outside = [token_id for token_id in (min(prompt), max(prompt)) if not self._is_token(token_id)]
        if outside:
            return f"the prompt has token id {outside[0]}, outside 0…{self._vocab_size - 1}"
        if not all(map(self._is_token, sampling.logit_bias)):
            return f"logit_bias names a token id outside 0…{self._vocab_size - 1}"
        return None

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size

    def _end_step(self, plan: Plan) -> list[Output]:
        """Free what was aborted while the step ran; return the refusals that are still to be told."""
        assert plan is self._under_way
        self._under_way = None
        for sequence in self._aborted_under_way:
            self._scheduler.remove(sequence)
        self._aborted_under_way.clear()
        return self._take_refused()

    def _take_refused(self) -> list[Output]:
        refused = list(self._refused.values())
        self._refused.clear()
        return refused

    def _count_prompt(self, chunk: Chunk) -> None:
        self._prompt_tokens += max(0, min(chunk.count, chunk.sequence.prompt_length - chunk.start))

    def _extend(self, sequence: Sequence, pick: Pick) -> Output:
        """Append the picked token, and end the sequence if it was the last."""
        if pick.error is not None:
            return self._fail(sequence, pick.error)
        sequence.token_ids.append(pick.token_id)
        self._generated_tokens += 1
        finish_reason, stop_token = self._finish(sequence, pick.token_id)
        if finish_reason is not None:
            self._leave(sequence, State.COMPLETED)
        logprobs = [] if pick.logprob is None else [pick.logprob]
        return Output(sequence.key, [pick.token_id], logprobs, finish_reason, stop_token)

    def _finish(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Why the sequence ends with this token, and which token ended it; None and None if it goes on."""
        sampling = sequence.sampling
        ends = token_id in sampling.stop_token_ids or (
            token_id in self._eos_token_ids and not sampling.ignore_eos
        )
        if ends and sequence.output_length >= sampling.min_tokens:
            return "stop", token_id
        if sequence.output_length == sampling.max_tokens:
            return "length", None
        return None, None

    def _fail(self, sequence: Sequence, reason: str) -> Output:
        self._leave(sequence, State.FAILED)
        return Output(sequence.key, [], error=reason)

    def _leave(self, sequence: Sequence, end: State) -> None:
        sequence.become(end)
        del self._sequences[sequence.key]
        self._scheduler.remove(sequence)
