"""Invalid arguments of the CPU step raise ValueError, which says what is wrong, and change nothing."""

import threading

import numpy as np
import pytest

from cext.cpu_step_oracle import (
    Network,
    SequenceDriver,
    draw_weights,
    int32,
    new_model,
    pack_all,
    to_bfloat16,
)
from fairlead._cext.cpustep import read_rate, variants

NETWORK = Network(windows=(None, 20), groups=(0, 1))


@pytest.fixture
def driver():
    return SequenceDriver(NETWORK, "float32", max_batched_tokens=64)


@pytest.fixture
def arguments(driver):
    """The arguments of a step with two sequences of 3 and 40 tokens, which both sample."""
    sequences = driver.add_sequence(range(3)), driver.add_sequence(range(40))
    return driver.arguments([(sequences[0], 3), (sequences[1], 40)])


def changed(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


def spoil_table(arguments, group, row, column, value):
    tables = list(arguments["block_tables"])
    tables[group] = changed(tables[group], (arguments["slots"][row], column), value)
    return {"block_tables": tuple(tables)}


WRONG = {
    "an id below 0": lambda a: {"input_ids": changed(a["input_ids"], 5, -1)},
    "an id of the vocabulary's size": lambda a: {"input_ids": changed(a["input_ids"], 42, 101)},
    "a position too high": lambda a: {"positions": changed(a["positions"], 4, 9)},
    "a negative position": lambda a: {"positions": changed(a["positions"], 0, -1)},
    "a slot mapping elsewhere": lambda a: {
        "slot_mapping": (changed(a["slot_mapping"][0], 4, 0), a["slot_mapping"][1])
    },
    "a slot mapping far away": lambda a: {
        "slot_mapping": (a["slot_mapping"][0], changed(a["slot_mapping"][1], 4, 2**31 - 1))
    },
    "query starts that go back": lambda a: {"query_starts": int32([0, 50, 43])},
    "query starts that do not begin": lambda a: {"query_starts": int32([1, 3, 43])},
    "query starts that end too soon": lambda a: {"query_starts": int32([0, 3, 42])},
    "an empty row": lambda a: {"query_starts": int32([0, 0, 43])},
    "a length shorter than its tokens": lambda a: {"sequence_lengths": int32([3, 39])},
    "an enormous length": lambda a: {"sequence_lengths": int32([3, 2**31 - 1])},
    "a negative length": lambda a: {"sequence_lengths": int32([-3, 40])},
    "a slot below 0": lambda a: {"slots": changed(a["slots"], 0, -1)},
    "a slot beyond the table": lambda a: {"slots": changed(a["slots"], 1, 8)},
    "a block that is not there": lambda a: spoil_table(a, 0, 1, 0, -1),
    "a block beyond the cache": lambda a: spoil_table(a, 1, 1, 1, 10_000),
    "a sample beyond the tokens": lambda a: {"sample_tokens": int32([2, 43])},
    "a sample below 0": lambda a: {"sample_tokens": int32([-1, 2])},
    "a sample twice": lambda a: {"sample_tokens": int32([42, 42])},
    "too few rows of logits": lambda a: {"logits": a["logits"][:1]},
    "logits of another width": lambda a: {"logits": np.zeros((2, 100), dtype=np.float32)},
    "logits of another dtype": lambda a: {"logits": a["logits"].astype(np.float64)},
    "ids of another dtype": lambda a: {"input_ids": a["input_ids"].astype(np.int64)},
    "ids with gaps": lambda a: {"input_ids": np.repeat(a["input_ids"], 2)[::2]},
    "one group": lambda a: {"slot_mapping": a["slot_mapping"][:1]},
    "one table": lambda a: {"block_tables": a["block_tables"][:1]},
    "an empty table": lambda a: {"block_tables": (np.zeros((8, 0), dtype=np.int32), a["block_tables"][1])},
    "fewer positions": lambda a: {"positions": a["positions"][:-1]},
    "fewer slots": lambda a: {"slots": a["slots"][:1]},
    "no tokens": lambda a: {"input_ids": int32([]), "positions": int32([])},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_step_raises_and_a_valid_one_still_runs(driver, arguments, wrong):
    fresh = SequenceDriver(NETWORK, "float32", max_batched_tokens=64)
    again = fresh.arguments([(fresh.add_sequence(range(3)), 3), (fresh.add_sequence(range(40)), 40)])
    fresh.model.run(**again)
    with pytest.raises(ValueError):
        driver.model.run(**{**arguments, **WRONG[wrong](arguments)})
    assert np.isnan(arguments["logits"]).all()
    driver.model.run(**arguments)
    assert again["logits"].tobytes() == arguments["logits"].tobytes()


def test_step_with_more_than_max_batched_tokens_raises(driver):
    sequence = driver.add_sequence(range(65))
    with pytest.raises(ValueError, match="65 tokens, from 1 to 64"):
        driver.step([(sequence, 65)])


def test_step_does_not_need_blocks_that_slid_out_of_the_window(driver):
    sequence = driver.add_sequence(range(90))
    driver.step([(sequence, 60)])
    driver.step([(sequence, 30)])
    assert (driver.tables[1][sequence.slot, :2] == -1).all()


def test_run_raises_before_cache_and_weights_are_ready():
    model = new_model(NETWORK, "float32")
    empty_step = (
        (int32([]),) * 2
        + ((),)
        + (int32([0]), int32([]), int32([]))
        + ((), int32([]), np.zeros((0, 101), "f"))
    )
    with pytest.raises(ValueError, match="no KV cache"):
        model.run(*empty_step)
    model.allocate_cache([1, 1])
    with pytest.raises(ValueError, match="were not packed"):
        model.run(*empty_step)
    pack_all(model, draw_weights(NETWORK, "float32"))
    with pytest.raises(ValueError, match="of 2 groups"):
        model.run(*empty_step)


@pytest.mark.parametrize(("group", "blocks"), [(2, [0]), (-1, [0]), (0, [-1]), (0, [10**6]), (0, [2**40])])
def test_releasing_nonexistent_blocks_raises(driver, group, blocks):
    with pytest.raises((ValueError, OverflowError)):
        driver.model.release(group, blocks)


def test_releasing_free_blocks_does_not_change_blocks_in_use():
    release, keep = (SequenceDriver(NETWORK, "float32", max_batched_tokens=64) for _ in range(2))
    logits = []
    for its in (release, keep):
        removed, remaining = its.add_sequence(range(40)), its.add_sequence(range(7, 60))
        its.step([(removed, 40), (remaining, 24)])
        its.remove_sequence(removed)
        if its is release:
            for group, free in enumerate(its.free):
                its.model.release(group, sorted(map(int, free)))
        added = its.add_sequence(range(3, 33))
        logits.append(its.step([(remaining, 29), (added, 30)]))
    for slot, expected in logits[1].items():
        assert np.array_equal(logits[0][slot], expected)


def test_releasing_blocks_without_a_cache_raises():
    with pytest.raises(ValueError, match="no KV cache"):
        new_model(NETWORK, "float32").release(0, [0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_or_infinite_weight_is_refused_with_its_index(dtype, value):
    model = new_model(NETWORK, dtype)
    weight = changed(np.ones(model.rows("up"), dtype=np.float32), (37, 11), value)
    given = to_bfloat16(np.nan_to_num(weight, nan=1, posinf=1, neginf=1)) if dtype == "bfloat16" else weight
    if dtype == "bfloat16":
        given[37, 11] = {np.inf: 0x7F80, -np.inf: 0xFF80}.get(value, 0x7FC1)
    with pytest.raises(ValueError, match=r"layer 1: up: the number at \[37, 11\] is infinite or NaN"):
        model.pack("up", given, layer=1)
    with pytest.raises(ValueError, match="layer 0: attention_norm: the number at 3"):
        model.pack("attention_norm", changed(np.ones(64, dtype=np.float32), 3, value), layer=0)


@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [
        ("up", 0, (96, 63)),
        ("up", 0, (97, 64)),
        ("up", None, (96, 64)),
        ("up", 2, (96, 64)),
        ("query_bias", 0, (128,)),
        ("head_norm", 0, (64,)),
        ("norm", None, (63,)),
        ("embedding", None, (102, 64)),
        ("embedding", None, (101,)),
    ],
)
def test_tensor_of_another_model_is_refused(name, layer, shape):
    with pytest.raises(ValueError):
        new_model(NETWORK, "float32").pack(name, np.zeros(shape, dtype=np.float32), layer=layer)


def test_tensor_may_be_packed_in_pieces_but_only_once():
    weights = draw_weights(NETWORK, "bfloat16")
    model, whole = (
        new_model(NETWORK, "bfloat16", max_batched_tokens=64),
        SequenceDriver(NETWORK, "bfloat16", weights=weights),
    )
    for layer, name in model.missing():
        values = weights[layer, name]
        pieces = (
            [to_bfloat16(piece) for piece in np.split(values, [1, 7, 40])] if values.ndim == 2 else [values]
        )
        for piece in pieces:
            model.pack(name, piece, layer=layer)
    assert model.missing() == []
    with pytest.raises(ValueError, match="layer 0: up"):
        model.pack("up", to_bfloat16(weights[0, "up"][:1]), layer=0)
    model.allocate_cache(whole.blocks)
    arguments = whole.arguments([(whole.add_sequence(range(40)), 40)])
    model.run(**arguments)
    first = arguments["logits"].copy()
    whole.model.run(**arguments)
    assert first.tobytes() == arguments["logits"].tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 3, "kv_heads": 2},
        {"head_dim": 258},
        {"head_dim": 31},
        {"layers": 0},
        {"vocab_size": 0},
        {"hidden_size": 1 << 20},
        {"norm_epsilon": float("nan")},
        {"windows": (0,)},
        {"windows": ()},
        {"groups": (0, 1)},
        {"groups": (0,)},
        {"rope_of": (0, 1)},
        {"rotated": (64,)},
    ],
)
def test_impossible_shape_is_refused(changes):
    with pytest.raises(ValueError):
        new_model(Network(**changes), "float32")


