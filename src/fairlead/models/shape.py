"""The shape of a decoder-only model, and how to read it from the common keys of `config.json`."""

import msgspec

from fairlead.models.config import CheckpointConfig
from fairlead.models.rope import Rope, read_rope


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: `count` MLPs of `inner_size`, of which each token goes through `per_token`.

    With `normalize` their weights add up to 1. `layers` says which layers have experts; others have one MLP.
    """

    count: int
    per_token: int
    inner_size: int
    normalize: bool
    layers: tuple[bool, ...]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and switches of a decoder-only model; all its weights' shapes follow from them.

    `windows` has an entry per layer: how many positions, its own included, a token attends to there, or
    None for all. `rope` applies to every layer; but if there is a `window_rope`, that applies to the layers
    with a window. Attention scores are query · key · `attention_scale`. A cap c maps x to c·tanh(x / c), for
    those scores or for the logits. `activation`: "silu" or "gelu_tanh". `tied`: the head's weight is the
    embedding's; `headless`: there is no head, as the model makes embeddings. The biases are those of the
    q, k, v projections, of the attention's output and of the MLP. `experts` is None where every layer has
    one MLP.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    window_rope: Rope | None = None
    windows: tuple[int | None, ...]
    attention_scale: float
    attention_cap: float | None = None
    logit_cap: float | None = None
    activation: str = "silu"
    tied: bool
    headless: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The KV cache groups: the distinct windows of the layers, the widest (None: all) first."""
        return tuple(sorted(set(self.windows), key=lambda window: (window is not None, -(window or 0))))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The index into `groups` of each layer."""
        groups = self.groups
        return tuple(groups.index(window) for window in self.windows)

    @property
    def kv_elements_per_token(self) -> tuple[int, ...]:
        """Numbers that the KV cache holds per token, by group: a K and a V vector per layer and KV head."""
        return tuple(2 * self.windows.count(window) * self.kv_heads * self.head_dim for window in self.groups)


def read_shape(
    config: CheckpointConfig,
    *,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    rope: Rope | None = None,
    activation: str | None = None,
    tied: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelShape:
    """Read the keys that all families share; the options are what a family sets itself.

    `head_dim` and `tied` are the family's defaults where the key is absent (None: hidden size / heads).
    """
    for key, reason in REFUSED.items():
        if key in config:
            raise config.fails(key, reason)
    if activation is None and (named := config.text("hidden_act", "silu")) not in {"silu", "swish"}:
        raise config.fails("hidden_act", f"only silu is supported, not {named!r}")

    layers = read_layers(config)
    hidden_size = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.fails(
            "num_key_value_heads", f"must divide the {heads} attention heads, {kv_heads} does not"
        )
    head_dim = config.integer("head_dim", head_dim or hidden_size // heads)
    if head_dim % 2:
        raise config.fails("head_dim", f"must be even to be rotated, not {head_dim}")
    max_positions = config.integer("max_position_embeddings")
    return ModelShape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope=rope or read_rope(config, max_positions=max_positions),
        windows=windows or (None,) * layers,
        attention_scale=head_dim**-0.5,
        activation=activation or "silu",
        tied=config.flag("tie_word_embeddings", default=tied),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
    )


def read_layers(config: CheckpointConfig) -> int:
    """Return the number of layers; bounded, as objects are made for each before the weights are checked."""
    return config.integer("num_hidden_layers", most=10_000)


REFUSED = {
    "auto_map": "the model needs code from its repository, which is never run",
    "quantization_config": "quantized checkpoints are not supported",
}


def read_layer_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    """Return the windows, which the Qwen families give as a switch, a window, and the first layer with it."""
    layers = read_layers(config)
    if not config.flag("use_sliding_window", default=False) or "sliding_window" not in config:
        return (None,) * layers
    window = config.integer("sliding_window")
    if "layer_types" not in config:
        first = config.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return read_layer_types(config, window)


def read_layer_types(config: CheckpointConfig, window: int) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`: `window` for sliding layers, None for others."""
    layers = read_layers(config)
    kinds = config.texts("layer_types")
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.fails("layer_types", f"must name full_attention or sliding_attention {layers} times")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
