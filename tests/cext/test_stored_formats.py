"""Blocks of codes that the CPU step keeps: products equal those of the numbers that the codes stand for.

Of a GGUF's types, these are the numbers that the library `gguf` makes.

A product of one input shows each weight as the kernel reads it: all of its bits are compared. Whole steps are
compared with the network in numpy.
"""

from dataclasses import replace

import numpy as np
import pytest

from cext.cpu_step_oracle import (
    Network,
    Oracle,
    SequenceDriver,
    draw_weights,
    from_bfloat16,
    int32,
    new_model,
    relative_error,
    to_bfloat16,
)
from cext.test_cpu_step import KERNELS, TOLERANCE, add_sequences, append_random_tokens
from fairlead._cext.cpustep import stored_formats
from language.checkpoint.gguf_files import ROUNDED, TYPES, blocks, numbers

GGML = {kind.lower(): kind for kind in TYPES if kind not in ("F32", "F16", "BF16")}
OF_FOLDERS = ("s4_bf16", "u4_f16", "u4_bf16", "s8_bf16")
NAMES = (*GGML, *OF_FOLDERS)
NETWORK = Network(hidden_size=256, intermediate_size=512, heads=8, kv_heads=2, layers=2, vocab_size=101)
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


def draw_blocks(name, shape, rng):
    """Return random blocks [rows, bytes] of a format."""
    if name in GGML:
        return blocks(GGML[name], shape, rng, 0.08 if GGML[name] in ROUNDED else 0.8)
    count = shape[1] // 32
    scales = (rng.uniform(0.2, 1, (shape[0], count, 1)) / (1500 if name == "s8_bf16" else 100)).astype(
        np.float32
    )
    stored = (
        scales.astype(np.float16).view(np.uint8) if name == "u4_f16" else to_bfloat16(scales).view(np.uint8)
    )
    zeros = [rng.integers(0, 17, (shape[0], count, 1), dtype=np.uint8)] if name.startswith("u4") else []
    codes = rng.integers(0, 256, (shape[0], count, 32 if name == "s8_bf16" else 16), dtype=np.uint8)
    return np.concatenate([stored, *zeros, codes], -1).reshape(shape[0], -1)


def numbers_of(raw, name):
    """Return the numbers of such blocks, float32: a scale, a byte with the code of 0 if any, and 32 codes."""
    if name in GGML:
        return numbers(raw, GGML[name])
    each = raw.reshape(len(raw), -1, {"s4_bf16": 18, "s8_bf16": 34}.get(name, 19))
    halves = np.ascontiguousarray(each[..., :2])
    scales = (
        halves.view(np.float16).astype(np.float32)
        if name == "u4_f16"
        else from_bfloat16(halves.view(np.uint16))
    )
    if name == "s8_bf16":
        return (scales * each[..., 2:].view(np.int8)).reshape(len(raw), -1)
    zeros, codes = (
        (8, each[..., 2:]) if name == "s4_bf16" else (each[..., 2:3].astype(np.float32), each[..., 3:])
    )
    values = np.concatenate((codes & 15, codes >> 4), -1).astype(np.float32) - zeros
    return (scales * values.astype(np.float32)).reshape(len(raw), -1)


def network_in(choose, network=NETWORK, seed=0):
    """Return weights as blocks and as numbers, and their formats.

    choose: takes layer and name of a matrix, and returns its format.
    """
    rng = np.random.default_rng(seed)
    restored = draw_weights(network, "float32", seed)
    kept, stored = dict(restored), {}
    for key, values in restored.items():
        if values.ndim < 2 or (kind := choose(*key)) is None:
            continue
        kept[key] = raw = draw_blocks(kind, values.shape, rng)
        restored[key] = numbers_of(raw, kind)
        stored[key] = kind
    return kept, restored, stored


