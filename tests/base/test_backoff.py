"""The pauses after failures in a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.backoff import Backoff


def test_pause_doubles_up_to_the_bound_and_begins_again_after_a_success():
    backoff = Backoff(0.5, 3)
    assert [backoff.take() for _ in range(5)] == [0.5, 1, 2, 3, 3]
    backoff.reset()
    assert [backoff.take(), backoff.pause_s] == [0.5, 1]


@given(st.floats(0.001, 100), st.floats(1, 1000), st.integers(1, 50))
def test_pause_after_any_number_of_failures_is_a_power_of_two_of_the_first(first_s, factor, failures):
    longest_s = first_s * factor
    backoff = Backoff(first_s, longest_s)
    taken = [backoff.take() for _ in range(failures)]
    assert taken == pytest.approx([min(first_s * 2**number, longest_s) for number in range(failures)])
