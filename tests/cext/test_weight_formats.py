"""The formats that the CPU step keeps weights in: logits equal those of a network with the rounded weights.

The rules hold for every format; a new one needs its rule in `ROUNDED`.
"""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cext.cpu_step_oracle import (
    Network,
    Oracle,
    SequenceDriver,
    draw_weights,
    from_bfloat16,
    new_model,
    pack_all,
    relative_error,
    to_bfloat16,
)
from cext.test_cpu_step import KERNELS, SHAPES, TOLERANCE, add_sequences, append_random_tokens
from fairlead._cext.cpustep import formats

SOURCES = Path(__file__).resolve().parents[2] / "cext"
DTYPES = ("float32", "bfloat16")
NARROW = [name for name in formats("float32") if name != "none"]


def int8(values, _dtype):
    """Round each row to integers up to ±127, times a scale."""
    scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
    return np.rint(values / np.where(scales, scales, 1)) * scales


def int4(values, dtype):
    """Round each group of 32 inputs to sixteen equal steps, from its smallest weight to its largest one."""
    groups = [values[:, at : at + 32] for at in range(0, values.shape[1], 32)]
    rounded = np.concatenate([int4_group(group) for group in groups], 1)
    return from_bfloat16(to_bfloat16(rounded)) if dtype == "bfloat16" else rounded


def int4_group(group):
    low, high = group.min(1, keepdims=True), group.max(1, keepdims=True)
    scale = from_bfloat16(to_bfloat16(high / np.float32(15) - low / np.float32(15)))
    offset = from_bfloat16(to_bfloat16(low))
    steps = (group - offset) * (np.float32(1) / np.where(scale, scale, 1))
    codes = np.clip(np.ceil(steps - np.float32(0.5)), 0, 15)  # half a step is rounded down
    return codes.astype(np.float32) * scale + offset


ROUNDED = {"int8": int8, "int4": int4}
PADDED = ("odd sizes", "all biases", "tied", "gemma 3", "one head for all")
"""Shapes that differ in what is packed: matrices with padding, fused ones, one that is used twice."""


def rounded(weights, form, dtype):
    """Return `weights` with each matrix rounded as the format does it."""
    return {
        key: ROUNDED[form](values, dtype) if values.ndim == 2 else values for key, values in weights.items()
    }


@cache
def rounded_oracle(network, dtype, form):
    return Oracle(network, rounded(draw_weights(network, dtype), form, dtype))


def drivers(network, kernel, form, **options):
    """Return a model with weights of this format, and the oracle of the rounded weights."""
    dtype, variant = kernel
    weights = draw_weights(network, dtype)
    driver = SequenceDriver(network, dtype, variant=variant, weights=weights, quantization=form, **options)
    return driver, rounded_oracle(network, dtype, form)


def check(outputs, oracle, sequences, tolerance):
    for sequence in sequences:
        expected = oracle.last_logits(sequence.token_ids)
        assert relative_error(outputs[sequence.slot], expected) <= tolerance


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_every_kernel_reads_every_format(kernel):
    assert ("none", *ROUNDED) == formats(*kernel)


@pytest.mark.parametrize("form", NARROW)
def test_format_is_named_in_its_own_file_and_the_list_only(form):
    files = [SOURCES / "cpustep.pyx", *(SOURCES / "cpustep").iterdir()]
    naming = {file.name for file in files if re.search(rf"\b{form}\b", file.read_text())}
    assert {f"format_{form}.h", "formats.h"} == naming


@pytest.mark.parametrize("shape", PADDED)
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_logits_equal_those_of_the_rounded_numpy_network(kernel, form, shape):
    driver, oracle = drivers(SHAPES[shape], kernel, form, threads=2)
    tolerance = TOLERANCE[kernel[0]]
    short, long = sequences = add_sequences(driver, (1, 150))
    check(driver.step([(short, 1)]), oracle, [short], tolerance)
    append_random_tokens(driver, [short])
    check(driver.step([(short, 1), (long, 70)]), oracle, [short], tolerance)
    append_random_tokens(driver, [short])
    check(driver.step([(short, 1), (long, 80)]), oracle, sequences, tolerance)


@pytest.mark.parametrize("tokens", [15, 16, 17, 33, 48, 65, 513])
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_token_counts_around_the_tile_sizes_give_correct_logits(kernel, form, tokens):
    network = Network(layers=2, hidden_size=96, heads=3, kv_heads=3, intermediate_size=416)
    driver, oracle = drivers(network, kernel, form, columns=40, slots=2, max_batched_tokens=520)
    [sequence] = add_sequences(driver, [tokens])
    check(driver.step([(sequence, tokens)]), oracle, [sequence], TOLERANCE[kernel[0]])


