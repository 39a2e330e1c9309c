"""Blocks of a GGUF that the CPU step keeps: results equal those of the same weights as numbers, bit for bit.

The numbers are those of the library `gguf`. A kernel that unpacks a weight to another number of its dtype, or
adds in another order, gives other bits.
"""

import numpy as np
import pytest

from cext.cpu_step_oracle import Network, SequenceDriver, draw_weights, new_model
from cext.test_cpu_step import KERNELS, add_sequences, append_random_tokens
from fairlead._cext.cpustep import stored_formats
from language.checkpoint.gguf_files import ROUNDED, TYPES, blocks, numbers

NAMES = {kind.lower(): kind for kind in TYPES if kind not in ("F32", "F16", "BF16")}
NETWORK = Network(hidden_size=256, intermediate_size=512, heads=8, kv_heads=2, layers=2, vocab_size=101)
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


def network_in(choose, network=NETWORK, seed=0):
    """Return weights as blocks and as numbers, and their formats.

    choose: takes layer and name of a matrix, and returns its type.
    """
    rng = np.random.default_rng(seed)
    restored = draw_weights(network, "float32", seed)
    kept, stored = dict(restored), {}
    for key, values in restored.items():
        if values.ndim < 2 or (kind := choose(*key)) is None:
            continue
        kept[key] = raw = blocks(kind, values.shape, rng, 0.08 if kind in ROUNDED else 0.8)
        restored[key] = numbers(raw, kind)
        stored[key] = kind.lower()
    return kept, restored, stored


def steps_of(network, kernel, weights, **options):
    """Return the logits of steps with one row, some, and many, as bytes."""
    driver = SequenceDriver(
        network, kernel[0], weights=weights, variant=kernel[1], max_batched_tokens=128, **options
    )
    short, long = sequences = add_sequences(driver, (1, 150))
    outputs = []
    for rows in (
        [(short, 1)],
        [(short, 1), (long, 16)],
        [(long, 33)],
        [(long, 71)],
        [(short, 1), (long, 30)],
    ):
        outputs += [row.tobytes() for row in driver.step(rows).values()]
        append_random_tokens(driver, [short])
    assert sequences
    return outputs


@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_every_kernel_keeps_every_type(kernel):
    assert set(stored_formats(*kernel)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_each_type_gives_the_bits_of_its_restored_numbers(kernel, name):
    kept, restored, stored = network_in(lambda _layer, _name: NAMES[name])
    expected = steps_of(NETWORK, kernel, restored)
    assert steps_of(NETWORK, kernel, kept, stored=stored, threads=2) == expected
    assert len(set(expected)) == len(expected)


def as_llama_cpp_mixes(layer, name):
    """Return the type that a file called Q4_K_M has for a matrix."""
    if name in ("head", "embedding"):
        return "Q6_K"
    return "Q6_K" if name in ("value", "down") and layer == 0 else "Q4_K"


MIXES = {
    "Q4_K_M": as_llama_cpp_mixes,
    "each its own": lambda _layer, name: dict(
        zip(MATRICES, ("Q5_0", "Q8_0", "Q3_K", "Q2_K", "Q4_1", "Q4_1", "IQ4_XS"), strict=True)
    ).get(name, "Q5_K"),
    "some in numbers": lambda layer, name: None if name in ("key", "down") or layer is None else "Q5_1",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kernel", KERNELS, ids="-".join)
def test_matrices_of_one_model_may_have_different_types(kernel, mix, tied):
    network = Network(hidden_size=256, intermediate_size=512, heads=8, kv_heads=2, tied=tied, qkv_bias=True)
    kept, restored, stored = network_in(MIXES[mix], network)
    if tied:
        stored = {key: form for key, form in stored.items() if key != (None, "head")}
    expected = steps_of(network, kernel, restored)
    assert steps_of(network, kernel, kept, stored=stored, threads=2) == expected


@pytest.mark.parametrize("name", NAMES)
def test_kept_weights_take_little_more_than_the_file(name):
    network = Network(
        hidden_size=512, intermediate_size=1024, heads=8, kv_heads=8, head_dim=64, vocab_size=1024
    )
    kept, _, stored = network_in(lambda _layer, _name: NAMES[name], network)
    model = new_model(network, "bfloat16", stored=stored)
    size = sum(values.nbytes for values in kept.values() if values.ndim == 2)
    assert size < model.weight_bytes < 1.05 * size


@pytest.mark.parametrize("name", NAMES)
def test_scale_that_is_not_finite_is_reported_and_packing_may_be_retried(name):
    kept, _, stored = network_in(lambda _layer, _name: NAMES[name])
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
    _, _, stored = network_in(lambda _layer, _name: "Q4_K")
    model = new_model(NETWORK, "float32", stored=stored)
    with pytest.raises(ValueError, match="layer 0: down: rows of 287 bytes, expected 288"):
        model.pack("down", np.zeros((256, 287), np.uint8), layer=0)
    with pytest.raises(ValueError, match=r"layer 0: down: .* expected"):
        model.pack("down", np.zeros((257, 288), np.uint8), layer=0)
