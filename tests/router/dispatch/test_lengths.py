"""Predicted lengths of answers, and the cost of their tokens."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.router.dispatch.lengths import (
    ENOUGH_ANSWERS,
    KEPT_ANSWERS,
    UNKNOWN_TOKENS,
    LengthPredictor,
    TokenWeights,
)
from fairlead.router.dispatch.window import SlidingWindow

LENGTHS = st.integers(0, 500)


def predictor(*answers: int, tenant: str = "A") -> LengthPredictor:
    lengths = LengthPredictor()
    for answer in answers:
        lengths.observe(tenant, "m", answer)
    return lengths


def test_prediction_is_the_median_of_past_answers():
    assert predictor(10, 50, 30).predict("A", "m", max_tokens=1000) == 30.0


def test_prediction_of_an_even_number_of_answers_is_the_mean_of_the_middle_two():
    assert predictor(10, 20, 30, 40).predict("A", "m", max_tokens=1000) == 25.0


def test_past_answers_shorter_than_the_current_one_are_ignored():
    lengths = predictor(10, 20, 30, 40, 50)
    assert [lengths.predict("A", "m", so_far=so_far, max_tokens=1000) for so_far in (0, 10, 20, 30, 40)] == [
        30.0,
        35.0,
        40.0,
        45.0,
        50.0,
    ]


def test_answer_longer_than_all_past_ones_is_predicted_to_double():
    assert predictor(10, 50, 30).predict("A", "m", so_far=80, max_tokens=1000) == 160.0


def test_prediction_is_at_most_max_tokens():
    assert predictor(10, 50, 30).predict("A", "m", max_tokens=7) == 7.0
    assert LengthPredictor().predict("A", "m", max_tokens=7) == 7.0


def test_prediction_without_past_answers_is_a_default():
    assert LengthPredictor().predict("A", "m", max_tokens=100_000) == UNKNOWN_TOKENS


def test_tenants_own_answers_are_used_once_there_are_enough():
    lengths = predictor(*[100] * 50, tenant="B")
    for _ in range(ENOUGH_ANSWERS - 1):
        lengths.observe("A", "m", 10)
    assert lengths.predict("A", "m", max_tokens=1000) == 100.0
    lengths.observe("A", "m", 10)
    assert lengths.predict("A", "m", max_tokens=1000) == 10.0
    assert lengths.predict("C", "m", max_tokens=1000) == 100.0


def test_tenants_first_answers_are_too_few_to_predict_the_next():
    lengths = predictor(*[100] * 50, tenant="B")
    for _ in range(19):
        lengths.observe("A", "m", 10)
        assert lengths.predict("A", "m", max_tokens=1000) == 100.0


def test_each_model_has_its_own_predictions():
    lengths = predictor(10)
    lengths.observe("A", "other", 99)
    assert lengths.predict("A", "m", max_tokens=1000) == 10.0


def test_only_the_last_answers_are_used():
    lengths = predictor(*[900] * KEPT_ANSWERS, *[10] * KEPT_ANSWERS)
    assert lengths.predict("A", "m", max_tokens=1000) == 10.0


def test_least_recently_observed_model_is_forgotten():
    lengths = LengthPredictor(models=2, tenants=2)
    for model in ("old", "m", "old", "new"):
        lengths.observe("A", model, 10)
    known = [lengths.predict("A", model, max_tokens=1000) for model in ("old", "m", "new")]
    assert known == [10.0, UNKNOWN_TOKENS, 10.0]


@given(
    st.lists(LENGTHS, max_size=60), st.lists(LENGTHS, min_size=2, max_size=2).map(sorted), st.integers(1, 500)
)
def test_longer_answer_so_far_never_lowers_the_prediction(answers, so_far, max_tokens):
    lengths = predictor(*answers)
    fewer, more = (lengths.predict("A", "m", so_far=tokens, max_tokens=max_tokens) for tokens in so_far)
    assert 0 <= fewer <= more <= max_tokens
    assert more >= min(so_far[1], max_tokens)


@pytest.mark.parametrize(("prompt", "output", "cost"), [(0, 0, 0.0), (100, 0, 100.0), (100, 50, 200.0)])
def test_output_token_costs_as_much_as_two_prompt_tokens(prompt, output, cost):
    assert cost == TokenWeights().cost(prompt, output)


@given(st.lists(LENGTHS, min_size=1), st.integers(1, 30), LENGTHS)
def test_window_keeps_only_its_last_values(values, kept, above):
    window = SlidingWindow(kept=kept)
    for value in values:
        window.add(value)
    last = sorted(values[-kept:])
    longer = [value for value in last if value > above]
    assert len(last) == len(window)
    assert (median(longer) if longer else None) == window.median_above(above)
    assert last[-1] == window.quantile(1.0)


def test_quantile_allows_for_one_more_value():
    window = SlidingWindow(kept=100)
    for value in range(1, 20):
        window.add(value)
    assert (window.quantile(0.5), window.quantile(0.9), window.quantile(0.99)) == (10, 18, 19)
