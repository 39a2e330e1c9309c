"""What a decoder computes, as data. A family is one function from `config.json` to this description.

Every backend (`engine/models/network.py` in torch, `engine/cpu_step.py` in C, `engine/device_layers.py` in
Triton) is built from it alone. A backend lists the values that it computes, and refuses a model with any
other, also in a field that was added later.
"""

from collections.abc import Container, Mapping
from typing import Any, Literal

import msgspec

from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.quantized.schemes import read_scheme
from fairlead.language.checkpoint.rope import Rope, read_max_positions, read_rope
from fairlead.language.checkpoint.shape import ModelShape


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts.

    count: how many MLPs there are.
    per_token: how many of them each token goes through.
    inner_size: their inner size.
    normalize: whether their weights add up to 1.
    layers: which layers have experts; others have one MLP.
    """

    count: int
    per_token: int
    inner_size: int
    normalize: bool
    layers: tuple[bool, ...]


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a model's tensors in its checkpoint, without ".weight" or ".bias".

    From `attention_norm` on, names follow `layer`; those of an expert's matrices follow `expert` as well.
    Query, key and value, or gate and up, may have the same name: the stored tensor has them in this order.
    `prefixes`: pairs (prefix, replacement) that are applied to stored names first; only the first match is
    used. With the replacement None the tensor is ignored.
    """

    prefixes: tuple[tuple[str, str | None], ...] = ()
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    norm: str = "model.norm"
    score: str = "score"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    post_attention_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    post_mlp_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"

    def stored(self, part: str, layer: int | None = None, expert: int | None = None) -> str:
        """Return the name of `part`, a field of this struct."""
        name: str = getattr(self, part)
        if expert is not None:
            name = self.expert.format(expert) + name
        return name if layer is None else self.layer.format(layer) + name

    def renamed(self, name: str) -> str | None:
        """Return a stored name with its prefix replaced; None if the tensor is ignored.

        A network without a head, saved alone, has names without the prefix "model.".
        """
        kept = tuple((prefix, prefix) for prefix in ("model.", "lm_head.", "score."))
        rules = (*self.prefixes, *kept, ("", "model."))
        before, after = next(rule for rule in rules if name.startswith(rule[0]))
        return None if after is None else after + name.removeprefix(before)


