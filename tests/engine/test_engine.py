from collections.abc import Callable
from itertools import count

import pytest

from engine.fake_model import EOS, VOCABULARY, FakeRunner, answer, next_token
from fairlead.engine.engine import Engine
from fairlead.engine.sequence import Plan
from fairlead.engine.step import Pick
from fairlead.job import Sampling, TokenLogprob
from fairlead.worker.wire import EngineStatistics, Output

PROMPT = [3, 1, 4]
GREEDY = Sampling(max_tokens=5, ignore_eos=True)


class ScriptedRunner:
    """Picks what a function of the plan says."""

    def __init__(self, picks: Callable[[Plan], list[Pick | None]]) -> None:
        self._picks = picks

    def launch(self, plan: Plan) -> "ScriptedRunner":
        self._plan = plan
        return self

    def wait(self) -> list[Pick | None]:
        return self._picks(self._plan)


def engine(runner=None, *, max_model_len=40, blocks_total=20, slots=4, **more) -> Engine:
    return Engine(
        runner or FakeRunner(block_size=4),
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


def saying(*token_ids: int) -> ScriptedRunner:
    """A runner that gives every sequence these tokens, in turn."""
    return ScriptedRunner(
        lambda plan: [
            Pick(token_ids[chunk.sequence.output_length]) if chunk.samples else None for chunk in plan.chunks
        ]
    )


def run(engine: Engine) -> list[Output]:
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    return outputs


def all_free(engine: Engine) -> bool:
    counts = engine.statistics()
    return (counts.running, counts.pending, counts.slots_free, counts.blocks_free) == (0, 0, 4, 20)


def test_a_sequence_gives_one_token_a_step_and_then_ends():
    tested = engine()
    tested.submit(7, list(PROMPT), GREEDY)
    expected, _ = answer(PROMPT, GREEDY, longest=40)
    assert [
        *(Output(7, [token_id]) for token_id in expected[:-1]),
        Output(7, expected[-1:], finish_reason="length"),
    ] == run(tested)
    assert all_free(tested)


def test_a_fresh_engine_is_idle_and_has_no_plan():
    tested = engine()
    assert tested.idle
    assert tested.plan() is None
    assert tested.step() == []


def test_an_end_of_sequence_token_ends_it_and_is_named():
    tested = engine(saying(5, EOS))
    tested.submit(1, list(PROMPT), Sampling(max_tokens=9))
    assert run(tested) == [Output(1, [5]), Output(1, [EOS], finish_reason="stop", stop_token=EOS)]


def test_ignore_eos_goes_on_to_max_tokens():
    tested = engine(saying(EOS, EOS, EOS))
    tested.submit(1, list(PROMPT), Sampling(max_tokens=3, ignore_eos=True))
    assert [None, None, "length"] == [output.finish_reason for output in run(tested)]


def test_a_stop_token_id_ends_it_even_when_eos_is_ignored():
    tested = engine(saying(5, 6, 7))
    tested.submit(1, list(PROMPT), Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=(6,)))
    assert run(tested)[-1] == Output(1, [6], finish_reason="stop", stop_token=6)


def test_no_end_is_accepted_before_min_tokens():
    tested = engine(saying(EOS, 6, EOS, EOS))
    tested.submit(1, list(PROMPT), Sampling(max_tokens=9, min_tokens=3, stop_token_ids=(6,)))
    assert [None, None, "stop"] == [output.finish_reason for output in run(tested)]


def test_a_stop_token_that_is_also_the_last_allowed_one_is_a_stop():
    tested = engine(saying(EOS))
    tested.submit(1, list(PROMPT), Sampling(max_tokens=1))
    assert run(tested) == [Output(1, [EOS], finish_reason="stop", stop_token=EOS)]


def test_max_tokens_is_cut_to_what_the_context_leaves():
    tested = engine(max_model_len=8)
    tested.submit(1, list(PROMPT), Sampling(max_tokens=1000, ignore_eos=True))
    assert len(run(tested)) == 5


def test_max_tokens_is_cut_to_what_the_whole_cache_holds():
    tested = engine(blocks_total=2)
    tested.submit(1, list(PROMPT), Sampling(max_tokens=1000, ignore_eos=True))
    assert len(run(tested)) == 2 * 4 - 3


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([1] * 40, GREEDY, "the prompt has 40 tokens; with one of output, 40 fit"),
        ([1, VOCABULARY], GREEDY, f"token id {VOCABULARY}, outside 0…12"),
        ([1, -1], GREEDY, "token id -1"),
        (PROMPT, Sampling(max_tokens=0), "max_tokens is 0"),
        (PROMPT, Sampling(max_tokens=4, logit_bias={VOCABULARY: 1.0}), "logit_bias names a token id"),
    ],
)
def test_what_can_never_run_fails_alone_at_the_next_step(prompt, sampling, reason):
    tested = engine()
    tested.submit(1, list(PROMPT), GREEDY)
    tested.submit(2, list(prompt), sampling)
    assert not tested.idle
    outputs = run(tested)
    (refusal,) = (output for output in outputs if output.key == 2)
    assert refusal in outputs[:2]
    assert reason in str(refusal.error)
    assert [output.token_ids[0] for output in outputs if output.key == 1] == answer(PROMPT, GREEDY, 40)[0]
    assert all_free(tested)


def test_a_refusal_is_told_by_a_step_without_work():
    tested = engine()
    tested.submit(2, [], GREEDY)
    (refusal,) = tested.step()
    assert refusal.key == 2
    assert tested.idle