@pytest.mark.parametrize("options", [{"variant": "mmx"}, {"threads": 0}, {"max_batched_tokens": 0}])
def test_impossible_option_is_refused(options):
    with pytest.raises(ValueError):
        new_model(NETWORK, "float32", **options)


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float16"):
        variants("float16")
    with pytest.raises(ValueError, match="float16"):
        new_model(NETWORK, "float16")


@pytest.mark.parametrize("blocks", [[1], [1, 0], [1, 2**30], [1, 1, 1]])
def test_impossible_cache_is_refused(blocks):
    with pytest.raises(ValueError):
        new_model(NETWORK, "float32").allocate_cache(blocks)


def test_portable_kernels_are_always_available():
    for dtype in ("float32", "bfloat16"):
        assert variants(dtype)[-1] == "portable"


def test_other_threads_run_during_a_step(driver):
    """A step releases the GIL: a counting thread advances while this one runs step after step."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        sequence = driver.add_sequence(range(64))
        arguments = driver.arguments([(sequence, 64)])
        before = counted[0]
        while counted[0] == before:
            driver.model.run(**arguments)
    finally:
        stop.set()
        counter.join()


def test_allocating_a_cache_again_replaces_the_old_one(driver, arguments):
    driver.model.run(**arguments)
    first = arguments["logits"].copy()
    bytes_before = driver.model.cache_bytes
    driver.model.allocate_cache(driver.blocks)
    assert bytes_before == driver.model.cache_bytes
    driver.model.run(**arguments)
    assert first.tobytes() == arguments["logits"].tobytes()


def test_read_rate_is_positive_and_refuses_zero_size_or_threads():
    assert read_rate(1 << 20, 2, tries=1) > 0
    for size, threads in ((0, 1), (1 << 20, 0)):
        with pytest.raises(ValueError):
            read_rate(size, threads)
