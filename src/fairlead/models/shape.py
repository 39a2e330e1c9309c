"""The shape of a decoder-only model, and how the families' common keys of `config.json` give it."""

import msgspec

from fairlead.models.config import Config
from fairlead.models.rope import Rope, read_rope


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and switches of a decoder-only model; all its weights' shapes follow from them.

    `windows` has an entry a layer: how many positions, its own included, a token attends to there, or
    None for all. `tied`: the head's weight is the embedding's. The biases are those of the q, k, v
    projections, of the attention's output and of the MLP.
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
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the KV cache keeps of one token: a K and a V vector a layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_shape(
    config: Config,
    *,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelShape:
    """Read the keys that all families share; the options are what a family has settled for itself.

    `head_dim` is the family's default where the key is absent (None: hidden size / heads).
    """
    for key, reason in _REFUSED.items():
        if key in config:
            raise config.fails(key, reason)
    if (activation := config.text("hidden_act", "silu")) not in {"silu", "swish"}:
        raise config.fails("hidden_act", f"only silu is supported, not {activation!r}")

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
        rope=read_rope(config, max_positions=max_positions),
        windows=windows or (None,) * layers,
        tied=config.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
    )


def read_layers(config: Config) -> int:
    """How many layers; bounded, since things are made for each before the weights can contradict it."""
    return config.integer("num_hidden_layers", most=10_000)


_REFUSED = {
    "auto_map": "the model needs code from its repository, which is never run",
    "quantization_config": "quantized checkpoints are not supported",
}


def read_layer_windows(config: Config) -> tuple[int | None, ...]:
    """Which layers slide, as the Qwen families say it: a switch, a window, and the first layer with it."""
    layers = read_layers(config)
    if not config.flag("use_sliding_window", default=False) or "sliding_window" not in config:
        return (None,) * layers
    window = config.integer("sliding_window")
    if "layer_types" not in config:
        first = config.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    kinds = config.texts("layer_types")
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.fails("layer_types", f"must name full_attention or sliding_attention {layers} times")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
