"""The chain of content hashes, against a plain SipHash-2-4-128 over the documented input."""

import struct
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead._cext.blockpool import BlockHashes

HASH_KEY = bytes(range(16))
MASK = 2**64 - 1

# The first of the authors' test vectors: messages b"", 00, 00 01, … under the key 00 01 … 0f.
PUBLISHED = [
    "a3817f04ba25a8e66df67214c7550293",
    "da87c1d86b99af44347659119b22fc45",
]


def rotated(word, bits):
    return (word << bits | word >> (64 - bits)) & MASK


def sip_rounds(v0, v1, v2, v3, count):
    for _ in range(count):
        v0 = (v0 + v1) & MASK
        v1 = rotated(v1, 13) ^ v0
        v0 = rotated(v0, 32)
        v2 = (v2 + v3) & MASK
        v3 = rotated(v3, 16) ^ v2
        v0 = (v0 + v3) & MASK
        v3 = rotated(v3, 21) ^ v0
        v2 = (v2 + v1) & MASK
        v1 = rotated(v1, 17) ^ v2
        v2 = rotated(v2, 32)
    return v0, v1, v2, v3


def siphash(key, message):
    k0, k1 = struct.unpack("<2Q", key)
    v0, v1 = k0 ^ int.from_bytes(b"somepseu", "big"), k1 ^ int.from_bytes(b"dorandom", "big") ^ 0xEE
    v2, v3 = k0 ^ int.from_bytes(b"lygenera", "big"), k1 ^ int.from_bytes(b"tedbytes", "big")
    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        v0, v1, v2, v3 = sip_rounds(v0, v1, v2, v3 ^ word, 2)
        v0 ^= word
    v0, v1, v2, v3 = sip_rounds(v0, v1, v2 ^ 0xEE, v3, 4)
    low = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = sip_rounds(v0, v1 ^ 0xDD, v2, v3, 4)
    return struct.pack("<2Q", low, v0 ^ v1 ^ v2 ^ v3)


def expected_chain(hash_key, block_size, salt, tokens):
    """Hash each block with its parent's hash. The first parent is the salt, padded unlike any block."""
    parent = siphash(hash_key, salt + b"\x80" + bytes(-len(salt) % 4))
    chain = []
    for i in range(0, len(tokens) // block_size * block_size, block_size):
        parent = siphash(hash_key, parent + struct.pack(f"<{block_size}i", *tokens[i : i + block_size]))
        chain.append(parent)
    return chain


def chain_of(tokens, hash_key=HASH_KEY, block_size=4, salt=b""):
    hashes = BlockHashes(hash_key, block_size, salt)
    hashes.extend(array("i", tokens))
    return list(hashes)


def test_plain_siphash_gives_the_published_results():
    assert [siphash(HASH_KEY, bytes(range(length))).hex() for length in range(len(PUBLISHED))] == PUBLISHED


@given(
    hash_key=st.binary(min_size=16, max_size=16),
    block_size=st.integers(1, 33),
    salt=st.binary(max_size=20),
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=100),
)
def test_kernel_hashes_equal_those_of_the_plain_siphash(hash_key, block_size, salt, tokens):
    expected = expected_chain(hash_key, block_size, salt, tokens)
    assert expected == chain_of(tokens, hash_key, block_size, salt)


@given(cuts=st.lists(st.integers(0, 60), max_size=5), block_size=st.sampled_from([1, 4, 16]))
def test_chain_does_not_depend_on_the_pieces_in_which_it_grew(cuts, block_size):
    tokens = list(range(100, 160))
    hashes = BlockHashes(HASH_KEY, block_size)
    for cut in [*sorted(cuts), 60]:
        assert cut // block_size == hashes.extend(array("i", tokens[:cut])) == len(hashes)
    assert expected_chain(HASH_KEY, block_size, b"", tokens) == list(hashes)


def test_block_longer_than_its_length_byte_can_express():
    tokens = list(range(1000))
    assert expected_chain(HASH_KEY, 1000, b"", tokens) == chain_of(tokens, block_size=1000)


def test_any_difference_changes_all_hashes_after_it():
    tokens = list(range(12))
    own = chain_of(tokens)
    assert [
        one for one, other in zip(own, chain_of(tokens, hash_key=bytes(16)), strict=True) if one == other
    ] == []
    assert [one for one, other in zip(own, chain_of(tokens, salt=b"ann"), strict=True) if one == other] == []
    changed = chain_of([*tokens[:5], 99, *tokens[6:]])
    assert [one == other for one, other in zip(own, changed, strict=True)] == [True, False, False]


def test_different_salts_give_different_hashes():
    salts = [b"", b"\0", b"\0\0", b"\x80", b"\x80\0", b"\0\x80", b"ann", b"ann\0", b"ann\x80"]
    assert len(salts) == len({chain_of([1, 2, 3, 4], salt=salt)[0] for salt in salts})


def test_any_int32_buffer_is_accepted():
    tokens = array("i", range(8))
    for same in (
        tokens,
        memoryview(tokens),
        np.arange(8, dtype=np.int32),
        memoryview(tokens.tobytes()).cast("i"),
    ):
        hashes = BlockHashes(HASH_KEY, 4)
        assert hashes.extend(same) == 2
        assert chain_of(range(8)) == list(hashes)


@pytest.mark.parametrize(
    "wrong",
    [
        b"01234567",
        array("q", [1, 2]),
        array("I", [1, 2]),
        array("f", [1, 2]),
        np.zeros((2, 2), np.int32),
        np.arange(8, dtype=np.int32).astype(">i4"),
        [1, 2],
        None,
    ],
    ids=repr,
)
def test_anything_but_a_one_dimensional_int32_buffer_raises(wrong):
    hashes = BlockHashes(HASH_KEY, 1)
    with pytest.raises(TypeError):
        hashes.extend(wrong)
    assert len(hashes) == 0


def test_non_contiguous_buffer_raises():
    with pytest.raises((BufferError, ValueError)):
        BlockHashes(HASH_KEY, 1).extend(np.arange(8, dtype=np.int32)[::2])


def test_extending_with_fewer_tokens_raises():
    hashes = BlockHashes(HASH_KEY, 4)
    hashes.extend(array("i", range(8)))
    with pytest.raises(ValueError):
        hashes.extend(array("i", range(7)))
    assert chain_of(range(8)) == list(hashes)


def test_only_full_blocks_have_hashes():
    hashes = BlockHashes(HASH_KEY, 4)
    hashes.extend(array("i", range(7)))
    assert hashes[0] == hashes[-1]
    for index in (1, -2):
        with pytest.raises(IndexError):
            hashes[index]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((bytes(15), 4), ValueError),
        ((bytes(17), 4), ValueError),
        (("0123456789abcdef", 4), TypeError),
        ((HASH_KEY, 0), ValueError),
        ((HASH_KEY, 2**20), ValueError),
        ((HASH_KEY, 4, "ann"), TypeError),
    ],
)
def test_impossible_options_are_refused(arguments, error):
    with pytest.raises(error):
        BlockHashes(*arguments)
