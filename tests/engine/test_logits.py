"""Logits processors update their state in each step, with the same result as a full recount."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.models.tiny import state_of
from fairlead._cext.inputbatch import InputBatch
from fairlead.base.job import Sampling
from fairlead.engine.sampling import logits_processors
from fairlead.engine.sampling.logits_processors import SampledRows
from fairlead.engine.sampling.sampler import Sampler
from fairlead.engine.sampling.token_counts import TokenCounts
from first_failure import until_first_failure

VOCABULARY = 12
SLOTS = 3
LENGTH = 64
EOS = (2,)
tokens = st.integers(0, VOCABULARY + 2)  # the tokenizer has more ids than the model
samplings = st.builds(
    Sampling,
    max_tokens=st.just(100),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.dictionaries(st.integers(-2, VOCABULARY + 2), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    repeat_last_n=st.sampled_from([-1, 0, 1, 2, 3, 5, 100]),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=8).map(tuple),
)


def oracle(state, output, sampling, logits):
    """Return the adjusted logits of one sequence, computed one token at a time in float64."""
    changed = logits.astype(np.float64).copy()
    prompt = list(state.tokens_view())[: state.prompt_length]
    known, last = [*prompt, *output], sampling.repeat_last_n
    window = known if last == -1 else known[max(0, len(known) - last) :]
    output_in_window = window if len(window) < len(output) else output
    for token in range(VOCABULARY):
        if token in window:
            changed[token] *= (
                1 / sampling.repetition_penalty if changed[token] > 0 else sampling.repetition_penalty
            )
        changed[token] -= sampling.frequency_penalty * output_in_window.count(token)
        changed[token] -= sampling.presence_penalty * (token in output_in_window)
        changed[token] += sampling.logit_bias.get(token, 0.0)
        if token in EOS and len(output) < sampling.min_tokens and not sampling.ignore_eos:
            changed[token] = -np.inf
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            changed[token] = -np.inf
    return changed


class RememberedSequences(RuleBasedStateMachine):
    """Sequences start, generate, leave, and return in other slots after a preemption."""

    def __init__(self):
        super().__init__()
        self.batch = InputBatch(
            slots=SLOTS,
            max_batched_tokens=SLOTS * LENGTH,
            max_model_len=LENGTH,
            block_size=LENGTH,
            vocab_size=2**31 - 1,
        )
        self.sampler = Sampler(self.batch, VOCABULARY, EOS)
        self.running = {}
        self.preempted = []
        self.logits = torch.randn(SLOTS, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 4

    @initialize(prompt=st.lists(tokens, min_size=1, max_size=6), sampling=samplings)
    def first(self, prompt, sampling):
        self.admit(prompt, sampling)

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(prompt=st.lists(tokens, min_size=1, max_size=6), sampling=samplings)
    def admit(self, prompt, sampling):
        self._put(state_of(prompt, sampling), [])

    @precondition(lambda self: self.preempted and len(self.running) < SLOTS)
    @rule()
    def readmit(self):
        self._put(*self.preempted.pop(0))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data, keep):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        state, output = self.running.pop(slot)
        self.batch.remove_request(slot)
        if keep:
            state.rewind(0)
            self.preempted.append((state, output))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def generate_tokens(self, data):
        for slot, (state, _) in self.running.items():
            self.batch.num_scheduled[slot] = (state.num_tokens - state.computed) * (
                state.num_tokens < LENGTH - 2
            )
        step = self.batch.prepare_inputs()
        if step is None:
            return
        counted = [data.draw(tokens) for _ in step.sample_slots]
        for slot, token in zip(step.sample_slots, counted, strict=True):
            self.running[slot][1].append(token)
        self.batch.commit_tokens(step, np.array(counted, dtype=np.int32))

    @invariant()
    def counts_equal_recounted_ones(self):
        if not self.running:
            return
        slots = np.array(sorted(self.running), np.int32)
        positions = np.array([self.running[slot][0].num_tokens for slot in slots], np.int32)
        logits = self.logits[: len(slots)]
        latest = torch.zeros(len(slots), dtype=torch.int32)
        self.sampler.update_state()
        found = self.sampler.process(logits, SampledRows(slots, positions, latest))
        on_host = self.sampler.process(logits.numpy(), SampledRows(slots, positions, latest.numpy()))
        np.testing.assert_allclose(found.numpy(), on_host, rtol=1e-6, atol=1e-6)
        for row, slot in enumerate(slots.tolist()):
            state, output = self.running[slot]
            expected = oracle(state, output, state.sampling.parameters, logits[row].numpy())
            np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-5, atol=1e-5)

    def _put(self, state, output):
        slot = min(set(range(SLOTS)) - set(self.running))
        self.running[slot] = state, output
        self.batch.add_request(slot, state, ([slot],))


TestRememberedSequences = RememberedSequences.TestCase
TestRememberedSequences.settings = settings(stateful_step_count=25)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda patch: patch.setattr(TokenCounts, "_add", lambda *_: None),
        lambda patch: patch.setattr(TokenCounts, "_remove", lambda *_: None),
        lambda patch: patch.setattr(logits_processors, "keep_by_slot", _keep_the_first),
    ],
    ids=[
        "tokens that came later are not counted",
        "tokens stay in the window",
        "a slot's next sequence inherits its state",
    ],
)
def test_state_machine_detects_wrong_counts(monkeypatch, mutate):
    mutate(monkeypatch)
    quickly = until_first_failure(settings(stateful_step_count=25), max_examples=3000)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(RememberedSequences, settings=quickly)


def _keep_the_first(kept, update, make):
    for slot, state in update.added:
        if slot not in kept and (made := make(state)) is not None:
            kept[slot] = made


def test_only_the_repetition_penalty_applies_to_prompt_tokens():
    batch = InputBatch(slots=2, max_batched_tokens=40, max_model_len=20, block_size=20, vocab_size=100)
    for slot, penalty in enumerate([{"presence_penalty": 1.0}, {"repetition_penalty": 1.5}]):
        sampling = Sampling(max_tokens=5, **penalty)
        batch.add_request(slot, state_of(range(1, 9), sampling), ([slot],))
    sampler = Sampler(batch, VOCABULARY, ())
    sampler.update_state()
    rows = SampledRows(np.arange(2, dtype=np.int32), np.full(2, 8, np.int32), torch.zeros(2))
    changed = sampler.process(torch.ones(2, VOCABULARY), rows) != 1
    assert [[1, token] for token in range(1, 9)] == changed.nonzero().tolist()


def test_counts_stay_correct_while_the_arrays_grow():
    counted = [*range(500), *range(0, 500, 7), 3]
    length = len(counted) + 2
    batch = InputBatch(
        slots=1, max_batched_tokens=length, max_model_len=length, block_size=length, vocab_size=500
    )
    state = state_of([1], Sampling(max_tokens=len(counted), frequency_penalty=0.5))
    batch.add_request(0, state, ([0],))
    token_counts = TokenCounts(state, 500, prompt=False)
    for position, token in enumerate(counted, 1):
        batch.num_scheduled[0] = 1
        batch.commit_tokens(batch.prepare_inputs(), np.array([token], np.int32))
        if position < len(counted):
            ids, counts, length = token_counts.update()
            assert length == 1 + position
            assert np.bincount(counted[:position], minlength=500).tolist() == (
                np.bincount(ids, counts, minlength=500).tolist()
            )


@settings(max_examples=300)
@given(
    known=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    drafts=st.lists(st.integers(0, 5), max_size=4),
    is_late=st.booleans(),
    window=st.sampled_from([-1, 1, 2, 3, 4, 6, 50]),
    data=st.data(),
)
def test_window_before_drafts_and_a_token_on_the_device(known, drafts, is_late, window, data):
    prompt_length = data.draw(st.integers(1, len(known)))
    batch = InputBatch(slots=1, max_batched_tokens=40, max_model_len=20, block_size=20, vocab_size=100)
    state = state_of(known[:prompt_length], Sampling(max_tokens=10, frequency_penalty=0.5))
    batch.add_request(0, state, ([0],))
    counts = TokenCounts(state, 5, prompt=True, window=window)  # 5 has no logits
    for token in known[prompt_length:]:
        batch.num_scheduled[0] = state.num_tokens - state.computed
        batch.commit_tokens(batch.prepare_inputs(), np.array([token], np.int32))
        if data.draw(st.booleans()):
            counts.update()
    everything = [*known, *drafts]
    position = len(everything) + is_late
    first = 0 if window == -1 else max(0, position - window)
    considered = [
        (token, at >= prompt_length) for at, token in enumerate(everything) if at >= first and token < 5
    ]
    expected = {
        token: sum(is_output for one, is_output in considered if one == token) for token, _ in considered
    }
    assert written(counts.before(position, drafts)) == expected
    # What was counted for drafts is forgotten if they are wrong.
    fresh = TokenCounts(state, 5, prompt=True, window=window)
    assert written(counts.before(len(known))) == written(fresh.before(len(known)))


def written(found):
    """Return ids and their counts as a dictionary."""
    ids, counts = found
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def test_step_without_sampling_rows_needs_no_processing():
    batch = InputBatch(slots=1, max_batched_tokens=40, max_model_len=20, block_size=20, vocab_size=100)
    sampling = Sampling(max_tokens=5, logit_bias={1: 1.0}, min_tokens=2, presence_penalty=1.0)
    batch.add_request(0, state_of([1, 2], sampling), ([0],))
    sampler = Sampler(batch, VOCABULARY, EOS)
    sampler.update_state()
    nothing, logits = np.empty(0, np.int32), torch.empty(0, VOCABULARY)
    assert sampler.process(logits, SampledRows(nothing, nothing, torch.empty(0))) is logits
