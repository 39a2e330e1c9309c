"""The kernel that samples tokens, compared with references in numpy and torch, and given invalid input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairlead._cext.cpustep import choose, variants
from fairlead.engine.sampling.row_parameters import GREEDY_BELOW, RowParameters
from fairlead.engine.sampling.sampler import choose_compiled
from fairlead.engine.sampling.torch_sampler import choose_by_torch

VARIANTS = variants("float32")
SIZES = (1, 2, 127, 128, 129, 1000, 1024, 5003)


def parameters_of(rows, rng):
    """Return random parameters for `rows` rows, with each filter on or off by row."""

    def some(values, off):
        return np.where(rng.random(rows) < 0.5, values, off)

    columns = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0, 50.0], rows),
        "top_k": some(rng.integers(1, 2000, rows), 0),
        "top_p": some(rng.random(rows), 1.0),
        "min_p": some(rng.random(rows) ** 4, 0.0),
        "seed": rng.integers(0, 2**63, rows).astype(np.uint64),
    }
    return RowParameters(columns, rng.integers(0, 10_000, rows))


def chosen(logits, row_parameters, *, variant=None, threads=1, numbers=None, masks=None, mask_rows=None):
    """Return the kernel's tokens and maxima. `row_parameters` has arrays by name; missing filters are off."""
    rows = len(logits)
    arrays = {
        "temperatures": np.ones(rows),
        "top_k": np.zeros(rows),
        "top_p": np.ones(rows),
        "least": np.full(rows, -np.inf),
        "numbers": np.full(rows, 0.5) if numbers is None else numbers,
        **row_parameters,
    }
    dtypes = {"top_k": np.int32, "top_p": np.float64, "numbers": np.float64}
    tokens, highest = np.full(rows, -7, np.int64), np.full(rows, -7, np.float32)
    choose(
        np.ascontiguousarray(logits, np.float32),
        **{name: np.asarray(array).astype(dtypes.get(name, np.float32)) for name, array in arrays.items()},
        tokens=tokens,
        highest=highest,
        greedy_below=GREEDY_BELOW,
        threads=threads,
        variant=variant,
        masks=masks,
        mask_rows=mask_rows,
    )
    return tokens.tolist(), highest


def row_parameters_of(parameters, vocabulary):
    """Return the kernel's arrays for a sampler's parameters."""
    with np.errstate(divide="ignore"):
        least = np.log(parameters.columns["min_p"])
    return {
        "temperatures": parameters.columns["temperature"],
        "top_k": parameters.columns["top_k"].clip(0, vocabulary),
        "top_p": parameters.columns["top_p"],
        "least": least,
    }


def filtered_weights(row, temperature, top_k, top_p, least):
    """Return each token's weight after the filters (float64), and whether rounding may decide it (bool)."""
    scores = (row.astype(np.float64) - row.max()) / temperature
    if 0 < top_k < len(scores):
        least = max(least, np.sort(scores)[-top_k])
    undecided = np.abs(scores - least) < 1e-5 * (1 - scores)
    weights = np.where(scores >= least - 1e-12, np.exp(scores), 0)
    if top_p < 1:
        ranked = np.sort(scores[weights > 0])[::-1]
        sums = np.exp(ranked).cumsum()
        last = min(int((sums < top_p * sums[-1]).sum()), len(ranked) - 1)
        near = np.abs(sums / sums[-1] - top_p) < 1e-5
        undecided |= np.isin(scores, ranked[near]) | np.isin(scores, ranked[1:][near[:-1]])
        weights[scores < ranked[last]] = 0
    return weights, undecided


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 60.0]),
    steps=st.sampled_from([0, 1, 4]),
    threads=st.integers(1, 3),
)
def test_kernel_chooses_what_a_float64_reference_allows(variant, size, seed, spread, steps, threads):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((5, size)) * spread).astype(np.float32)
    if steps:  # many equal logits
        logits = np.round(logits * steps) / np.float32(steps)
    parameters = parameters_of(5, rng)
    numbers = rng.random(5)
    row_parameters = row_parameters_of(parameters, size)
    tokens, highest = chosen(logits, row_parameters, variant=variant, threads=threads, numbers=numbers)
    assert logits.max(-1).tolist() == highest.tolist()
    for row, token in enumerate(tokens):
        temperature = parameters.columns["temperature"][row]
        if temperature < GREEDY_BELOW:
            assert int(logits[row].argmax()) == token
            continue
        weights, undecided = filtered_weights(
            logits[row], temperature, *(row_parameters[name][row] for name in ("top_k", "top_p", "least"))
        )
        assert weights[token] > 0 or undecided[token]
        if undecided.any():
            continue
        sums = weights.cumsum() / weights.sum()
        before = sums[token] - weights[token] / weights.sum()
        assert before - 1e-5 <= numbers[row] <= sums[token] + 1e-5


