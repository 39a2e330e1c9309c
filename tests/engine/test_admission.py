"""The predicted peak memory, compared with a simulation, and the predictions from past output lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.engine.admission import FILL, PastLengths, Peak, SequenceAdmission

rows = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 80)), max_size=12)


def array(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def simulated_peak(rows: list[tuple[int, int]]) -> int:
    """Simulate rows that grow by one token a step and then end; return the largest total."""
    return max(
        (
            sum(current + step for remaining, current in rows if remaining >= step)
            for step in range(max((remaining for remaining, _ in rows), default=0) + 1)
        ),
        default=0,
    )


def peak_of(rows: list[tuple[int, int]]) -> Peak:
    return Peak(array(*(row[0] for row in rows)), array(*(row[1] for row in rows)))


@given(rows)
def test_peak_matches_a_step_by_step_simulation(rows):
    assert simulated_peak(rows) == peak_of(rows).tokens


@given(rows, rows)
def test_peak_with_one_more_row_matches_a_full_computation(rows, more):
    peak = peak_of(rows)
    for row in more:
        assert peak_of([*rows, row]).tokens == peak.with_row(*row)
        peak.add(*row)
        rows = [*rows, row]
        assert peak_of(rows).tokens == peak.tokens


def predictions_of(predictor: PastLengths, outputs: list[int], limit: int = 10_000) -> list[int]:
    keys = limits = array(*[limit] * len(outputs))
    return predictor.remaining(keys, array(*outputs), limits).tolist()


def predictor_after(*lengths: int) -> PastLengths:
    predictor = PastLengths()
    for _ in range(1000 // len(lengths)):
        for length in lengths:
            predictor.learn(length)
    return predictor


def test_prediction_is_a_past_length_minus_the_output_so_far():
    predictor = predictor_after(100)
    assert predictions_of(predictor, [0, 40, 99]) == [100, 60, 1]


def test_prediction_uses_only_past_outputs_longer_than_the_current_one():
    predictor = predictor_after(10, 1000)
    assert predictions_of(predictor, [10]) == [990]


def test_output_longer_than_all_past_ones_is_predicted_to_grow_by_half():
    predictor = predictor_after(100)
    assert predictions_of(predictor, [100, 200]) == [50, 100]
    assert predictions_of(predictor_after(10), [20]) == [16]


def test_prediction_does_not_exceed_the_limit():
    assert predictions_of(predictor_after(100), [0], limit=7) == [7]


def test_old_lengths_are_forgotten():
    predictor = predictor_after(500)
    for _ in range(1000):
        predictor.learn(20)
    assert predictions_of(predictor, [0]) == [20]


def test_preemptions_raise_predictions_and_completions_lower_them_again():
    lengths = range(1, 1001)
    predictor = predictor_after(*lengths)
    (permissive,) = predictions_of(predictor, [0])
    for _ in range(100):
        predictor.on_preemption()
    (conservative,) = predictions_of(predictor, [0])
    for length in lengths:
        predictor.learn(length)
    assert permissive < conservative
    assert [permissive] == predictions_of(predictor, [0])


def admission(*, capacities=(1000,), ceilings=(None,)) -> SequenceAdmission:
    return SequenceAdmission(list(capacities), list(ceilings), predictor_after(100))


def test_sequences_are_admitted_up_to_97_percent_of_the_cache():
    rule = admission()
    rule.begin(array(1), array(300), array(0), array(1000))  # 400 when it ends
    assert not rule.admit(2, int(1000 * FILL) - 500 + 1, 0, 1000)
    assert rule.admit(2, int(1000 * FILL) - 500, 0, 1000)


def test_admitted_sequences_count_for_the_next_decision():
    rule = admission()
    rule.begin(array(), array(), array(), array())
    assert [rule.admit(key, 140, 0, 1000) for key in range(5)] == [True] * 4 + [False]


def test_shared_blocks_count_once():
    rule = admission()
    rule.begin(array(1, 2), array(400, 400), array(0, 0), array(9, 9), shared=300)
    assert rule.admit(3, 200, 0, 9)


def test_pinned_sequences_count_with_their_longest_possible_output():
    for pinned in (False, True):
        rule = admission()
        rule.begin(array(1), array(500), array(0), array(500), reserved=np.array([pinned]))
        assert pinned is not rule.admit(2, 100, 0, 500)


@pytest.mark.parametrize(("ceiling", "fits"), [(None, False), (120, True), (330, False)])
def test_window_group_counts_every_sequence_at_its_ceiling(ceiling, fits):
    rule = admission(capacities=(10_000, 1000), ceilings=(None, ceiling))
    rule.begin(array(1, 2), array(400, 400), array(0, 0), array(900, 900))
    assert fits is rule.admit(3, 400, 0, 900)


def test_tokens_that_fit_at_their_longest_need_no_prediction():
    assert admission().always_fits(970)
    assert not admission().always_fits(971)
    assert not admission(capacities=(10_000, 100), ceilings=(None, 50)).always_fits(98)
