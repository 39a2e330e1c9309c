"""The GPU's sampling kernels, compared with the portable functions.

Thresholds are found by bisection and compared with those found by sorting.
"""

import numpy as np
import pytest
import torch

from engine.interpreted import interpreted
from fairlead.engine.device_sampling import thresholds
from fairlead.engine.device_sampling import without_forbidden as without_forbidden_by_kernel
from fairlead.engine.sampling import torch_sampler as draws
from fairlead.engine.sampling.token_masks import TokenMasks
from fairlead.engine.sampling.torch_sampler import without_forbidden

pytestmark = interpreted


def scores_of(rows, vocabulary, seed, *, ties):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocabulary, generator=generator) * 3
    if ties:
        scores = scores.round()
    scores[:, ::7] = float("-inf")
    return scores - scores.max(-1, keepdim=True).values


def accepted(scores, found):
    return (scores >= found[:, None]).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_accepted_tokens_match_those_of_sorting(launches, seed):
    rng = np.random.default_rng(seed)
    vocabulary = [5, 300, 5000][seed]
    top_k, top_p = (
        rng.permutation(column)
        for column in ([0, 1, 3, 40 % vocabulary, vocabulary, 2], [1.0, 0.9, 0.5, 0.03, 1e-9, 0.99])
    )
    top_k[top_p == 1] = 2  # the portable function is never called for rows with neither filter
    least = torch.from_numpy(rng.choice([-np.inf, -2.5], 6)).float()
    scores = scores_of(6, vocabulary, seed, ties=seed == 1)
    expected = draws._top(scores, least.clone(), top_k, top_p)
    assert accepted(scores, expected) == accepted(scores, thresholds(scores, least, top_k, top_p))


def test_row_of_nan_does_not_change_the_threshold_of_another_row(launches):
    scores = scores_of(2, 300, 1, ties=False)
    alone = thresholds(scores[1:], torch.full((1,), -torch.inf), np.array([5]), np.array([0.8]))
    scores[0] = float("nan")
    both = thresholds(scores, torch.full((2,), -torch.inf), np.array([5, 5]), np.array([0.8, 0.8]))
    assert alone[0] == both[1]
    assert [name for name, *_ in launches] == ["find_thresholds"] * 2


@pytest.mark.parametrize("share", [0.0, 1e-300])
def test_top_p_near_zero_accepts_only_the_likeliest_token(launches, share):
    scores = scores_of(1, 300, 2, ties=False)
    found = thresholds(scores, torch.full((1,), -torch.inf), np.array([0]), np.array([share]))
    assert sum(accepted(scores, found)[0]) == 1


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 1000, 4096, 5003])
def test_masked_logits_are_minus_infinity_where_a_mask_has_no_bit(launches, vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((5, vocabulary)).astype(np.float32)
    logits[rng.random((5, vocabulary)) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    mask_of = np.array([2, -1, 0, 0, 1], np.int32)
    bits = rng.integers(0, 2**32, (3, -(-vocabulary // 32)), np.uint32)
    bits[1] = 0
    places = np.arange(vocabulary)
    allowed = (bits[:, places // 32] >> (places % 32).astype(np.uint32) & 1).astype(bool)
    expected = np.where((mask_of[:, None] < 0) | allowed[mask_of], logits, np.float32(-np.inf))
    portable = without_forbidden(torch.from_numpy(logits), TokenMasks(bits, mask_of, {}))
    by_kernel = without_forbidden_by_kernel(
        torch.from_numpy(logits), torch.from_numpy(bits.view(np.int32)), torch.from_numpy(mask_of)
    )
    assert [name for name, *_ in launches] == ["apply_token_masks"]
    for result in (portable, by_kernel):
        assert np.array_equal(expected.view(np.uint32), result.numpy().view(np.uint32))


def test_masked_logits_leave_the_given_ones_unchanged(launches):
    logits = torch.ones((2, 40))
    views = logits.T.contiguous().T  # not contiguous
    none = torch.zeros((1, 2), dtype=torch.int32), torch.tensor([0, -1], dtype=torch.int32)
    masked = without_forbidden_by_kernel(views, *none)
    assert torch.equal(logits, torch.ones((2, 40)))
    assert torch.equal(masked, torch.stack([torch.full((40,), -torch.inf), torch.ones(40)]))
