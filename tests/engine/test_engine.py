from array import array
from itertools import count

import msgspec
import numpy as np
import pytest

from engine.fake_model import EOS, VOCABULARY, FakeRunner, Loop, answer
from fairlead.base.job import Sampling, TokenLogprob
from fairlead.base.messages import EngineStatistics, Output
from fairlead.engine.engine import Engine
from fairlead.engine.step import Outcome, SampledTokens

PROMPT = [3, 1, 4]
GREEDY = Sampling(max_tokens=5, ignore_eos=True)


def generating(*token_ids: int):
    """Return a `pick` that chooses these tokens, in order, for every sequence."""
    return lambda batch, step, row, _token_id: token_ids[batch.output_tokens[step.slots[row]]]


def loop(pick=None, *, max_model_len=40, blocks_total=20, slots=4, overlaps=False, **more) -> Loop:
    runner = FakeRunner(4, pick=pick, overlaps=overlaps, windows=more.get("windows", (None,)))
    engine = Engine(
        runner,
        slots=slots,
        max_batch=slots,
        max_batched_tokens=16,
        max_model_len=max_model_len,
        blocks_total=blocks_total,
        block_size=4,
        vocab_size=VOCABULARY,
        eos_token_ids=[EOS],
        draw_seed=count(100).__next__,
        **more,
    )
    return Loop(engine, runner)


def engine(**more) -> Engine:
    return loop(**more).engine


def outcome_of(*outputs: Output, plain: tuple[tuple[int, int], ...] = ()) -> Outcome:
    """Return the outcome with `outputs` and, for each (key, token) of `plain`, one plain token."""
    keys, tokens = ([pair[place] for pair in plain] for place in (0, 1))
    return Outcome(array("q", keys).tobytes(), array("i", tokens).tobytes(), list(outputs))


def picks(*token_ids: int, **more) -> SampledTokens:
    return SampledTokens(array("i", token_ids), **more)


def outputs_of(tested: Loop, key: int = 1) -> tuple[list[int], Output]:
    """Run until idle; return this sequence's tokens and its last output."""
    tested.run()
    return tested.token_ids_of[key], tested.ends[key]


def all_free(engine: Engine) -> bool:
    counts = engine.statistics()
    return (counts.running, counts.pending, counts.slots_free, counts.blocks_free) == (0, 0, 4, 20)


def test_sequence_generates_one_token_per_step_and_then_ends():
    tested = engine()
    tested.submit(7, PROMPT, GREEDY)
    expected, _ = answer(PROMPT, GREEDY, longest=40)
    for token_id in expected[:-1]:
        step = tested.plan(0.0)
        assert outcome_of(plain=((7, token_id),)) == tested.commit(step, picks(token_id))
    step = tested.plan(0.0)
    last = Output(7, expected[-1:], finish_reason="length")
    assert outcome_of(last) == tested.commit(step, picks(expected[-1]))
    assert all_free(tested)
    assert tested.idle


def test_new_engine_is_idle_without_a_plan_or_outputs():
    tested = engine()
    assert tested.idle
    assert tested.plan(0.0) is None
    assert not tested.take_outcome()


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, array("i", PROMPT), np.array(PROMPT, np.int32), np.array(PROMPT, "<i4").tobytes()],
    ids=["list", "array", "numpy", "bytes of the wire"],
)
def test_prompt_may_be_a_list_array_numpy_array_or_bytes(prompt):
    tested = loop()
    tested.engine.submit(1, prompt, GREEDY)
    assert answer(PROMPT, GREEDY, 40)[0] == outputs_of(tested)[0]


def test_end_of_sequence_token_stops_it_and_is_reported():
    tested = loop(generating(5, EOS))
    tested.engine.submit(1, PROMPT, Sampling(max_tokens=9))
    assert outputs_of(tested) == ([5, EOS], Output(1, [EOS], finish_reason="stop", stop_token=EOS))


def test_ignore_eos_generates_max_tokens():
    tested = loop(generating(EOS, EOS, EOS))
    tested.engine.submit(1, PROMPT, Sampling(max_tokens=3, ignore_eos=True))
    assert outputs_of(tested) == ([EOS] * 3, Output(1, [EOS], finish_reason="length"))


def test_stop_token_id_ends_a_sequence_even_with_ignore_eos():
    tested = loop(generating(5, 6, 7))
    tested.engine.submit(1, PROMPT, Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=(6,)))
    assert outputs_of(tested) == ([5, 6], Output(1, [6], finish_reason="stop", stop_token=6))


