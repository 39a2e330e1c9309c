"""The hashes by which prompts find the KV cache blocks of earlier prompts."""

import os
from array import array

from advisories.tries import tries
from engine.fake_model import FakeRunner
from fairlead._cext.blockpool import BlockHashes
from fairlead.engine.engine import Engine

BLOCK = 16


def hashes(tokens: list[int], *, key: bytes = bytes(16), salt: bytes = b"") -> list[bytes]:
    chain = BlockHashes(key, BLOCK, salt)
    chain.extend(array("i", tokens))
    return [chain[index] for index in range(len(chain))]


@tries("CVE-2025-25183")
def test_hashes_depend_on_a_key_so_that_collisions_cannot_be_prepared():
    tokens = list(range(64))
    assert hashes(tokens, key=bytes(16)) == hashes(tokens, key=bytes(16))
    assert not set(hashes(tokens, key=bytes(16))) & set(hashes(tokens, key=b"\x01" + bytes(15)))


@tries("CVE-2025-25183")
def test_every_engine_draws_its_own_random_key(monkeypatch):
    drawn = []
    draw = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: drawn.append(draw(size)) or drawn[-1])
    for _ in range(2):
        Engine(
            FakeRunner(16),
            slots=1,
            max_batch=1,
            max_batched_tokens=16,
            max_model_len=64,
            blocks_total=[4],
            windows=[None],
            block_size=BLOCK,
            vocab_size=32,
            eos_token_ids=[0],
            draw_seed=lambda: 1,
        )
    assert [len(key) for key in drawn] == [16, 16]
    assert drawn[0] != drawn[1]


@tries("CVE-2025-46722", "CVE-2026-10775")
def test_hash_covers_the_whole_block_the_blocks_before_it_and_the_salt():
    tokens = list(range(BLOCK))
    of_one = hashes(tokens)[0]
    assert len(of_one) == 16  # the hash is not truncated
    different = [
        hashes(tokens[::-1])[0],
        hashes([*tokens[:-1], 99])[0],
        hashes([*tokens, *tokens])[1],  # the same block, but after another
        hashes(tokens, salt=b"\x00")[0],
        hashes(tokens, salt=b"\x00\x00")[0],
        hashes(tokens, salt=array("i", tokens).tobytes())[0],
    ]
    assert len({of_one, *different}) == 1 + len(different)
