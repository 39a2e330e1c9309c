"""Blocks of ggml become the numbers that the library `gguf` restores, bit for bit."""

import numpy as np
import pytest

from fairlead.language.checkpoint.gguf.blocks import RESTORE, restore
from language.checkpoint.gguf_files import TYPES, blocks, numbers


def test_every_type_but_plain_numbers_is_restored():
    assert set(RESTORE) == set(TYPES) - {"F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", RESTORE)
def test_blocks_are_restored_as_by_the_library(kind):
    rng = np.random.default_rng(3)
    stored = blocks(kind, (40, 512), rng)
    assert restore(stored, kind).tobytes() == numbers(stored, kind).tobytes()


@pytest.mark.parametrize("kind", RESTORE)
def test_any_bytes_are_restored_as_by_the_library(kind):
    raw = np.random.default_rng(4).integers(0, 256, (64, RESTORE[kind][0]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = numbers(raw, kind)
    np.testing.assert_array_equal(restore(raw, kind), expected)