def test_sequence_does_not_stop_before_min_tokens():
    tested = loop(generating(EOS, 6, EOS, EOS))
    tested.engine.submit(1, PROMPT, Sampling(max_tokens=9, min_tokens=3, stop_token_ids=(6,)))
    assert (outputs_of(tested)[0], tested.ends[1].finish_reason) == ([EOS, 6, EOS], "stop")


def test_stop_token_at_max_tokens_is_reported_as_stop():
    tested = loop(generating(EOS))
    tested.engine.submit(1, PROMPT, Sampling(max_tokens=1))
    assert Output(1, [EOS], finish_reason="stop", stop_token=EOS) == outputs_of(tested)[1]


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_model_len": 8}, 5),
        ({"blocks_total": 2}, 2 * 4 - 3),
        ({"max_output_tokens": 7}, 7),
        ({"blocks_total": [9, 2], "windows": (None, 6)}, 2 * 4 - 3),  # too few blocks for the window to slide
        ({"blocks_total": [9, 3], "windows": (None, 6)}, 9 * 4 - 3),
    ],
    ids=["the context", "the whole cache", "max_output_tokens", "a window's blocks", "a window that slides"],
)
def test_max_tokens_is_limited_by(limits, tokens):
    tested = loop(**limits)
    tested.engine.submit(1, PROMPT, Sampling(max_tokens=1000, ignore_eos=True))
    assert tokens == len(outputs_of(tested)[0])


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], GREEDY, "the prompt is empty"),
        (b"", GREEDY, "the prompt is empty"),
        (b"\1\0\0\0\2", GREEDY, "buffer size must be a multiple"),
        ([1] * 40, GREEDY, "the prompt has 40 tokens; with one of output, 40 fit"),
        ([1] * 31, GREEDY, "the prompt has 31 tokens; at most 30 are accepted"),
        (
            [1, VOCABULARY],
            GREEDY,
            f"the model has no token {VOCABULARY}; its ids are 0...12",
        ),
        ([1, -1], GREEDY, "token ids must be in 0...2147483647, not -1"),
        ([1, 2**40], GREEDY, ""),
        (PROMPT, Sampling(max_tokens=0), "max_tokens is 0"),
        (
            PROMPT,
            Sampling(max_tokens=4, logit_bias={VOCABULARY: 1.0}),
            "the model has no token",
        ),
        (PROMPT, Sampling(max_tokens=4, temperature=-1.0), "temperature"),
        (PROMPT, Sampling(max_tokens=4, top_p=float("nan")), "top_p"),
    ],
)
def test_sequence_that_can_never_run_fails_alone_at_the_next_step(prompt, sampling, reason):
    tested = loop(max_input_tokens=30 if len(prompt) == 31 else None)
    tested.engine.submit(1, PROMPT, GREEDY)
    tested.engine.submit(2, prompt, sampling)
    assert not tested.engine.idle
    tested.turn()
    assert reason in str(tested.ends[2].error)
    tested.run()
    assert answer(PROMPT, GREEDY, 40)[0] == tested.token_ids_of[1]
    assert all_free(tested.engine)


@pytest.mark.parametrize(
    ("prompt", "biases", "code", "param"),
    [
        ([1, VOCABULARY], {}, "invalid_request", "prompt"),
        (PROMPT, {VOCABULARY: 1.0}, "invalid_request", "logit_bias"),
        ([], {}, None, None),
    ],
)
def test_refusal_of_an_unknown_token_is_the_clients_fault_and_names_the_field(prompt, biases, code, param):
    tested = engine()
    tested.submit(2, prompt, Sampling(max_tokens=4, logit_bias=biases))
    (refusal,) = tested.take_outcome().outputs
    assert (refusal.code, refusal.param) == (code, param)


def test_refusal_is_reported_without_a_step():
    tested = engine()
    tested.submit(2, [], GREEDY)
    assert tested.plan(0.0) is None
    (refusal,) = tested.take_outcome().outputs
    assert refusal.key == 2
    assert tested.idle


def test_aborting_a_refused_sequence_drops_its_output():
    tested = engine()
    tested.submit(2, [], GREEDY)
    tested.abort(2)
    assert tested.idle
    assert not tested.take_outcome()


def test_abort_frees_at_once_between_steps():
    tested = loop()
    tested.engine.submit(1, PROMPT, GREEDY)
    tested.turn()
    assert not all_free(tested.engine)
    tested.engine.abort(1)
    assert all_free(tested.engine)
    assert tested.engine.idle


