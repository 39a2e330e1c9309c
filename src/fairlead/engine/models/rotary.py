"""Rotary position embeddings in torch.

A pair of a head's channels (i, i + D/2) is rotated by the angle position · frequency_i.
"""

import torch
from torch import Tensor

from fairlead.engine.models.frequencies import inverse_frequencies
from fairlead.language.checkpoint.rope import Rope


class Rotary:
    """The angles by which queries and keys are rotated at their positions.

    rope: the variant.
    head_dim: the size of a head.
    dtype: the type of cosine and sine.
    device: where they are.
    """

    def __init__(self, rope: Rope, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = torch.from_numpy(inverse_frequencies(rope, head_dim)).to(device)
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
