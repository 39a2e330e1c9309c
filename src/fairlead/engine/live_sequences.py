"""The sequences that were submitted and have not ended, and how they end."""

from collections.abc import Hashable
from functools import partial

import msgspec
from llguidance import LLMatcher

from fairlead.base.messages import ErrorCode, Output
from fairlead.engine.deadlines import Deadlines
from fairlead.engine.output_details import OutputDetails
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import Sequence, SequenceStatus
from fairlead.engine.slow_masks import SlowMasks
from fairlead.language.structured.compiler import GrammarCompiler

# In Python 3.11, reading these from the enumeration takes 0.5 µs.
COMPILING, COMPLETED = SequenceStatus.COMPILING, SequenceStatus.COMPLETED
CLOCK_GRAIN_S = 0.001  # a time limit has passed a little later, not at its end
STOPPED = 1  # the reason in `Committed.finished`; any other means the length limit


class LiveSequences:
    """Owns the sequences by key, their time limits, and the outputs that are reported without a step.

    A sequence that ends here is removed from `scheduler` at once. One with a grammar is queued there when
    `compiler` has compiled it.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        compiler: GrammarCompiler | None = None,
        slow_masks: SlowMasks | None = None,
    ) -> None:
        self.by_key: dict[int, Sequence] = {}
        self._scheduler = scheduler
        self._compiler = compiler
        self._slow_masks = slow_masks
        self._early_outputs: dict[int, Output] = {}  # refusals and timeouts, for the next outcome
        self._preparing: set[int] = set()  # keys of grammars that are compiled before their sequences come
        self._untimed: list[Sequence] = []  # since the last plan; their time limits begin with the next one
        self._deadlines = Deadlines()
        self._suspends: dict[int, bool] = {}  # by key: suspend it, or resume it, at the next plan

    def __len__(self) -> int:
        return len(self.by_key) + len(self._early_outputs) + len(self._preparing)

    def __contains__(self, key: int) -> bool:
        return key in self.by_key or key in self._early_outputs or key in self._preparing

    @property
    def compiling(self) -> int:
        """How many wait for a grammar."""
        return 0 if self._compiler is None else self._compiler.waiting

    def add(
        self,
        sequence: Sequence,
        *,
        grammar: str | None = None,
        owner: Hashable = None,
        grammar_bytes: int = 0,
    ) -> None:
        """Queue a new sequence, now or once its grammar is compiled, which is kept for `owner`."""
        self.by_key[sequence.key] = sequence
        if sequence.timeout_s is not None:
            self._untimed.append(sequence)
        if grammar is None:
            self._scheduler.submit(sequence)
            return
        assert self._compiler is not None
        constraint = sequence.tokens.sampling.constraint
        constraint.owner, constraint.lexer = owner, (owner, grammar)
        matcher = self._compiler.submit(sequence.key, grammar, owner, grammar_bytes)
        if matcher is not None:
            self._queue_constrained(sequence, matcher)

    def prepare(self, key: int, grammar: str, owner: Hashable, grammar_bytes: int = 0) -> None:
        """Compile a grammar for sequences to come; an output of no tokens, with this key, says that it is."""
        if self._compiler is None:
            self.refuse(key, "this model cannot be constrained by a grammar")
        elif self._compiler.submit(key, grammar, owner, grammar_bytes) is not None:
            self._early_outputs[key] = Output(key, [], finish_reason="stop")
        else:
            self._preparing.add(key)

    def queue_compiled(self) -> None:
        """Queue each sequence with a compiled grammar; end those with a refused one."""
        for key, result in self._compiler.take_ready() if self._compiler is not None else ():
            is_refused = isinstance(result, str)
            reason = f"the grammar is refused: {result}" if is_refused else None
            if key in self._preparing:
                self._preparing.discard(key)
                self._early_outputs[key] = Output(
                    key,
                    [],
                    finish_reason=None if is_refused else "stop",
                    error=reason,
                    code="grammar_failed" if is_refused else None,
                )
                continue
            sequence = self.by_key[key]
            if isinstance(result, str):
                sequence.tokens.sampling.constraint.error = result
                self._early_outputs[key] = self.fail(sequence, f"the grammar is refused: {result}")
            else:
                self._queue_constrained(sequence, result)

    def refuse(self, key: int, reason: str, param: str | None = None) -> None:
        """Report that a sequence can never run; `param`: the client's field at fault, if one is."""
        code: ErrorCode | None = None if param is None else "invalid_request"
        self._early_outputs[key] = Output(key, [], error=reason, code=code, param=param)

    def cancel(self, key: int) -> None:
        """End a sequence without any output for it. One that has ended is ignored."""
        self._early_outputs.pop(key, None)
        if key in self._preparing:
            assert self._compiler is not None
            self._preparing.discard(key)
            self._compiler.cancel(key)
        if (sequence := self.by_key.get(key)) is not None:
            self._end(sequence, SequenceStatus.CANCELLED)

    def suspend(self, key: int) -> None:
        """Suspend a sequence at the next plan, unless it has ended or is resumed before."""
        if key in self.by_key:
            self._suspends[key] = True

    def resume(self, key: int) -> None:
        """Resume a sequence at the next plan, unless it has ended or is suspended again before."""
        if key in self.by_key:
            self._suspends[key] = False

    @property
    def rest(self) -> bool:
        """Whether all sequences are suspended, and there is nothing to report."""
        return len(self) == self._scheduler.suspended and not self._suspends

    def wait_s(self, now_s: float) -> float | None:
        """Return how long until the time limit of a sequence has passed; None: there is none."""
        earliest_s = self._deadlines.earliest_s
        return None if earliest_s is None else max(0.0, earliest_s - now_s) + CLOCK_GRAIN_S

    def suspend_and_resume(self) -> None:
        """Do what was requested since the last plan. A sequence without its grammar is suspended later."""
        if not self._suspends:
            return
        requested, self._suspends = self._suspends, {}
        for key, suspends in requested.items():
            sequence = self.by_key[key]
            if not suspends:
                if sequence.state is SequenceStatus.SUSPENDED:
                    self._scheduler.resume(sequence)
            elif sequence.state is COMPILING:
                self._suspends[key] = True
            elif sequence.state is not SequenceStatus.SUSPENDED:
                self._scheduler.suspend(sequence)

    def end_overdue(self, now_s: float) -> None:
        """End the sequences that are out of time."""
        for sequence in self._untimed:
            if sequence.key in self.by_key and sequence.timeout_s is not None:
                self._deadlines.add(sequence.key, now_s + sequence.timeout_s)
        self._untimed.clear()
        for key in self._deadlines.passed(now_s):
            if key in self.by_key:
                self._early_outputs[key] = self._time_out(self.by_key[key])
        self._deadlines.forget_all_but(self.by_key, len(self.by_key))

    def take_early_outputs(self) -> list[Output]:
        """Return what is to be reported without a step, once."""
        outputs = list(self._early_outputs.values())
        self._early_outputs.clear()
        return outputs

    def complete(self, key: int, token_ids: list[int], reason: int, details: OutputDetails) -> Output:
        """End a sequence with its last tokens."""
        sequence = self.by_key[key]
        if details.error is not None:
            return self.fail(sequence, details.error)
        self._scheduler.admission.predictor.learn(sequence.tokens.output_length)
        self._end(sequence, COMPLETED)
        if reason == STOPPED:
            return details.output(key, token_ids, "stop", token_ids[-1])
        return details.output(key, token_ids, "length")

    def complete_without_token(self, sequence: Sequence, details: OutputDetails) -> Output:
        """End a sequence whose constrained answer is complete; the model has no token that ends one."""
        if details.error is not None:
            return self.fail(sequence, details.error)
        cached = self._scheduler.cached.get(sequence.key, 0)  # if it had no token that it came with
        self._scheduler.admission.predictor.learn(sequence.tokens.output_length)
        self._end(sequence, COMPLETED)
        return msgspec.structs.replace(details, cached_tokens=cached).output(sequence.key, [], "stop")

    def complete_embedding(self, sequence: Sequence, vector: bytes) -> Output:
        """End a sequence with the vector of its prompt."""
        self._end(sequence, SequenceStatus.COMPLETED, keep=False)
        return Output(sequence.key, [], finish_reason="stop", vector=vector)

    def report(self, key: int, token_ids: list[int], details: OutputDetails) -> Output:
        """Return the output of a sequence that goes on, unless its details are an error."""
        if details.error is not None:
            return self.fail(self.by_key[key], details.error)
        return details.output(key, token_ids)

    def fail(self, sequence: Sequence, reason: str) -> Output:
        """Fail a sequence. Its blocks are not cached, because they may contain the cause of the failure.

        A grammar that fails before the first token is the client's. One that fails in the middle of an answer
        was accepted, so this is a failure of the engine.
        """
        self._end(sequence, SequenceStatus.FAILED, keep=False)
        constraint = sequence.tokens.sampling.constraint
        if self._compiler is None or constraint is None or constraint.error is None:
            return Output(sequence.key, [], error=reason)
        self._compiler.discard(constraint.grammar)
        code: ErrorCode = "engine_failed" if sequence.tokens.output_length else "grammar_failed"
        return Output(sequence.key, [], error=reason, code=code)

    def _time_out(self, sequence: Sequence) -> Output:
        self._end(sequence, SequenceStatus.TIMEOUT)
        reason = f"the request took longer than {sequence.timeout_s:g} s"
        return Output(sequence.key, [], error=reason, code="request_timeout")

    def _queue_constrained(self, sequence: Sequence, matcher: LLMatcher) -> None:
        assert self._compiler is not None
        constraint = sequence.tokens.sampling.constraint
        renew = partial(self._compiler.renew, constraint.grammar)
        constraint.begin(
            matcher,
            constraint.lexer,
            renew,
            missing_end=self._compiler.missing_end,
            expected_s=self._compiler.first_mask_s(constraint.grammar, constraint.owner),
            words=self._compiler.mask_words,
        )
        if constraint.close_after is not None:
            constraint.closing = self._compiler.closing(constraint.close_after)
        sequence.become(SequenceStatus.PENDING)
        self._scheduler.submit(sequence)

    def _end(self, sequence: Sequence, final: SequenceStatus, *, keep: bool = True) -> None:
        before = sequence.state
        sequence.become(final)
        del self.by_key[sequence.key]
        self._suspends.pop(sequence.key, None)
        if before is COMPILING:
            assert self._compiler is not None
            self._compiler.cancel(sequence.key)
        else:
            self._scheduler.remove(sequence, keep=keep)
            self._scheduler.cached.pop(sequence.key, None)
            if self._slow_masks is not None:
                self._slow_masks.forget(sequence)
            constraint = sequence.tokens.sampling.constraint
            if self._compiler is not None and constraint is not None and constraint.lexer is not None:
                owner, grammar = constraint.lexer
                self._compiler.count_use(grammar, owner, constraint.consumed)