def test_abort_during_its_step_frees_at_once_and_drops_the_output():
    tested = engine()
    tested.submit(1, PROMPT, GREEDY)
    tested.submit(2, PROMPT, GREEDY)
    step = tested.plan(0.0)
    tested.abort(1)
    freed = tested.statistics()
    assert (freed.running, freed.slots_free) == (1, 3)
    assert not tested.idle
    assert outcome_of(plain=((2, 6),)) == tested.commit(step, picks(5, 6))


def test_abort_removes_a_queued_sequence():
    tested = loop(slots=1)
    tested.engine.submit(1, PROMPT, GREEDY)
    tested.engine.submit(2, PROMPT, GREEDY)
    tested.turn()
    tested.engine.abort(2)
    assert tested.engine.statistics().pending == 0
    assert tested.run().token_ids_of.keys() == {1}


def test_aborts_of_unknown_and_of_ended_sequences_are_ignored():
    tested = loop()
    tested.engine.submit(1, PROMPT, GREEDY)
    tested.run()
    tested.engine.abort(1)
    tested.engine.abort(99)
    assert all_free(tested.engine)


def test_sequence_without_a_seed_gets_one_and_a_given_seed_is_kept():
    tested = engine()
    tested.submit(1, PROMPT, Sampling(max_tokens=1))
    tested.submit(2, PROMPT, Sampling(max_tokens=1, seed=5))
    tested.submit(3, PROMPT, Sampling(max_tokens=1))
    step = tested.plan(0.0)
    assert {state.key: state.sampling.parameters.seed for state in map(tested.batch.state, step.slots)} == {
        1: 100,
        2: 5,
        3: 101,
    }


def test_batch_holds_the_sampling_of_each_sequence():
    tested = engine()
    sampling = Sampling(max_tokens=1, logit_bias={3: 1.5})
    tested.submit(1, PROMPT, sampling)
    step = tested.plan(0.0)
    parameters = tested.batch.state(step.slots[0]).sampling.parameters
    assert parameters == msgspec.structs.replace(sampling, seed=parameters.seed)
    assert step.processes_logits


def test_logprobs_are_reported_with_their_token_and_other_tokens_stay_plain():
    tested = engine()
    for key in (1, 2, 3, 4):
        tested.submit(key, PROMPT, Sampling(max_tokens=2 if key < 4 else 1, ignore_eos=True, logprobs=2))
    step = tested.plan(0.0)
    first, second, last = (TokenLogprob(token_id, -0.5, ((token_id, -0.5),)) for token_id in (5, 6, 8))
    tested.abort(1)
    outcome = tested.commit(step, picks(5, 6, 7, 8, logprobs={0: first, 1: second, 3: last}))
    assert (
        outcome_of(Output(4, [8], [last], finish_reason="length"), Output(2, [6], [second]), plain=((3, 7),))
        == outcome
    )


def test_logprobs_of_an_aborted_sequence_do_not_reach_the_next_one_in_its_slot():
    tested = engine(slots=1, overlaps=True)
    tested.submit(1, PROMPT, Sampling(max_tokens=3, logprobs=0))
    first = tested.plan(0.0)
    tested.abort(1)
    tested.submit(2, PROMPT, Sampling(max_tokens=3, logprobs=0))
    second = tested.plan(0.0)
    assert list(first.slots) == list(second.slots)
    assert not tested.commit(first, picks(5, logprobs={0: TokenLogprob(5, -1.0)}))
    outcome = tested.commit(second, picks(6, logprobs={0: TokenLogprob(6, -1.0)}))
    assert outcome_of(Output(2, [6], [TokenLogprob(6, -1.0)])) == outcome


@pytest.mark.parametrize(
    ("token_id", "errors", "reason"),
    [
        (-1, {0: "the logits are not numbers"}, "the logits are not numbers"),
        (VOCABULARY, {}, f"the model picked token id {VOCABULARY}, outside 0…12"),
    ],
)
def test_row_that_failed_ends_that_sequence_alone(token_id, errors, reason):
    tested = engine()
    tested.submit(1, PROMPT, GREEDY)
    tested.submit(2, PROMPT, GREEDY)
    step = tested.plan(0.0)
    outcome = tested.commit(step, picks(token_id, 5, errors=errors))
    assert outcome_of(Output(1, [], error=reason), plain=((2, 5),)) == outcome
    assert tested.statistics().running == 1