def check_steps(network, kernel, kept, restored, **options):
    """Compare steps with one row, some, and many, with those of the numpy network."""
    driver = SequenceDriver(
        network, kernel[0], weights=kept, variant=kernel[1], max_batched_tokens=128, **options
    )
    oracle = Oracle(network, restored)
    short, long = sequences = add_sequences(driver, (1, 150))
    for rows in (
        [(short, 1)],
        [(short, 1), (long, 16)],
        [(long, 33)],
        [(long, 71)],
        [(short, 1), (long, 30)],
    ):
        outputs = driver.step(rows)
        for sequence, _ in rows:
            if sequence.slot in outputs:
                expected = oracle.last_logits(sequence.token_ids)
                assert relative_error(outputs[sequence.slot], expected) <= TOLERANCE[kernel[0]]
        append_random_tokens(driver, [short])
    assert len(sequences) == 2


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_every_kernel_keeps_every_type(kernel):
    assert set(stored_formats(*kernel)) == set(NAMES)


def products_of_unit_rows(kernel, raw, form, rows, threads=2):
    """Return what each input of a matrix adds to its outputs, [inputs, outputs], of `rows` rows at a time.

    All layers add 0, token i has the embedding 0 … 1 … 0 with the 1 at i, and its norm makes 16 of it.
    """
    size = NETWORK.hidden_size
    network = replace(NETWORK, vocab_size=len(raw), layers=1, norm_epsilon=1e-12)
    weights = {key: np.zeros_like(values) for key, values in draw_weights(network, kernel[0]).items()}
    for name in ("attention_norm", "mlp_norm"):
        weights[0, name][:] = 1
    weights[None, "norm"][:] = 1
    weights[None, "embedding"][:size] = np.eye(size)
    weights[None, "head"] = raw
    driver = SequenceDriver(
        network,
        kernel[0],
        weights=weights,
        variant=kernel[1],
        threads=threads,
        max_batched_tokens=128,
        stored={(None, "head"): form},
    )
    products = []
    for first in range(0, size, rows):
        tokens = range(first, min(first + rows, size))
        sequence = driver.add_sequence(tokens)
        arguments = driver.arguments([(sequence, len(tokens))])
        arguments["sample_tokens"] = int32(range(len(tokens)))
        arguments["logits"] = np.empty((len(tokens), network.vocab_size), np.float32)
        driver.model.run(**arguments)
        products.append(arguments["logits"])
        driver.remove_sequence(sequence)
    return np.concatenate(products)


def expected_products(kernel, raw, name):
    """Return what they are to be. Tiles of AMX, which cannot scale sums, round weights to bfloat16."""
    weights = numbers_of(raw, name)
    if kernel[1] == "amx":
        weights = from_bfloat16(to_bfloat16(weights))
    return 16 * weights.T


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_each_weight_is_the_number_that_the_library_makes_of_it(kernel, name):
    raw = draw_blocks(name, (288, NETWORK.hidden_size), np.random.default_rng(3))
    expected = expected_products(kernel, raw, name)
    for rows in (1, 2, 3, 4, 5, 15, 50, 128):
        assert np.array_equal(products_of_unit_rows(kernel, raw, name, rows), expected), rows


