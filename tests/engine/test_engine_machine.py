"""The engine under random submits, aborts and failures, against an oracle that is one plain loop."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.fake_model import EOS, VOCABULARY, FakeRunner, answer
from fairlead.engine.engine import Engine
from fairlead.engine.sequence import Plan
from fairlead.job import Sampling
from fairlead.worker.wire import Output

BLOCK_SIZE = 4
LONGEST = 40

samplings = st.builds(
    Sampling,
    max_tokens=st.integers(0, 50),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(st.integers(0, VOCABULARY), max_size=2).map(tuple),
)
prompts = st.lists(st.integers(-1, VOCABULARY), max_size=3) | st.lists(
    st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST + 2
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 5),
        batch=st.integers(1, 5),
        tokens=st.integers(1, 3) | st.integers(4, 12),
        blocks=st.integers(5, 30),
    )
    def start(self, slots: int, batch: int, tokens: int, blocks: int) -> None:
        self.slots, self.batch, self.tokens, self.blocks = slots, min(batch, slots), tokens, blocks
        self.longest = min(LONGEST, blocks * BLOCK_SIZE)
        self.runner = FakeRunner(BLOCK_SIZE)
        self.engine = Engine(
            self.runner,
            slots=slots,
            max_batch=self.batch,
            max_batched_tokens=tokens,
            max_model_len=LONGEST,
            blocks_total=blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos_token_ids=[EOS],
            draw_seed=lambda: 1,
        )
        self.plan: Plan | None = None
        self.submitted: list[tuple[list[int], Sampling]] = []
        self.told: dict[int, list[int]] = {}  # of the sequences that are open
        self.ended: set[int] = set()

    @rule(prompt=prompts, sampling=samplings)
    def submit(self, prompt: list[int], sampling: Sampling) -> None:
        key = len(self.submitted)
        self.submitted.append((prompt, sampling))
        self.told[key] = []
        self.engine.submit(key, list(prompt), sampling)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Of anyone: waiting, running, in the step under way, ended, aborted, unknown."""
        key = data.draw(st.integers(0, len(self.submitted)), label="key")
        if key < len(self.submitted):
            self.told.pop(key, None)
            self.ended.add(key)
        self.engine.abort(key)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        self.plan = self.engine.plan()
        if self.plan is None:
            for output in self.engine.step():  # refusals are told even so
                self.hear(output)
            return
        chunks = self.plan.chunks
        assert 0 < len(chunks) <= self.batch
        assert sum(chunk.count for chunk in chunks) <= self.tokens
        assert all(chunk.count > 0 for chunk in chunks)
        assert len({chunk.sequence.slot for chunk in chunks}) == len(chunks)
        decodes = [chunk.count == 1 and chunk.samples for chunk in chunks]
        assert sorted(decodes, reverse=True) == decodes

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        for output in self.engine.commit(plan, self.runner.launch(plan).wait()):
            self.hear(output)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end_step_badly(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        keys = {chunk.sequence.key for chunk in plan.chunks} & set(self.told)
        outputs = self.engine.fail(plan, "the device hiccuped")
        failed = {output.key for output in outputs if output.error == "the device hiccuped"}
        assert keys == failed
        for output in outputs:
            if output.key in failed:
                self.told.pop(output.key)
                self.ended.add(output.key)
            else:
                self.hear(output)

    @precondition(lambda self: self.plan is None)
    @rule(number=st.integers(1, 5))
    def run_steps(self, number: int) -> None:
        for _ in range(number):
            self.begin_step()
            if self.plan is not None:
                self.end_step()

    def hear(self, output: Output) -> None:
        """Check an output against what the model says of its sequence alone."""
        assert output.key not in self.ended
        prompt, sampling = self.submitted[output.key]
        if output.error is not None:
            assert not self.can_run(prompt, sampling)
            assert output.token_ids == []
            del self.told[output.key]
            self.ended.add(output.key)
            return
        told = self.told[output.key]
        told += output.token_ids
        expected, reason = answer(prompt, sampling, self.longest)
        assert told == expected[: len(told)]
        assert (output.finish_reason is not None) == (len(told) == len(expected))
        if output.finish_reason is not None:
            assert output.finish_reason == reason
            assert output.stop_token == (told[-1] if reason == "stop" else None)
            del self.told[output.key]
            self.ended.add(output.key)

    def can_run(self, prompt: list[int], sampling: Sampling) -> bool:
        known = all(0 <= token_id < VOCABULARY for token_id in prompt)
        return 0 < len(prompt) < self.longest and sampling.max_tokens > 0 and known

    @invariant()
    def counts_agree(self) -> None:
        counts = self.engine.statistics()
        assert counts.slots_free + counts.running == self.slots
        assert 0 <= counts.blocks_free <= self.blocks
        assert (counts.running == 0) <= (counts.blocks_free == self.blocks)
        if self.plan is None:
            assert self.engine.idle == (not self.told)
            assert counts.running + counts.pending <= len(self.told)

    def teardown(self) -> None:
        """Let everybody end, in as many steps as it can take at most; then nothing is held."""
        if not hasattr(self, "engine"):
            return
        if self.plan is not None:
            self.end_step()
        self.run_steps(len(self.told) * 2 * LONGEST + 1)
        assert not self.told
        assert self.engine.idle
        counts = self.engine.statistics()
        assert (0, 0) == (counts.running, counts.pending)
        assert (self.slots, self.blocks) == (counts.slots_free, counts.blocks_free)


EngineMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestEngineMachine = EngineMachine.TestCase