def test_blocks_of_a_failed_sequence_are_not_cached():
    tested = loop()
    tested.engine.submit(1, [7] * 12, GREEDY)
    tested.turn()
    step = tested.engine.plan(0.0)
    tested.engine.commit(step, picks(-1, errors={0: "the logits are not numbers"}))
    tested.engine.submit(2, [7] * 12 + [5], GREEDY)
    tested.engine.plan(0.0)
    assert tested.engine.statistics().prefix_hits == 0


def test_failed_step_fails_its_sequences_and_the_engine_continues():
    tested = loop(slots=1)
    tested.engine.submit(1, PROMPT, GREEDY)
    tested.engine.submit(2, PROMPT, GREEDY)
    step = tested.engine.plan(0.0)
    assert outcome_of(Output(1, [], error="out of memory")) == tested.engine.fail(step, "out of memory")
    tested.run()
    assert answer(PROMPT, GREEDY, 40)[0] == tested.token_ids_of[2]
    assert tested.engine.statistics().blocks_free == 20


def test_statistics_count_steps_prompt_tokens_and_generated_tokens():
    tested = loop()
    tested.engine.submit(1, [1] * 20, Sampling(max_tokens=3, ignore_eos=True))
    tested.run()
    assert (
        EngineStatistics(
            slots_free=4,
            blocks_free=20,
            blocks_total=20,
            steps=4,
            prompt_tokens=20,
            generated_tokens=3,
            prefix_queries=20,
            cached_tokens=20,
            step_tokens=22,
        )
        == tested.engine.statistics()
    )


def test_cache_usage_is_that_of_running_sequences():
    tested = engine()
    tested.submit(1, [1] * 16, GREEDY)
    tested.plan(0.0)
    assert (tested.statistics().cache_usage, tested.statistics().blocks_free) == (0.2, 16)


# Overlap -------------------------------------------------------------------------------------------


def test_with_overlap_a_step_is_planned_while_the_previous_one_runs():
    tested = engine(overlaps=True)
    tested.submit(1, PROMPT, GREEDY)
    first = tested.plan(0.0)
    second = tested.plan(0.0)
    assert list(second.input_ids) == [-1]  # the token that the first step has not chosen yet
    assert outcome_of(plain=((1, 5),)) == tested.commit(first, picks(5))
    assert outcome_of(plain=((1, 6),)) == tested.commit(second, picks(6))


def test_sequence_ended_by_one_step_gets_no_token_from_the_next():
    tested = engine(overlaps=True)
    tested.submit(1, PROMPT, Sampling(max_tokens=9))
    first, second = tested.plan(0.0), tested.plan(0.0)
    assert tested.commit(first, picks(EOS)).outputs[0].finish_reason == "stop"
    assert all_free(tested)
    assert not tested.commit(second, picks(6))
    assert tested.idle


def test_no_step_is_planned_after_the_one_that_makes_the_last_token():
    tested = engine(overlaps=True)
    tested.submit(1, PROMPT, Sampling(max_tokens=1))
    first = tested.plan(0.0)
    assert tested.plan(0.0) is None
    assert not tested.idle
    tested.commit(first, picks(6))
    assert tested.idle


def test_planning_a_third_concurrent_step_raises():
    tested = engine(overlaps=True)
    tested.submit(1, PROMPT, GREEDY)
    tested.plan(0.0)
    tested.plan(0.0)
    with pytest.raises(AssertionError):
        tested.plan(0.0)


# Time ----------------------------------------------------------------------------------------------


def test_time_limit_begins_with_the_first_plan_and_ends_a_sequence_wherever_it_is():
    tested = loop(slots=1)
    for key in (1, 2):
        tested.engine.submit(key, PROMPT, Sampling(max_tokens=30, ignore_eos=True), timeout_s=5.0)
    tested.now_s = 100.0
    tested.turn(0.0)
    tested.turn(5.0)
    assert tested.ends == {}
    tested.turn(0.1)
    reason = "the request took longer than 5 s"
    assert {key: Output(key, [], error=reason, code="request_timeout") for key in (1, 2)} == tested.ends
    assert all_free(tested.engine) or tested.engine.statistics().slots_free == 1
    assert tested.engine.idle


def test_deadlines_of_ended_sequences_are_forgotten():
    tested = loop()
    for key in range(500):
        tested.engine.submit(key, PROMPT, Sampling(max_tokens=1), timeout_s=1e9)
        tested.turn()
    assert len(tested.engine._live._deadlines) <= 66
