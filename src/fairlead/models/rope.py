"""Rotary position embeddings: the variant that a checkpoint uses, and its frequencies.

A pair of a head's channels (i, i + D/2) is rotated by the angle position · frequency_i. The variants have
different frequencies (and YaRN a scale), so that a context longer than the trained one stays in range.
"""

import math

import msgspec
import torch
from torch import Tensor

from fairlead.errors import LoadFailed
from fairlead.models.config import CheckpointConfig


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of rotary embedding; `kind` is "default", "linear", "llama3" or "yarn".

    `factor`: how much longer the context is than the trained one, of `original_positions` tokens.
    `low`, `high`: the bounds between which llama3 and yarn blend the stretched and the trained
    frequencies, in full rotations over the original context (yarn: `beta_slow` and `beta_fast`).
    `scale` multiplies cosine and sine.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 1.0
    scale: float = 1.0
    truncate: bool = True


def read_rope(config: CheckpointConfig, *, max_positions: int) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (earlier versions)."""
    key = next((key for key in ("rope_parameters", "rope_scaling") if key in config), None)
    theta = config.number("rope_theta", 10_000.0)
    if key is None:
        return Rope(theta=theta)
    return read_variant(config, config.section(key), max_positions=max_positions, theta=theta)


def read_variant(
    config: CheckpointConfig, section: CheckpointConfig, *, max_positions: int, theta: float
) -> Rope:
    """Read one variant's `section` of `config`; `theta` is the default where the section has none."""
    theta = section.number("rope_theta", theta)
    for source in (config, section):
        if source.number("partial_rotary_factor", 1.0) != 1:
            raise source.fails("partial_rotary_factor", "rotating only some channels is not supported")
    kind = section.text("rope_type", section.text("type", "default"))
    original_positions = section.integer("original_max_position_embeddings", max_positions)
    match kind:
        # dynamic changes the frequencies only beyond max_position_embeddings, which is our limit.
        case "default" | "dynamic":
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, kind=kind, factor=section.number("factor"))
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if low >= high:
                raise section.fails("high_freq_factor", f"must be above low_freq_factor, {low}")
            return Rope(
                theta=theta,
                kind=kind,
                factor=section.number("factor"),
                original_positions=original_positions,
                low=low,
                high=high,
            )
        case "yarn":
            factor = section.number("factor", max_positions / original_positions)
            return Rope(
                theta=theta,
                kind=kind,
                factor=factor,
                original_positions=original_positions,
                low=section.number("beta_slow", 1.0),
                high=section.number("beta_fast", 32.0),
                scale=_yarn_scale(section, factor),
                truncate=section.flag("truncate", default=True),
            )
    raise section.fails(
        "rope_type", f"{kind!r} is not supported (default, linear, dynamic, llama3, yarn are)"
    )


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
        case "default":
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


def _yarn_scale(section: CheckpointConfig, factor: float) -> float:
    """Return how much the stretch sharpens attention: YaRN's 0.1·ln(factor) + 1, or the file's own value."""

    def sharpness(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in section:
        return section.number("attention_factor")
    if "mscale" in section and "mscale_all_dim" in section:
        return sharpness(section.number("mscale")) / sharpness(section.number("mscale_all_dim"))
    return sharpness(1.0)


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