def outputs_after(network, weights, pieces, kernel, form):
    """Return the logits after five tokens, with matrices packed `pieces` rows at a time."""
    dtype, variant = kernel
    model = new_model(network, dtype, variant=variant, quantization=form)
    for layer, name in model.missing():
        values = weights[layer, name]
        if values.ndim == 1:
            model.pack(name, values, layer=layer)
            continue
        values = to_bfloat16(values) if dtype == "bfloat16" else values
        for row in range(0, len(values), pieces):
            model.pack(name, values[row : row + pieces], layer=layer)
    driver = SequenceDriver(network, dtype, variant=variant, weights=weights)
    model.allocate_cache(driver.blocks)
    driver.model = model
    [sequence] = add_sequences(driver, (5,))
    return driver.step([(sequence, 5)])[sequence.slot]


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_matrix_may_be_packed_in_pieces_of_any_size(kernel, form):
    network = Network(qkv_bias=True)
    weights = draw_weights(network, kernel[0])
    unsplit = outputs_after(network, weights, 1000, kernel, form)
    assert unsplit.tobytes() == outputs_after(network, weights, 7, kernel, form).tobytes()


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_rows_of_zeros_and_of_any_magnitude_keep_their_own_scales(kernel, form):
    """With one scale for a whole matrix, or for a panel of it, the small rows would round to zero."""
    network = Network(layers=1)
    weights = draw_weights(network, kernel[0])
    sizes = np.logspace(-2, 2, 64).astype(np.float32)[:, None]
    weights[0, "query"][:64] *= sizes
    weights[0, "output"] *= sizes[::-1]
    weights[0, "up"][::3] = 0
    weights[0, "down"][5] = 1e-44  # 1 / its scale does not fit in float32
    if kernel[0] == "bfloat16":
        weights = {key: from_bfloat16(to_bfloat16(values)) for key, values in weights.items()}
    driver = SequenceDriver(network, kernel[0], variant=kernel[1], weights=weights, quantization=form)
    [sequence] = add_sequences(driver, (40,))
    oracle = Oracle(network, rounded(weights, form, kernel[0]))
    check(driver.step([(sequence, 40)]), oracle, [sequence], TOLERANCE[kernel[0]])


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_other_rows_and_threads_change_no_bit_of_a_decode(kernel, form):
    network = Network(layers=3, heads=6, kv_heads=2, intermediate_size=288)  # more than a part is unpacked
    weights = draw_weights(network, kernel[0])
    prompt = np.random.default_rng(5).integers(0, network.vocab_size, 30)
    texts = []
    for others_in_batch, threads in ((0, 1), (3, 2), (17, 1), (40, 2)):
        options = {"variant": kernel[1], "threads": threads, "slots": 48, "quantization": form}
        driver = SequenceDriver(network, kernel[0], weights=weights, **options)
        sequence = driver.add_sequence(prompt)
        driver.step([(sequence, 30)])
        others = add_sequences(driver, [1] * others_in_batch)
        sequence.token_ids.append(3)
        outputs = driver.step([(sequence, 1), *((other, 1) for other in others)])
        texts.append(outputs[sequence.slot].tobytes())
    assert len(set(texts)) == 1


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_or_infinite_weight_is_reported_and_packing_may_be_retried(dtype, form):
    network = Network()
    weights = draw_weights(network, dtype)
    model = new_model(network, dtype, quantization=form, threads=2)
    for wrong in (np.nan, np.inf, -np.inf):
        values = weights[1, "up"].copy()
        values[37, 5] = values[90, 1] = wrong
        with pytest.raises(ValueError, match=r"layer 1: up: the number at \[37, 5\] is infinite or NaN"):
            model.pack("up", to_bfloat16(values) if dtype == "bfloat16" else values, layer=1)
    pack_all(model, weights)
    assert model.missing() == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_weights_stay_finite(dtype):
    """Their difference is infinite in float32."""
    network = Network(layers=1, tied=True)
    weights = draw_weights(network, dtype)
    weights[None, "norm"][:] = 1e-30
    limit = np.float32(3e38)
    weights[None, "embedding"][7] = np.where(np.arange(64) % 2, limit, -limit)
    driver = SequenceDriver(network, dtype, weights=weights, quantization="int4")
    [sequence] = add_sequences(driver, (3,))
    sequence.token_ids = [1, 2, 3]
    assert np.isfinite(driver.step([(sequence, 3)])[sequence.slot]).all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("int4", 5)])
def test_weights_take_the_bits_of_their_codes_and_scales(form, bits, tied):
    network = Network(hidden_size=256, intermediate_size=512, tied=tied)
    plain, narrow = (
        new_model(network, "bfloat16", quantization=quantization).weight_bytes
        for quantization in (None, form)
    )
    assert bits / 16 * plain < narrow < (bits / 16 + 0.03) * plain


@pytest.mark.parametrize("quantization", ["int3", "", 8])
def test_any_other_quantization_is_refused(quantization):
    with pytest.raises(ValueError, match=f"quantization: {quantization!r} is not one of none, int8, int4"):
        new_model(Network(), "float32", quantization=quantization)
