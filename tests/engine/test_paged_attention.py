"""The GPU's attention kernels, interpreted, compared with the portable attention over the same cache."""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.attention_inputs import HEADS, MIXED, AttentionInputs
from engine.interpreted import interpreted
from fairlead.engine.paged_attention import DeviceAttention, decode_tiles, prefill_tiles, splits

pytestmark = interpreted
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "cap"), HEADS)
def test_every_head_shape_matches_the_portable_attention(launches, heads, kv_heads, head_dim, window, cap):
    attention_inputs = AttentionInputs(
        MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window, cap=cap
    )
    torch.testing.assert_close(attention_inputs.actual(), attention_inputs.expected(), rtol=1e-5, atol=1e-5)
    assert {"write_cache", "decode", "prefill"} <= {name for name, *_ in launches}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_dtype_is_accurate_to_its_tolerance(launches, dtype):
    attention_inputs = AttentionInputs(MIXED, dtype=dtype, window=37)
    found, expected = attention_inputs.actual(), attention_inputs.expected()
    assert dtype == found.dtype
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@settings(max_examples=8, phases=[Phase.generate])  # shrinking would take minutes
@given(
    decodes=st.lists(st.tuples(st.integers(0, 300), st.just(1)), max_size=4),
    others=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 60)), max_size=3),
    window=st.none() | st.integers(1, 70),
    longest=st.sampled_from([128, 512, 100_000]),
)
def test_any_mixture_of_rows_matches_the_portable_attention(decodes, others, window, longest):
    if not decodes + others:
        return
    attention_inputs = AttentionInputs(decodes + others, window=window)
    with np.errstate(all="ignore"):
        torch.testing.assert_close(
            attention_inputs.actual(longest=longest), attention_inputs.expected(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("longest", [128, 512, 100_000])
def test_long_decode_is_the_same_for_every_split(launches, longest):
    attention_inputs = AttentionInputs([(300, 1), (127, 1), (128, 1), (511, 1)])
    torch.testing.assert_close(
        attention_inputs.actual(longest=longest), attention_inputs.expected(), rtol=1e-5, atol=1e-5
    )
    [(grid, options)] = [(grid, options) for name, grid, _, options in launches if name == "decode"]
    assert splits(4, 2, longest) == grid[2] == options["SPLITS"]
    assert (longest > 128) == any(name == "combine" for name, *_ in launches)


@pytest.mark.parametrize("longest", [128, 512])
def test_padding_rows_return_zeros_and_write_nothing(launches, longest):
    attention_inputs = AttentionInputs([(40, 1), (7, 1)])
    expected, rows = attention_inputs.expected(), attention_inputs.rows(padding=3)
    before = attention_inputs.cache.keys[0].clone()
    more = [
        torch.cat((one, torch.full_like(one[:1], 5).expand(3, -1, -1)))
        for one in (attention_inputs.query, attention_inputs.key, attention_inputs.value)
    ]
    found = DeviceAttention(rows, attention_inputs.cache, attention_inputs.shape, longest)(0, *more)
    torch.testing.assert_close(found[:2], expected, rtol=1e-5, atol=1e-5)
    assert not found[2:].any()
    changed = (before.nan_to_num(9e9) != attention_inputs.cache.keys[0].nan_to_num(9e9)).any(-1).any(-1)
    assert int(changed.sum()) == 2


def test_nan_in_one_sequence_does_not_reach_others(launches):
    attention_inputs = AttentionInputs([(9, 1), (10, 1), (0, 5), (4, 4)])
    expected = attention_inputs.expected()
    attention_inputs.cache.values[0][attention_inputs.table[8, 0]] = float("nan")
    found = attention_inputs.actual()
    healthy = [0, *range(2, len(found))]
    assert found[1].isnan().all()
    torch.testing.assert_close(found[healthy], expected[healthy], rtol=1e-5, atol=1e-5)


def test_tiles_hold_a_whole_head_group_and_are_powers_of_two():
    for dtype in TOLERANCES:
        for group in range(1, 40):
            for channels in (16, 64, 128, 256):
                for tiles in (decode_tiles(group, channels, dtype), prefill_tiles(group, channels, dtype)):
                    assert tiles.rows >= max(16, group)
                    assert tiles.rows & (tiles.rows - 1) == 0
                    assert tiles.tokens & (tiles.tokens - 1) == 0