SLIPS = {
    "a code that is one more": lambda values: values + np.spacing(np.abs(values).max()) * 4,
    "the inputs of a pair exchanged": lambda values: values.reshape(-1, 2, values.shape[1])[:, ::-1].reshape(
        values.shape
    ),
    "halves of a panel exchanged": lambda values: np.roll(values, 16, 1),
    "the next group's scale": lambda values: (
        values * np.where(np.arange(len(values)) % 32 < 16, 1, 1.125)[:, None]
    ),
    "one output's last weight lost": lambda values: np.where(
        (np.indices(values.shape) == np.array(values.shape)[:, None, None] - 1).all(0), 0, values
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_comparison_of_weights_detects_slips(slip):
    kernel = KERNELS[0]
    for name in ("q4_0", "q6_k"):
        raw = draw_blocks(name, (288, NETWORK.hidden_size), np.random.default_rng(3))
        wrong = SLIPS[slip](expected_products(kernel, raw, name)).astype(np.float32)
        assert not np.array_equal(products_of_unit_rows(kernel, raw, name, 4), wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_steps_equal_those_of_the_restored_network(kernel, name):
    kept, restored, stored = network_in(lambda _layer, _name: name)
    check_steps(NETWORK, kernel, kept, restored, stored=stored, threads=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_other_rows_and_threads_change_no_bit_of_a_decode(kernel, name):
    kept, _, stored = network_in(lambda _layer, _name: name)
    prompt = np.random.default_rng(5).integers(0, NETWORK.vocab_size, 30)
    texts = []
    for others_in_batch, threads in ((0, 1), (1, 2), (2, 1), (3, 2), (4, 2), (9, 1), (17, 2), (40, 2)):
        options = {"variant": kernel[1], "threads": threads, "slots": 48, "stored": stored}
        driver = SequenceDriver(NETWORK, kernel[0], weights=kept, **options)
        sequence = driver.add_sequence(prompt)
        driver.step([(sequence, 30)])
        others = add_sequences(driver, [1] * others_in_batch)
        sequence.token_ids.append(3)
        outputs = driver.step([*((other, 1) for other in others), (sequence, 1)])
        texts.append(outputs[sequence.slot].tobytes())
    assert len(set(texts)) == 1


def as_llama_cpp_mixes(layer, name):
    """Return the type that a file called Q4_K_M has for a matrix."""
    if name in ("head", "embedding"):
        return "q6_k"
    return "q6_k" if name in ("value", "down") and layer == 0 else "q4_k"


MIXES = {
    "Q4_K_M": as_llama_cpp_mixes,
    "each its own": lambda _layer, name: dict(
        zip(MATRICES, ("q5_0", "q8_0", "q3_k", "q2_k", "u4_bf16", "u4_bf16", "iq4_xs"), strict=True)
    ).get(name, "q5_k"),
    "some in numbers": lambda layer, name: None if name in ("key", "down") or layer is None else "q5_1",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_matrices_of_one_model_may_have_different_types(kernel, mix, tied):
    network = Network(hidden_size=256, intermediate_size=512, heads=8, kv_heads=2, tied=tied, qkv_bias=True)
    kept, restored, stored = network_in(MIXES[mix], network)
    if tied:
        stored = {key: form for key, form in stored.items() if key != (None, "head")}
        restored[None, "head"] = restored[None, "embedding"]
    check_steps(network, kernel, kept, restored, stored=stored, threads=2)


@pytest.mark.parametrize("name", NAMES)
def test_kept_weights_take_little_more_than_the_file(name):
    network = Network(
        hidden_size=512, intermediate_size=1024, heads=8, kv_heads=8, head_dim=64, vocab_size=1024
    )
    kept, _, stored = network_in(lambda _layer, _name: name, network)
    model = new_model(network, "bfloat16", stored=stored)
    size = sum(values.nbytes for values in kept.values() if values.ndim == 2)
    assert size < model.weight_bytes < 1.05 * size


@pytest.mark.parametrize("name", NAMES)
def test_scale_that_is_not_finite_is_reported_and_packing_may_be_retried(name):
    kept, _, stored = network_in(lambda _layer, _name: name)
    model = new_model(NETWORK, "bfloat16", stored=stored, threads=2)
    raw = kept[1, "up"].reshape(512, -1)
    broken = raw.copy()
    broken[37] = 0xFF
    with pytest.raises(ValueError, match=r"layer 1: up: the number at \[37, 0\] is infinite or NaN"):
        model.pack("up", broken, layer=1)
    model.pack("up", raw, layer=1)
    assert (1, "up") not in model.missing()


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ({(0, "gate"): "q4_0"}, "gate and up of layer 0 differ"),
        ({(0, "norm"): "q4_0"}, "no matrix norm in layer 0"),
        ({(9, "up"): "q4_0"}, "stored"),
        ({(None, "head"): "int8"}, "'int8' is not one of q4_0"),
        ({(0, "key"): "q4_0"}, "query, key and value of layer 0 differ, and have no whole panels"),
    ],
)
def test_formats_that_do_not_suit_the_model_are_refused(stored, reason):
    network = Network(hidden_size=256, intermediate_size=512, heads=4, kv_heads=1, head_dim=16)
    with pytest.raises(ValueError, match=reason):
        new_model(network, "float32", stored=stored)


def test_rows_of_another_size_are_refused():
    _, _, stored = network_in(lambda _layer, _name: "q4_k")
    model = new_model(NETWORK, "float32", stored=stored)
    with pytest.raises(ValueError, match="layer 0: down: rows of 287 bytes, expected 288"):
        model.pack("down", np.zeros((256, 287), np.uint8), layer=0)
    with pytest.raises(ValueError, match=r"layer 0: down: .* expected"):
        model.pack("down", np.zeros((257, 288), np.uint8), layer=0)
