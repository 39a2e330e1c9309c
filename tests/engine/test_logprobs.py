"""Log-probabilities of the CPU kernel's logits are those of torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fairlead.engine.sampling.logprobs import find_highest, log_probabilities

VALUES = st.sampled_from([-np.inf, -3.0, 0.0, 0.5, 1.0, 7.0])


@given(arrays.arrays(np.float32, st.integers(1, 700), elements=VALUES), st.integers(0, 12))
def test_highest_values_are_found_in_order_and_equal_ones_by_index(values, count):
    count = min(count, len(values))
    assert np.argsort(-values, kind="stable")[:count].tolist() == find_highest(values, count).tolist()


@pytest.mark.parametrize("size", [3, 320, 5000])
def test_columns_are_those_of_torch(size):
    logits = np.random.default_rng(size).normal(0, 4, (6, size)).astype(np.float32)
    logits[1, 2] = np.inf
    logits[2, :2] = -np.inf
    ids = np.array([0, 2, 1, 1, 0, size - 1])
    expected = log_probabilities(torch.from_numpy(logits.copy()), torch.from_numpy(ids), 5)
    for ours, theirs in zip(log_probabilities(logits, ids, 5), expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_row_with_nan_has_nan_and_others_are_unaffected():
    logits = np.zeros((2, 300), np.float32)
    logits[0, 7] = np.nan
    chosen = log_probabilities(logits, np.array([1, 1]), 3)[0]
    assert np.isnan(chosen[0])
    assert chosen[1] == pytest.approx(-np.log(300), abs=1e-6)
