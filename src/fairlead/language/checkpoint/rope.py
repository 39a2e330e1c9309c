"""Reads which variant of rotary position embeddings a checkpoint has, and how long a context it is for.

The variants have different frequencies, so that a context longer than the trained one stays in range.
`engine/models/rotary.py` computes with them.
"""

import math

import msgspec

from fairlead.language.checkpoint.config import CheckpointConfig

MOST_POSITIONS = 2**31 - 1  # as `CheckpointConfig.integer`


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of rotary embedding.

    theta: the base of the frequencies.
    kind: "default", "linear", "dynamic", "llama3", "yarn" or "longrope". A dynamic one has the trained
        frequencies; `for_context` returns those for longer texts.
    factor: how much longer the context is than the trained one.
    original_positions: the length of the trained one, in tokens.
    low: llama3 and yarn: below so many full rotations over the trained context, a frequency is stretched
        (yarn: `beta_slow`).
    high: above so many, it is the trained one (yarn: `beta_fast`); between the two they are blended.
    scale: multiplies cosine and sine.
    truncate: whether yarn rounds the bounds to whole dimensions.
    factors: longrope: by pair of channels, how much slower it turns than without.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 1.0
    scale: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()

    @property
    def most_positions(self) -> int:
        """The longest text that a dynamic one can be made for; 0 for others."""
        return _stretched(self.original_positions, self.factor) if self.kind == "dynamic" else 0

    def for_context(self, tokens: int, head_dim: int) -> "Rope":
        """Return it for texts of up to `tokens`, which only changes a dynamic one beyond its trained length.

        The frequencies of dynamic scaling ("NTK") depend on the length of a text. transformers computes them
        anew whenever the longest text of a batch grows, and leaves the keys in its cache as they are. Here
        texts of all lengths share steps and cached prefixes, so all have the frequencies of the longest one
        that is allowed.
        """
        if self.kind != "dynamic" or tokens <= self.original_positions or head_dim == 2:
            return self
        growth = self.factor * tokens / self.original_positions - (self.factor - 1)
        return Rope(theta=self.theta * growth ** (head_dim / (head_dim - 2)))


def read_rope(config: CheckpointConfig, *, max_positions: int) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (earlier versions)."""
    section = find_rope_section(config)
    theta = config.number("rope_theta", 10_000.0)
    if section is None:
        return Rope(theta=theta)
    return read_variant(config, section, max_positions=max_positions, theta=theta)


def find_rope_section(config: CheckpointConfig) -> CheckpointConfig | None:
    """Return the object with the variant's keys; None if there is none."""
    for key in ("rope_parameters", "rope_scaling"):
        if key in config and (section := config.section(key)).keys():
            return section
    return None


def read_max_positions(config: CheckpointConfig, written: int) -> int:
    """Return the length of texts that a model is for, with `written` as its `max_position_embeddings`.

    The makers of models describe YaRN and linear scaling as keys that are added to a configuration whose
    `max_position_embeddings` stays: 4 times the trained length with a factor of 4. A configuration that was
    saved after training with them has the longer length already, which stays then. Without
    `original_max_position_embeddings`, `written` is the trained length.

    longrope has different angles for short and long texts, and one batch cannot mix them: only the trained
    length is served. llama3 scaling is part of training, so its length is always `written`.
    """
    section = find_rope_section(config)
    if section is None:
        return written
    kind = _read_kind(section)
    original = _read_original(config, section, written)
    if kind in ("longrope", "su"):
        return min(written, original)
    if kind not in ("linear", "yarn"):
        return written
    return max(written, _stretched(original, _read_factor(section, kind, written / original)))


def read_variant(
    config: CheckpointConfig, section: CheckpointConfig, *, max_positions: int, theta: float
) -> Rope:
    """Read one variant.

    config: the checkpoint's configuration.
    section: its part with the variant.
    max_positions: the context of the model.
    theta: the base of the frequencies where the section has none.
    """
    theta = section.number("rope_theta", theta)
    for source in (config, section):
        if source.number("partial_rotary_factor", 1.0) != 1:
            raise source.fails("partial_rotary_factor", "rotating only some channels is not supported")
    kind = _read_kind(section)
    original_positions = _read_original(config, section, max_positions)
    match kind:
        case "default":
            return Rope(theta=theta)
        case "dynamic":  # its reference is max_position_embeddings, also beside an original length
            return Rope(
                theta=theta, kind=kind, factor=section.number("factor"), original_positions=max_positions
            )
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
            factor = _read_factor(section, kind, max_positions / original_positions)
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
        case "longrope" | "su":
            return _read_longrope(config, section, theta, max_positions / original_positions)
    raise section.fails(
        "rope_type", f"{kind!r} is not supported (default, linear, dynamic, llama3, yarn, longrope are)"
    )


def _read_longrope(
    config: CheckpointConfig, section: CheckpointConfig, theta: float, stretched: float
) -> Rope:
    """Read the factors for texts of the trained length, which is all that is served.

    Attention is sharpened by the file's own number, or else for a context `stretched` so many times.
    """
    factors = section.numbers("short_factor")
    heads = config.integer("num_attention_heads")
    expected = config.integer("head_dim", config.integer("hidden_size") // heads) // 2
    if len(factors) != expected:
        raise section.fails("short_factor", f"has {len(factors)} factors for {expected} pairs of channels")
    if "attention_factor" in section:
        return Rope(theta=theta, kind="longrope", factors=factors, scale=section.number("attention_factor"))
    factor = section.number("factor", stretched)
    original = _read_original(config, section, config.integer("max_position_embeddings"))
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(theta=theta, kind="longrope", factors=factors, scale=scale)


def _read_kind(section: CheckpointConfig) -> str:
    return section.text("rope_type", section.text("type", "default"))


def _read_original(config: CheckpointConfig, section: CheckpointConfig, max_positions: int) -> int:
    """Return the trained length, which some families have beside the section, where it takes precedence."""
    key = "original_max_position_embeddings"
    return (config if key in config else section).integer(key, max_positions)


def _read_factor(section: CheckpointConfig, kind: str, implied: float) -> float:
    return section.number("factor", implied if kind == "yarn" else None)


def _stretched(positions: int, factor: float) -> int:
    return int(min(positions * factor, MOST_POSITIONS))


def _yarn_scale(section: CheckpointConfig, factor: float) -> float:
    """Return how much the stretch sharpens attention: YaRN's 0.1·ln(factor) + 1, or the file's own value."""

    def sharpness(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in section:
        return section.number("attention_factor")
    if "mscale" in section and "mscale_all_dim" in section:
        return sharpness(section.number("mscale")) / sharpness(section.number("mscale_all_dim"))
    return sharpness(1.0)
