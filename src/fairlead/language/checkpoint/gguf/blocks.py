"""Restores the numbers of ggml's blocks, exactly as the library `gguf` does, as float32.

A block is 32 or 256 inputs of a row. Its weights are scale · value + offset: the value is a code, or what a
table has for it. In a block of 256 (the "K" types and IQ4_XS) each group of 16 or 32 weights has a factor of
the block's scale, and perhaps one of the block's offset. Sources: ggml-quants.h, and `gguf.quants`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

_Numbers = Any  # an array: what the type checker makes of its arithmetic
NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The 16 values of IQ4_NL and IQ4_XS."""
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of MXFP4, as its scales are halved."""


def restore(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of rows [n, bytes] of uint8 as float32 [n, inputs]. `kind` is in `RESTORE`."""
    nbytes, function = RESTORE[kind]
    blocks = np.ascontiguousarray(raw).reshape(-1, nbytes)
    with np.errstate(all="ignore"):  # infinities are found when weights are packed
        numbers = function(blocks)
    restored: np.ndarray = numbers.reshape(len(raw), -1).astype(np.float32, copy=False)
    return restored


def _halves(raw: np.ndarray) -> _Numbers:
    """Return float16 in bytes [n, 2·k] as float32 [n, k]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> _Numbers:
    """Return the lower halves of all bytes of a row, then the upper halves."""
    return np.concatenate((raw & 15, raw >> 4), axis=-1)


def _bits(raw: np.ndarray, count: int) -> _Numbers:
    """Return `count` bits at a time: the lowest of all bytes of the last axis first. [..., parts, bytes]"""
    shifts = np.arange(0, 8, count, dtype=np.uint8)[:, None]
    return raw[..., None, :] >> shifts & np.uint8((1 << count) - 1)


def _fifth_bits(raw: np.ndarray) -> _Numbers:
    """Return the bits of a number of 32 bits in bytes [n, 4], shifted to their place in a code of 5 bits."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _q4_0(raw: np.ndarray) -> _Numbers:
    return _halves(raw[:, :2]) * (_nibbles(raw[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw: np.ndarray) -> _Numbers:
    return _halves(raw[:, :2]) * _nibbles(raw[:, 4:]).astype(np.float32) + _halves(raw[:, 2:4])


def _q5_0(raw: np.ndarray) -> _Numbers:
    codes = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return _halves(raw[:, :2]) * (codes.astype(np.float32) - 16)


def _q5_1(raw: np.ndarray) -> _Numbers:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return _halves(raw[:, :2]) * codes.astype(np.float32) + _halves(raw[:, 2:4])


def _q8_0(raw: np.ndarray) -> _Numbers:
    return _halves(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(raw: np.ndarray) -> _Numbers:
    return _halves(raw[:, :2]) * NON_LINEAR[_nibbles(raw[:, 2:])]


def _mxfp4(raw: np.ndarray) -> _Numbers:
    """A scale is half a power of two: the exponent's byte is that of float32, except for the smallest two."""
    exponents = raw[:, :1].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x200000) << exponents, (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32) * FP4[_nibbles(raw[:, 1:])]


def _q2_k(raw: np.ndarray) -> _Numbers:
    factors, codes = raw[:, :16], _bits(raw[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    scales = _halves(raw[:, 80:82]) * (factors & 15).astype(np.float32)
    offsets = _halves(raw[:, 82:84]) * (factors >> 4).astype(np.float32)
    return scales[..., None] * codes.astype(np.float32) - offsets[..., None]


def _q3_k(raw: np.ndarray) -> _Numbers:
    high = _bits(raw[:, None, :32], 1).reshape(-1, 256)
    codes = _bits(raw[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256).astype(np.int8)
    numbers = codes - ((high ^ 1) << 2).astype(np.int8)
    scales = _halves(raw[:, 108:110]) * six_bit_factors(raw[:, 96:108]).astype(np.float32)
    return scales[..., None] * numbers.reshape(-1, 16, 16).astype(np.float32)


def six_bit_factors(raw: np.ndarray) -> _Numbers:
    """Return the 16 factors of Q3_K, −32…31, in bytes [n, 12]: 16 lower halves, then 16 pairs of bits."""
    low, high = _nibbles(raw[:, :8]), _bits(raw[:, None, 8:], 2).reshape(-1, 16)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def packed_factors(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight factors of Q4_K's and Q5_K's scales and of their offsets, in bytes [n, 12].

    The first four of each have 6 bits of their own bytes. The others have 4 bits in the last four bytes, and
    the upper two bits of the first eight.
    """
    first, second, third = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), axis=-1)
    offsets = np.concatenate((second & 63, third >> 4 | (second >> 6) << 4), axis=-1)
    return scales, offsets


def _with_offsets(raw: np.ndarray, codes: np.ndarray) -> _Numbers:
    scale_factors, offset_factors = packed_factors(raw[:, 4:16])
    scales = _halves(raw[:, :2]) * scale_factors.astype(np.float32)
    offsets = _halves(raw[:, 2:4]) * offset_factors.astype(np.float32)
    return scales[..., None] * codes.reshape(-1, 8, 32).astype(np.float32) - offsets[..., None]


def _q4_k(raw: np.ndarray) -> _Numbers:
    return _with_offsets(raw, _bits(raw[:, 16:].reshape(-1, 4, 32), 4))


def _q5_k(raw: np.ndarray) -> _Numbers:
    high = _bits(raw[:, None, 16:48], 1).reshape(-1, 4, 2, 32)
    return _with_offsets(raw, _bits(raw[:, 48:].reshape(-1, 4, 32), 4) | high << 4)


def _q6_k(raw: np.ndarray) -> _Numbers:
    low = _bits(raw[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 2, 4, 32)
    high = _bits(raw[:, 128:192].reshape(-1, 2, 32), 2)
    numbers = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = _halves(raw[:, 208:]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return scales[..., None] * numbers.reshape(-1, 16, 16).astype(np.float32)


def _iq4_xs(raw: np.ndarray) -> _Numbers:
    high = np.ascontiguousarray(raw[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), axis=-1).reshape(-1, 8)
    factors = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    scales = _halves(raw[:, :2]) * factors.astype(np.float32)
    return scales[..., None] * NON_LINEAR[_nibbles(raw[:, 8:].reshape(-1, 8, 16))]


RESTORE: dict[str, tuple[int, Callable[[np.ndarray], _Numbers]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
}
"""By type: the bytes of a block, and the function that restores blocks [n, bytes]."""
