"""A plain token has the same effect on a choice as an output with only that token, with equal deltas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.config import demonstration_model
from fairlead.base.job import Delta, Job, Sampling
from fairlead.base.messages import Output
from fairlead.language.text.answer import ChoiceText
from fairlead.language.text.model import TextModel
from fairlead.nodes.streams.sequence import NodeSequence

MODEL = TextModel.load(demonstration_model(), name="m")
KEY = 7


class FakeWorker:
    """Accepts a sequence and records whether it was aborted."""

    def __init__(self) -> None:
        self.samplings: list[Sampling] = []
        self.aborted: list[int] = []

    def submit(self, _prompt, sampling, _receiver, **_options) -> int:
        self.samplings.append(sampling)
        return KEY

    def abort(self, key: int) -> None:
        self.aborted.append(key)


class DeltaList:
    """Replaces the channel, and keeps every delta separately."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def put(self, delta: Delta) -> None:
        self.deltas.append(delta)


def sequence(*stop: str, max_output_tokens=None, n=1, index=0, **sampling):
    worker, collected = FakeWorker(), DeltaList()
    choice = ChoiceText(MODEL.tokenizer, stop, index, eos_token_ids=MODEL.eos_token_ids)
    tested = NodeSequence(worker, collected, choice, collected.deltas.append)
    job = Job(id="", tenant="A", model="m", prompts=([1, 2],), sampling=Sampling(**sampling), n=n)
    tested.submit(job, index, max_output_tokens=max_output_tokens, timeout_s=None, salt=b"")
    return tested, worker, collected.deltas


@given(
    st.lists(st.integers(0, MODEL.tokenizer.vocab_size + 5), max_size=30),
    st.lists(st.sampled_from(["a", "e ", "th", "\n", "ing"]), max_size=2),
)
def test_plain_tokens_become_the_same_deltas_as_outputs(token_ids, stop):
    plain, worker, deltas = sequence(*stop, max_tokens=100)
    other, other_worker, expected = sequence(*stop, max_tokens=100)
    for token_id in token_ids:
        plain.receive_token(token_id)
        other.receive(Output(KEY, [token_id]))
    assert expected == deltas
    assert len(set(other_worker.aborted)) == len(worker.aborted)
    assert bool(worker.aborted) == any(delta.finish_reason == "stop" for delta in deltas)


def test_no_delta_is_sent_after_a_stop_string():
    ids = MODEL.tokenizer.encode("one two three")
    tested, worker, deltas = sequence("two", max_tokens=100)
    for token_id in ids:
        tested.receive_token(token_id)
    assert "".join(delta.text for delta in deltas) == "one "
    assert (deltas[-1].finish_reason, worker.aborted) == ("stop", [KEY])


@pytest.mark.parametrize(
    ("requested", "limit", "expected"),
    [((10, 8), None, (10, 8)), ((10, 8), 10, (10, 8)), ((10, 8), 4, (4, 4)), ((10, 2), 4, (4, 2))],
)
def test_output_limit_of_the_model_caps_max_tokens_and_min_tokens(requested, limit, expected):
    _, worker, _ = sequence(max_output_tokens=limit, max_tokens=requested[0], min_tokens=requested[1])
    (sampling,) = worker.samplings
    assert expected == (sampling.max_tokens, sampling.min_tokens)


def test_each_choice_of_a_seeded_job_has_its_own_seed():
    seeds = [sequence(max_tokens=1, seed=5, n=3, index=index)[1].samplings[0].seed for index in range(3)]
    assert seeds == [5, 6, 7]
