"""The forecast of memory: a formula against counting it out, and what it makes of the past."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.engine.admission import FILL, Admission, PastLengths, Peak

rows = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 80)), max_size=12)


def array(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def counted_out(rows: list[tuple[int, int]]) -> int:
    """Let every row grow by one a step and go at its end; the most there ever was."""
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
def test_the_peak_is_what_counting_it_out_gives(rows):
    assert counted_out(rows) == peak_of(rows).tokens


@given(rows, rows)
def test_one_row_more_is_looked_up_as_it_would_be_computed_anew(rows, more):
    peak = peak_of(rows)
    for row in more:
        assert peak_of([*rows, row]).tokens == peak.with_row(*row)
        peak.add(*row)
        rows = [*rows, row]
        assert peak_of(rows).tokens == peak.tokens


def guesses(predictor: PastLengths, outputs: list[int], limit: int = 10_000) -> list[int]:
    keys = limits = array(*[limit] * len(outputs))
    return predictor.remaining(keys, array(*outputs), limits).tolist()


def having_seen(*lengths: int) -> PastLengths:
    predictor = PastLengths()
    for _ in range(1000 // len(lengths)):
        for length in lengths:
            predictor.learn(length)
    return predictor


def test_a_guess_is_a_length_of_the_past_less_what_was_said_already():
    predictor = having_seen(100)
    assert [100, 60, 1] == guesses(predictor, [0, 40, 99])


def test_who_said_much_is_compared_with_those_that_said_more():
    predictor = having_seen(10, 1000)
    assert [990] == guesses(predictor, [10])


def test_who_said_more_than_anybody_will_say_half_as_much_again():
    predictor = having_seen(100)
    assert [50, 100] == guesses(predictor, [100, 200])
    assert [16] == guesses(having_seen(10), [20])


def test_no_guess_exceeds_what_is_allowed():
    assert [7] == guesses(having_seen(100), [0], limit=7)


def test_lengths_of_long_ago_are_forgotten():
    predictor = having_seen(500)
    for _ in range(1000):
        predictor.learn(20)
    assert [20] == guesses(predictor, [0])


def test_a_regret_makes_guesses_more_careful_and_good_ends_make_them_bolder():
    lengths = range(1, 1001)
    predictor = having_seen(*lengths)
    (bold,) = guesses(predictor, [0])
    for _ in range(100):
        predictor.regret()
    (careful,) = guesses(predictor, [0])
    for length in lengths:
        predictor.learn(length)
    assert bold < careful
    assert [bold] == guesses(predictor, [0])


def admission(*, capacities=(1000,), ceilings=(None,)) -> Admission:
    return Admission(list(capacities), list(ceilings), having_seen(100))


def test_whoever_comes_may_enter_up_to_97_percent_of_the_cache():
    rule = admission()
    rule.begin(array(1), array(300), array(0), array(1000))  # 400 when it ends
    assert not rule.admit(2, int(1000 * FILL) - 500 + 1, 0, 1000)
    assert rule.admit(2, int(1000 * FILL) - 500, 0, 1000)


def test_each_that_was_admitted_counts_for_the_next():
    rule = admission()
    rule.begin(array(), array(), array(), array())
    assert [True] * 4 + [False] == [rule.admit(key, 140, 0, 1000) for key in range(5)]


def test_blocks_that_are_shared_count_once():
    rule = admission()
    rule.begin(array(1, 2), array(400, 400), array(0, 0), array(9, 9), shared=300)
    assert rule.admit(3, 200, 0, 9)


def test_the_pinned_count_with_all_they_are_allowed():
    for pinned in (False, True):
        rule = admission()
        rule.begin(array(1), array(500), array(0), array(500), reserved=np.array([pinned]))
        assert pinned is not rule.admit(2, 100, 0, 500)


@pytest.mark.parametrize(("ceiling", "fits"), [(None, False), (120, True), (330, False)])
def test_in_a_group_with_a_window_all_are_taken_to_reach_their_ceiling(ceiling, fits):
    rule = admission(capacities=(10_000, 1000), ceilings=(None, ceiling))
    rule.begin(array(1, 2), array(400, 400), array(0, 0), array(900, 900))
    assert fits is rule.admit(3, 400, 0, 900)


def test_what_fits_at_its_longest_needs_no_forecast():
    assert admission().fits_whole(970)
    assert not admission().fits_whole(971)
    assert not admission(capacities=(10_000, 100), ceilings=(None, 50)).fits_whole(98)
