"""The CPU step's logits against the same network in numpy, for every shape and available instruction set."""

import numpy as np
import pytest

from cext.cpu_step_oracle import Network, Oracle, SequenceDriver, draw_weights, oracle_of, relative_error
from fairlead._cext.cpustep import variants

KERNELS = [(dtype, variant) for dtype in ("float32", "bfloat16") for variant in variants(dtype)]
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
SHAPES = {
    "llama": Network(),
    "one head for all": Network(heads=6, kv_heads=1),
    "as many kv heads as heads": Network(heads=3, kv_heads=3),
    "nine query heads a kv head": Network(heads=18, kv_heads=2),
    "forty query heads a kv head": Network(heads=40, kv_heads=1, layers=1),
    "heads of 64": Network(head_dim=64, heads=9, kv_heads=3),
    "heads of 80": Network(head_dim=80),
    "heads of 128, more than the hidden size": Network(head_dim=128),
    "heads of 256": Network(head_dim=256, heads=2, kv_heads=1),
    "odd sizes": Network(
        vocab_size=77, hidden_size=50, intermediate_size=45, heads=3, kv_heads=1, head_dim=18
    ),
    "one layer": Network(layers=1),
    "tied": Network(tied=True),
    "qwen2": Network(qkv_bias=True, tied=True),
    "all biases": Network(qkv_bias=True, output_bias=True, mlp_bias=True, intermediate_size=70),
    "qwen3": Network(query_key_norm=True, head_dim=48),
    "a window": Network(windows=(37,)),
    "a window of one": Network(windows=(1,)),
    "two groups": Network(layers=4, windows=(None, 21), groups=(1, 1, 0, 1)),
    "part of a head turns": Network(head_dim=40, rotated=(20,)),
    "no channel is rotated": Network(rotated=(0,)),
    "stretched rope": Network(rope_scale=1.2),
    "caps": Network(attention_cap=5.0, logit_cap=3.0),
    "gemma 3": Network(
        layers=4,
        head_dim=64,
        windows=(None, 30),
        groups=(1, 1, 0, 1),
        thetas=(10_000.0, 1_000_000.0),
        rotated=(None, None),
        rope_of=(0, 0, 1, 0),
        query_key_norm=True,
        post_norms=True,
        gelu=True,
        embedding_scale=8.0,
        attention_scale=0.11,
        tied=True,
    ),
}


def add_sequences(driver, lengths):
    """Add sequences of these lengths, with nothing computed yet."""
    return [
        driver.add_sequence(driver.rng.integers(0, driver.network.vocab_size, length)) for length in lengths
    ]


def check(driver, outputs, sequences, tolerance, oracle=None):
    oracle = oracle or oracle_of(driver.network, driver.model.dtype)
    for sequence in sequences:
        expected = oracle.last_logits(sequence.token_ids)
        assert relative_error(outputs[sequence.slot], expected) <= tolerance


def append_random_tokens(driver, sequences):
    for sequence in sequences:
        sequence.token_ids.append(int(driver.rng.integers(driver.network.vocab_size)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_logits_equal_those_of_the_numpy_network(kernel, shape):
    dtype, variant = kernel
    driver = SequenceDriver(SHAPES[shape], dtype, variant=variant, threads=2)
    short, middle, long = sequences = add_sequences(driver, (1, 33, 150))
    check(driver, driver.step([(short, 1), (middle, 33)]), [short, middle], TOLERANCE[dtype])
    append_random_tokens(driver, [short, middle])
    outputs = driver.step([(short, 1), (middle, 1), (long, 70)])  # decodes beside the first chunk of a prompt
    check(driver, outputs, [short, middle], TOLERANCE[dtype])
    append_random_tokens(driver, [short, middle])
    check(driver, driver.step([(short, 1), (long, 80)]), [short, long], TOLERANCE[dtype])
    append_random_tokens(driver, [short, long])
    check(driver, driver.step([(short, 1), (middle, 1), (long, 1)]), sequences, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 140])
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_long_context_is_read_in_parts_and_the_parts_are_merged(kernel, window):
    dtype, variant = kernel
    # The attention is sharp enough that one key too many changes the logits.
    network = Network(layers=2, heads=4, kv_heads=1, windows=(window,), attention_scale=0.6)
    driver = SequenceDriver(
        network, dtype, variant=variant, threads=2, columns=60, slots=2, max_batched_tokens=1024
    )
    [sequence] = add_sequences(driver, [420])
    check(driver, driver.step([(sequence, 420)]), [sequence], TOLERANCE[dtype])
    append_random_tokens(driver, [sequence])
    check(driver, driver.step([(sequence, 1)]), [sequence], TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 513])
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_token_counts_around_the_tile_sizes_give_correct_logits(kernel, tokens):
    dtype, variant = kernel
    network = Network(layers=2, hidden_size=96, heads=3, kv_heads=3, intermediate_size=416)
    driver = SequenceDriver(network, dtype, variant=variant, columns=40, slots=2, max_batched_tokens=520)
    [sequence] = add_sequences(driver, [tokens])
    check(driver, driver.step([(sequence, tokens)]), [sequence], TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_nan_left_in_a_reused_block_does_not_affect_its_next_sequence(kernel):
    """Weights are finite, but a step can overflow. The next sequence with the block must not see it."""
    dtype, variant = kernel
    network = Network(layers=2, hidden_size=32, heads=2, kv_heads=1)
    weights = draw_weights(network, dtype)
    # Only token 7 is nonzero in channel 3, which makes the first layer's values overflow.
    weights[None, "embedding"][:, 3] = 0
    weights[None, "embedding"][7, 3] = 100
    weights[0, "value"][:, 3] = 3e38
    driver = SequenceDriver(network, dtype, variant=variant, slots=2, columns=2, weights=weights)
    overflowing = driver.add_sequence([7] * 32)
    assert np.isnan(driver.step([(overflowing, 32)])[overflowing.slot]).any()
    blocks = [int(block) for block in driver.tables[0][overflowing.slot]]
    driver.remove_sequence(overflowing)
    driver.free = [blocks]  # the next sequence gets the same blocks
    unaffected, oracle = driver.add_sequence([1, 2, 3]), Oracle(network, weights)
    check(driver, driver.step([(unaffected, 3)]), [unaffected], TOLERANCE[dtype], oracle)
    append_random_tokens(driver, [unaffected])
    check(driver, driver.step([(unaffected, 1)]), [unaffected], TOLERANCE[dtype], oracle)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_without_samples_fills_the_cache_and_writes_no_logits(dtype):
    driver = SequenceDriver(Network(), dtype)
    [sequence] = add_sequences(driver, [60])
    assert driver.step([(sequence, 40)]) == {}
    check(driver, driver.step([(sequence, 20)]), [sequence], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_sequence_reads_the_shared_prefix(dtype):
    driver = SequenceDriver(Network(), dtype)
    prompt = [int(token) for token in driver.rng.integers(0, driver.network.vocab_size, 40)]
    first, second = driver.add_sequence(prompt), driver.add_sequence([*prompt[:32], 5, 6, 7])
    driver.step([(first, 40)])
    driver.tables[0][second.slot, :2] = driver.tables[0][first.slot, :2]
    second.computed = 32
    check(driver, driver.step([(second, 3)]), [second], TOLERANCE[dtype])
