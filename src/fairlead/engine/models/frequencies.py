"""The frequencies of each variant of rotary position embeddings, for every backend. Imports no torch."""

import math

import numpy as np

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the radians per position for each pair of channels: [head_dim / 2], float32.

    Each step is rounded to float32, as where models are trained.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is exact before it is rounded; a library's float32 power may be off by one unit.
    power = (float(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    trained: np.ndarray = np.float32(1.0) / power
    stretched: np.ndarray = trained / np.float32(rope.factor)
    match rope.kind:
        case "linear":
            return stretched
        case "llama3":
            rotations = np.float32(rope.original_positions) * trained / np.float32(2 * math.pi)
            kept = (rotations - np.float32(rope.low)) / np.float32(rope.high - rope.low)
            return _blend(stretched, trained, kept.clip(0, 1))
        case "yarn":
            return _blend(trained, stretched, _yarn_ramp(rope, head_dim))
        case "longrope":
            return trained / np.asarray(rope.factors, np.float32)
        case "default" | "dynamic":
            return trained
    raise LoadFailed(f"rotary embeddings of kind {rope.kind!r} are not supported")


def _blend(one: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return `one` where `share` is 0, `other` where it is 1, and what is between."""
    near = other - (other - one) * (1 - share)  # exact where the share is 1
    return np.asarray(np.where(share < 0.5, one + share * (other - one), near))


def _yarn_ramp(rope: Rope, head_dim: int) -> np.ndarray:
    """Return 0 for channels fast enough to keep their frequency, 1 for stretched ones, and a ramp between."""

    def channel(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.high), channel(rope.low)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # makes the ramp a step without a division by zero
    channels = np.arange(head_dim // 2, dtype=np.float32)
    return ((channels - np.float32(low)) / np.float32(high - low)).clip(0, 1)