def masks_of(allowed):
    """Return the kernel's masks for `allowed` [M, V], bool; the bits beyond the vocabulary are random."""
    words = -(-allowed.shape[1] // 32)
    bits = np.random.default_rng(words).integers(0, 2, (len(allowed), 32 * words)).astype(bool)
    bits[:, : allowed.shape[1]] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    size=st.sampled_from((*SIZES, 31, 33, 4099)),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.001, 0.1, 0.9]),
    broken=st.sampled_from([0.0, 0.001, 0.1]),
    threads=st.integers(1, 3),
)
def test_masked_choice_equals_a_choice_from_logits_with_minus_infinity(
    variant, size, seed, share, broken, threads
):
    rng = np.random.default_rng(seed)
    rows, values = 8, [math.nan, math.inf, -math.inf]
    logits = (rng.standard_normal((rows, size)) * 4).astype(np.float32)
    places = rng.random((rows, size)) < broken  # allowed and forbidden ones
    logits[places] = rng.choice(values, places.sum())
    allowed = rng.random((4, size)) < share
    allowed[0] = False
    mask_rows = rng.integers(-2, 4, rows).astype(np.int32)  # any negative index: no mask
    permitted = np.where(mask_rows[:, None] >= 0, allowed[mask_rows.clip(0)], True)
    visible = np.where(permitted, logits, np.float32(-np.inf))
    options = {"variant": variant, "threads": threads, "numbers": rng.random(rows)}
    row_parameters = row_parameters_of(parameters_of(rows, rng), size)
    expected, expected_highest = chosen(visible, row_parameters, **options)
    tokens, highest = chosen(logits, row_parameters, **options, masks=masks_of(allowed), mask_rows=mask_rows)
    assert expected == tokens
    assert expected_highest.view(np.uint32).tolist() == highest.view(np.uint32).tolist()
    usable = (visible > -np.inf).any(-1)
    assert all(permitted[row, tokens[row]] for row in range(rows) if usable[row])
    oracle = np.where(np.isnan(visible).any(-1), np.nan, visible.max(-1))
    assert np.array_equal(oracle, highest, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forbidden_nan_is_ignored_and_an_empty_mask_is_reported(variant):
    logits = np.tile(np.arange(300, dtype=np.float32), (3, 1))
    logits[:, 150] = math.nan
    allowed = np.ones((2, 300), bool)
    allowed[0, 150:] = allowed[1] = False
    tokens, highest = chosen(
        logits,
        {"temperatures": [0, 1, 0]},
        variant=variant,
        masks=masks_of(allowed),
        mask_rows=np.array([0, 1, -1], np.int32),
    )
    assert tokens[0] == highest[0] == 149
    assert highest[1] == -math.inf
    assert (tokens[2], math.isnan(highest[2])) == (150, True)


def test_masks_that_do_not_fit_are_refused():
    logits, bits, rows = np.zeros((2, 100), np.float32), np.zeros((3, 4), np.uint32), np.zeros(2, np.int32)
    wrong = {
        "masks: 3 words": (bits[:, :3].copy(), rows),
        "masks: 5 words": (np.zeros((1, 5), np.uint32), rows),
        "mask_rows: 3 for 2": (bits, np.zeros(3, np.int32)),
        "mask_rows: 3, of 3 masks": (bits, np.array([0, 3], np.int32)),
        "mask_rows: 0, of 0 masks": (bits[:0], rows),
        "mask_rows: 0 for 2": (bits, None),
        "contiguous": (bits.T.copy().T, rows),
        "dtype": (bits.astype(np.uint64), rows),
        "dimensions": (bits[0], rows),
    }
    for message, (masks, mask_rows) in wrong.items():
        with pytest.raises(ValueError, match=message):
            chosen(logits, {}, masks=masks, mask_rows=mask_rows)
    unmasked = np.full(2, -1, np.int32)
    assert chosen(logits, {}, masks=bits[:0], mask_rows=unmasked)[0] == chosen(logits, {})[0]
    assert chosen(logits[:0], {}, masks=bits, mask_rows=rows[:0])[0] == []


@pytest.mark.parametrize("size", [5003, 151_936])
def test_kernel_and_torch_draw_the_same_tokens_from_the_same_seeds(size):
    rng = np.random.default_rng(size)
    logits = (rng.standard_normal((12, size)) * 6).astype(np.float32)
    parameters = parameters_of(12, rng)
    expected, highest = choose_by_torch(torch.from_numpy(logits), parameters)
    tokens, tops = choose_compiled(logits, parameters)
    assert expected.tolist() == tokens.tolist()
    assert np.array_equal(highest.numpy(), tops)


@pytest.mark.parametrize("variant", VARIANTS)
def test_choice_does_not_depend_on_threads_or_other_rows(variant):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((40, 3000)) * 3
    row_parameters = row_parameters_of(parameters_of(40, rng), 3000)
    numbers = rng.random(40)
    expected = chosen(logits, row_parameters, variant=variant, numbers=numbers)[0]
    for threads in (2, 3, 7):
        assert (
            expected == chosen(logits, row_parameters, variant=variant, threads=threads, numbers=numbers)[0]
        )
    alone = [
        chosen(
            logits[row : row + 1],
            {name: array[row : row + 1] for name, array in row_parameters.items()},
            variant=variant,
            numbers=numbers[row : row + 1],
        )[0][0]
        for row in range(40)
    ]
    assert expected == alone


@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_0_and_1_choose_the_first_and_last_possible_token(variant):
    logits = np.full((2, 1000), -np.inf)
    logits[:, [17, 400, 999]] = 0.0
    tokens, _ = chosen(logits, {}, variant=variant, numbers=[0.0, 1.0])
    assert tokens == [17, 999]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("index", [0, 15, 16, 130, 998])
def test_nan_and_infinities_are_reported_and_leave_other_rows_unchanged(variant, index):
    rng = np.random.default_rng(index)
    logits = rng.standard_normal((4, 999)).astype(np.float32)
    expected = chosen(logits, {}, variant=variant)[0]
    logits[0, index] = math.nan
    logits[1, index] = math.inf
    logits[3] = -math.inf
    tokens, highest = chosen(logits, {}, variant=variant, threads=2)
    assert math.isnan(highest[0])
    assert (index, math.inf) == (tokens[1], highest[1])
    assert expected[2] == tokens[2]
    assert -math.inf == highest[3]


NONSENSE = [math.nan, math.inf, -math.inf, -1.0, 1e300, 1e-300, 5.0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("column", ["temperatures", "top_p", "least", "numbers"])
def test_invalid_parameters_still_choose_a_valid_token_and_leave_other_rows_unchanged(variant, column):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((len(NONSENSE) + 1, 700)).astype(np.float32)
    logits[:, 5:300] = -np.inf
    usual = {"temperatures": 1.0, "top_p": 0.9, "least": -9.0, "top_k": 50, "numbers": 0.5}
    plain = {name: np.full(len(logits), value) for name, value in usual.items()}
    expected = chosen(logits, plain, variant=variant)[0]
    values = np.full(len(logits), usual[column])
    with np.errstate(over="ignore"):
        values[:-1] = NONSENSE
        tokens, _ = chosen(logits, {**plain, column: values}, variant=variant)
    assert expected[-1] == tokens[-1]
    assert all(0 <= token < 700 for token in tokens)


def test_arrays_that_do_not_fit_are_refused():
    logits = np.zeros((2, 10), np.float32)
    for name in ("temperatures", "top_k", "top_p", "least", "numbers"):
        with pytest.raises(ValueError, match=name):
            chosen(logits, {name: np.zeros(3)})
    with pytest.raises(ValueError, match="variant"):
        chosen(logits, {}, variant="abacus")
    with pytest.raises(ValueError, match="logits"):
        chosen(np.zeros((2, 0), np.float32), {})
    assert chosen(np.zeros((0, 10), np.float32), {})[0] == []