def test_a_refused_sequence_that_is_aborted_says_nothing():
    tested = engine()
    tested.submit(2, [], GREEDY)
    tested.abort(2)
    assert tested.idle
    assert tested.step() == []


def test_an_abort_frees_at_once_between_steps():
    tested = engine()
    tested.submit(1, list(PROMPT), GREEDY)
    tested.step()
    assert not all_free(tested)
    tested.abort(1)
    assert all_free(tested)
    assert tested.idle


def test_an_abort_while_its_step_is_under_way_frees_at_the_commit_and_says_nothing():
    tested = engine()
    tested.submit(1, list(PROMPT), GREEDY)
    tested.submit(2, list(PROMPT), GREEDY)
    plan = tested.plan()
    assert plan is not None
    tested.abort(1)
    held = tested.statistics()
    assert (2, 2) == (held.running, held.slots_free)
    outputs = tested.commit(plan, [Pick(5), Pick(6)])
    assert outputs == [Output(2, [6])]
    freed = tested.statistics()
    assert (1, 3) == (freed.running, freed.slots_free)


def test_an_abort_of_a_waiting_sequence_takes_it_out_of_line():
    tested = engine(slots=1)
    tested.submit(1, list(PROMPT), GREEDY)
    tested.submit(2, list(PROMPT), GREEDY)
    tested.step()
    tested.abort(2)
    assert tested.statistics().pending == 0
    assert {1} == {output.key for output in run(tested)}


def test_aborts_of_unknown_and_of_ended_sequences_are_ignored():
    tested = engine()
    tested.submit(1, list(PROMPT), GREEDY)
    run(tested)
    tested.abort(1)
    tested.abort(99)
    assert all_free(tested)


def test_a_sequence_without_a_seed_is_given_one_and_a_seed_is_kept():
    seeds = {}

    def picks(plan: Plan) -> list[Pick | None]:
        seeds.update({chunk.sequence.key: chunk.sequence.seed for chunk in plan.chunks})
        return [Pick(1) for _ in plan.chunks]

    tested = engine(ScriptedRunner(picks))
    tested.submit(1, list(PROMPT), Sampling(max_tokens=1))
    tested.submit(2, list(PROMPT), Sampling(max_tokens=1, seed=5))
    tested.submit(3, list(PROMPT), Sampling(max_tokens=1))
    run(tested)
    assert seeds == {1: 100, 2: 5, 3: 101}


def test_log_probabilities_come_with_their_token():
    logprob = TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0)))
    tested = engine(ScriptedRunner(lambda _plan: [Pick(5, logprob)]))
    tested.submit(1, list(PROMPT), Sampling(max_tokens=1, logprobs=2))
    assert run(tested) == [Output(1, [5], [logprob], finish_reason="length")]


def test_a_picks_error_ends_that_sequence_alone():
    def picks(plan: Plan) -> list[Pick | None]:
        return [
            Pick(0, error="the logits are not numbers") if chunk.sequence.key == 1 else Pick(5)
            for chunk in plan.chunks
        ]

    tested = engine(ScriptedRunner(picks))
    tested.submit(1, list(PROMPT), GREEDY)
    tested.submit(2, list(PROMPT), GREEDY)
    first, second, *_ = run(tested)
    assert first == Output(1, [], error="the logits are not numbers")
    assert second == Output(2, [5])
    assert all_free(tested)


def test_a_step_that_raises_fails_its_own_sequences_and_the_engine_goes_on():
    broken = iter([True])
    reported = []

    def picks(plan: Plan) -> list[Pick | None]:
        if next(broken, False):
            raise RuntimeError("out of memory")
        return [Pick(next_token(chunk.sequence.token_ids)) for chunk in plan.chunks]

    tested = engine(ScriptedRunner(picks), slots=1, report_failure=reported.append)
    tested.submit(1, list(PROMPT), GREEDY)
    tested.submit(2, list(PROMPT), GREEDY)
    (failure,) = tested.step()
    assert failure == Output(1, [], error="the engine's step failed: RuntimeError: out of memory")
    assert ["out of memory"] == [str(error) for error in reported]
    assert [output.token_ids[0] for output in run(tested)] == answer(PROMPT, GREEDY, 40)[0]
    assert tested.statistics().blocks_free == 20


def test_the_third_failed_step_in_a_row_is_raised():
    def picks(_plan: Plan) -> list[Pick | None]:
        raise RuntimeError("the device is gone")

    tested = engine(ScriptedRunner(picks), slots=1)
    for key in range(3):
        tested.submit(key, list(PROMPT), GREEDY)
    tested.step()
    tested.step()
    with pytest.raises(RuntimeError, match="the device is gone"):
        tested.step()


def test_a_good_step_between_them_forgives_failed_steps():
    bad = iter([True, True, False, True, True, False])

    def picks(plan: Plan) -> list[Pick | None]:
        if next(bad):
            raise RuntimeError("hiccup")
        return [Pick(1) for _ in plan.chunks]

    tested = engine(ScriptedRunner(picks), slots=1)
    for key in range(6):
        tested.submit(key, list(PROMPT), Sampling(max_tokens=1))
    assert [True, True, False, True, True, False] == [output.error is not None for output in run(tested)]


def test_statistics_count_steps_prompt_tokens_and_generated_tokens():
    tested = engine()
    tested.submit(1, [1] * 20, Sampling(max_tokens=3, ignore_eos=True))
    run(tested)
    assert tested.statistics() == EngineStatistics(
        slots_free=4, blocks_free=20, blocks_total=20, steps=4, prompt_tokens=20, generated_tokens=3
    )
