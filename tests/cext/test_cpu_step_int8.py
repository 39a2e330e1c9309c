"""Int8 matrices: logits equal those of a network with these integers times their scales as weights."""

from functools import cache

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


def rounded(weights):
    """Return `weights` with each row of a matrix rounded to integers up to ±127, times a scale."""
    left = {}
    for key, values in weights.items():
        left[key] = values
        if values.ndim == 2:
            scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
            left[key] = np.rint(values / np.where(scales, scales, 1)) * scales
    return left


def drivers(network, kernel, **options):
    """Return a model with 8-bit weights, and the oracle of the rounded weights."""
    dtype, variant = kernel
    weights = draw_weights(network, dtype)
    driver = SequenceDriver(network, dtype, variant=variant, weights=weights, quantization="int8", **options)
    return driver, rounded_oracle(network, dtype)


@cache
def rounded_oracle(network, dtype):
    return Oracle(network, rounded(draw_weights(network, dtype)))


def check(outputs, oracle, sequences, tolerance):
    for sequence in sequences:
        expected = oracle.last_logits(sequence.token_ids)
        assert relative_error(outputs[sequence.slot], expected) <= tolerance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_logits_equal_those_of_the_rounded_numpy_network(kernel, shape):
    driver, oracle = drivers(SHAPES[shape], kernel, threads=2)
    tolerance = TOLERANCE[kernel[0]]
    short, long = sequences = add_sequences(driver, (1, 150))
    check(driver.step([(short, 1)]), oracle, [short], tolerance)
    append_random_tokens(driver, [short])
    check(driver.step([(short, 1), (long, 70)]), oracle, [short], tolerance)
    append_random_tokens(driver, [short])
    check(driver.step([(short, 1), (long, 80)]), oracle, sequences, tolerance)


@pytest.mark.parametrize("tokens", [15, 16, 17, 33, 48, 65, 513])
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_token_counts_around_the_tile_sizes_give_correct_logits(kernel, tokens):
    network = Network(layers=2, hidden_size=96, heads=3, kv_heads=3, intermediate_size=416)
    driver, oracle = drivers(network, kernel, columns=40, slots=2, max_batched_tokens=520)
    [sequence] = add_sequences(driver, [tokens])
    check(driver.step([(sequence, tokens)]), oracle, [sequence], TOLERANCE[kernel[0]])


def outputs_after(network, weights, pieces, kernel):
    """Return the logits after five tokens, with matrices packed `pieces` rows at a time."""
    dtype, variant = kernel
    model = new_model(network, dtype, variant=variant, quantization="int8")
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


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_matrix_may_be_packed_in_pieces_of_any_size(kernel):
    network = Network(qkv_bias=True)
    weights = draw_weights(network, kernel[0])
    unsplit = outputs_after(network, weights, 1000, kernel)
    assert unsplit.tobytes() == outputs_after(network, weights, 7, kernel).tobytes()


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_rows_of_zeros_and_of_any_magnitude_keep_their_own_scales(kernel):
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
    driver = SequenceDriver(network, kernel[0], variant=kernel[1], weights=weights, quantization="int8")
    [sequence] = add_sequences(driver, (40,))
    check(driver.step([(sequence, 40)]), Oracle(network, rounded(weights)), [sequence], TOLERANCE[kernel[0]])


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_other_rows_and_threads_change_no_bit_of_a_decode(kernel):
    network = Network(layers=3, heads=6, kv_heads=2)
    weights = draw_weights(network, kernel[0])
    prompt = np.random.default_rng(5).integers(0, network.vocab_size, 30)
    texts = []
    for others_in_batch, threads in ((0, 1), (3, 2), (17, 1), (40, 2)):
        options = {"variant": kernel[1], "threads": threads, "slots": 48, "quantization": "int8"}
        driver = SequenceDriver(network, kernel[0], weights=weights, **options)
        sequence = driver.add_sequence(prompt)
        driver.step([(sequence, 30)])
        others = add_sequences(driver, [1] * others_in_batch)
        sequence.token_ids.append(3)
        outputs = driver.step([(sequence, 1), *((other, 1) for other in others)])
        texts.append(outputs[sequence.slot].tobytes())
    assert len(set(texts)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_or_infinite_weight_is_reported_and_packing_may_be_retried(dtype):
    network = Network()
    weights = draw_weights(network, dtype)
    model = new_model(network, dtype, quantization="int8", threads=2)
    for wrong in (np.nan, np.inf, -np.inf):
        values = weights[1, "up"].copy()
        values[37, 5] = values[90, 1] = wrong
        with pytest.raises(ValueError, match=r"layer 1: up: the number at \[37, 5\] is infinite or NaN"):
            model.pack("up", to_bfloat16(values) if dtype == "bfloat16" else values, layer=1)
    pack_all(model, weights)
    assert model.missing() == []


@pytest.mark.parametrize("tied", [False, True])
def test_weights_take_one_byte_each_plus_a_scale_per_output(tied):
    network = Network(hidden_size=256, intermediate_size=512, tied=tied)
    plain, narrow = (
        new_model(network, "bfloat16", quantization=quantization).weight_bytes
        for quantization in (None, "int8")
    )
    assert plain * 0.5 < narrow < plain * 0.53


@pytest.mark.parametrize("quantization", ["int3", "", 8])
def test_any_other_quantization_is_refused(quantization):
    with pytest.raises(ValueError, match=f"quantization: {quantization!r} is not one of none, int8"):
        new_model(Network(), "float32", quantization=quantization)
