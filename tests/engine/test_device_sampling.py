"""The GPU's sampling thresholds, found by bisection, compared with the portable ones, found by sorting."""

import numpy as np
import pytest
import torch

from engine.interpreted import interpreted
from fairlead.engine.device_sampling import thresholds
from fairlead.engine.sampling import torch_sampler as draws

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


@pytest.mark.parametrize("seed", range(4))
def test_accepted_tokens_match_those_of_sorting(launches, seed):
    rng = np.random.default_rng(seed)
    vocabulary = [5, 300, 300, 5000][seed]
    top_k, top_p = (
        rng.permutation(column)
        for column in ([0, 1, 3, 40 % vocabulary, vocabulary, 2], [1.0, 0.9, 0.5, 0.03, 1e-9, 0.99])
    )
    top_k[top_p == 1] = 2  # the portable function is never called for rows with neither filter
    least = torch.from_numpy(rng.choice([-np.inf, -2.5], 6)).float()
    scores = scores_of(6, vocabulary, seed, ties=seed == 2)
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
