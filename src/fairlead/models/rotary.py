"""Rotary position embeddings: the frequencies of each variant, and the rotation.

A pair of a head's channels (i, i + D/2) is rotated by the angle position · frequency_i.
"""

import math

import torch
from torch import Tensor

from fairlead.errors import LoadFailed
from fairlead.models.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians per position for each pair of channels: [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    trained = 1.0 / rope.theta**exponents
    match rope.kind:
        case "linear":
            return trained / rope.factor
        case "llama3":
            rotations = rope.original_positions * trained / (2 * math.pi)
            kept = ((rotations - rope.low) / (rope.high - rope.low)).clamp(0, 1)
            return torch.lerp(trained / rope.factor, trained, kept)
        case "yarn":
            return torch.lerp(trained, trained / rope.factor, _yarn_ramp(rope, head_dim))
        case "default" | "dynamic":
            return trained
    raise LoadFailed(f"rotary embeddings of kind {rope.kind!r} are not supported")


class Rotary:
    """The angles by which queries and keys are rotated at their positions."""

    def __init__(self, rope: Rope, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.scale
        self._dtype = dtype

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine, each [tokens, 1, head_dim], of `positions` [tokens]: once per step.

        Computed in float32 up to the last rounding: a bfloat16 angle is wrong by whole turns.
        """
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cosine, sine = angles.cos() * self._scale, angles.sin() * self._scale
        both = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        return both[0][:, None].to(self._dtype), both[1][:, None].to(self._dtype)


def rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [tokens, heads, head_dim] by `Rotary.angles`: x·cos + swap(x)·sin, signs in the sine."""
    cosine, sine = angles
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cosine, swapped, sine)


def _yarn_ramp(rope: Rope, head_dim: int) -> Tensor:
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
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