class ArchitectureSpec(ModelShape, frozen=True, kw_only=True):
    """A decoder-only model: embedding, layers of attention and MLP around a residual stream, norm, head.

    intermediate_size: the inner size of an MLP.
    norm_epsilon: added to the variance in norms.
    ropes: the rotary embedding of each layer.
    norm_placement: attention and MLP read the normalized stream; with "before and after" their outputs are
        normalized too.
    norm_offset: whether norms multiply by 1 + the stored weight.
    query_key_norm: "head": queries and keys are normalized head by head before they are rotated.
    activation: that of the MLP.
    embedding_scale: multiplies the embedding, rounded to the weights' dtype.
    logit_cap: c: a logit x becomes c·tanh(x / c).
    tied: whether the head's weight is the embedding's.
    headless: whether there is no head, as the model makes embeddings.
    scores: in place of a head it has one row, and scores texts.
    score_tokens: with these, that row is the head's for the first token, minus the one for the second, if
        any.
    qkv_bias: whether the q, k, v projections have biases.
    output_bias: whether the attention's output has.
    mlp_bias: whether the MLP has.
    experts: None: each layer has one MLP.
    names: those of the tensors in a checkpoint.
    """

    intermediate_size: int
    norm_epsilon: float
    ropes: tuple[Rope, ...]
    norm_placement: Literal["before", "before and after"] = "before"
    norm_offset: bool = False
    query_key_norm: Literal["head"] | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    tied: bool
    headless: bool = False
    scores: bool = False
    score_tokens: tuple[int, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None
    names: TensorNames = TensorNames()

    @property
    def distinct_ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings that any layer has, each once."""
        return tuple(dict.fromkeys(self.ropes))

    @property
    def most_positions(self) -> int:
        """The longest texts that `for_context` takes."""
        return max(self.max_positions, *(rope.most_positions for rope in self.distinct_ropes))

    def for_context(self, tokens: int) -> "ArchitectureSpec":
        """Return the network for texts of up to `tokens`, at most `most_positions`."""
        if tokens <= self.max_positions:
            return self
        ropes = tuple(rope.for_context(tokens, self.head_dim) for rope in self.ropes)
        return msgspec.structs.replace(self, max_positions=tokens, ropes=ropes)

    @property
    def layer_ropes(self) -> tuple[int, ...]:
        """The index into `distinct_ropes` of each layer."""
        return tuple(map(self.distinct_ropes.index, self.ropes))


class _Anything:
    def __contains__(self, value: object) -> bool:
        return True


ANY: Container[object] = _Anything()
"""All values of a field, for `unsupported`."""
_NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"),
    *("max_positions", "windows", "ropes", "norm_epsilon", "embedding_scale", "attention_scale"),
    *("attention_cap", "logit_cap", "names"),
)
_SWITCHES = ("norm_offset", "tied", "qkv_bias", "output_bias", "mlp_bias")
COMMON: Mapping[str, Container[object]] = dict.fromkeys(_NUMBERS, ANY) | dict.fromkeys(
    _SWITCHES, (False, True)
)
"""What every backend supports, for `unsupported`. Add a new field only when all backends compute it."""


def unsupported(spec: ArchitectureSpec, supported: Mapping[str, Container[object]]) -> str | None:
    """Return the first value of `spec` that is not in `supported`, as text; None if there is none.

    A field that `supported` lacks must have its default.
    """
    for field in msgspec.structs.fields(spec):
        value = getattr(spec, field.name)
        if value not in supported.get(field.name, (field.default,)):
            return f"{field.name} {value!r}"
    return None


def read_architecture(
    config: CheckpointConfig,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    **features: Any,
) -> ArchitectureSpec:
    """Read the keys that all families share. `features`: fields of the result that a family sets itself.

    `head_dim` and `tied` are the family's defaults where the key is absent (None: hidden size / heads).
    """
    read_scheme(config)  # refuses what is not known
    if "activation" not in features and (named := config.text("hidden_act", "silu")) not in {"silu", "swish"}:
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
    if "ropes" not in features:
        features["ropes"] = (read_rope(config, max_positions=max_positions),) * layers
        max_positions = read_max_positions(config, max_positions)
    common = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": max_positions,
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "windows": (None,) * layers,
        "attention_scale": head_dim**-0.5,
        "tied": config.flag("tie_word_embeddings", default=tied),
    }
    return ArchitectureSpec(**{**common, **features})


def read_layers(config: CheckpointConfig) -> int:
    """Return the number of layers; bounded, as objects are made for each before the weights are checked."""
    return config.integer("num_hidden_layers", most=10_000)


def read_layer_types(config: CheckpointConfig, window: int) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`: `window` for sliding layers, None for others."""
    layers = read_layers(config)
    kinds = config.texts("layer_types")
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.fails("layer_types", f"must name full_attention or sliding_attention {layers} times")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_MOST_EXPERTS = 4096  # objects are made for each before the weights are checked


def read_experts(
    config: CheckpointConfig, *, inner_size: int, normalize: bool, layers: tuple[bool, ...]
) -> Experts:
    """Read the experts' keys; transformers has used two names for their number.

    config: the checkpoint's configuration.
    inner_size: their inner size.
    normalize: whether their weights add up to 1.
    layers: which layers have experts.
    """
    key = next((key for key in ("num_experts", "num_local_experts") if key in config.keys()), None)  # noqa: SIM118
    if key is None:  # the family's own
        key = "num_experts" if "num_experts" in config else "num_local_experts"
    count = config.integer(key, most=_MOST_EXPERTS)
    return Experts(
        count=count,
        per_token=config.integer("num_experts_per_tok", most=count),
        inner_size=inner_size,
        normalize=normalize,
        layers=layers,
    )
