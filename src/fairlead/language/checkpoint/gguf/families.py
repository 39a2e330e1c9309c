"""The families that llama.cpp and we have: `config.json` from a GGUF's metadata, and the tensors' names.

llama.cpp's names are those of `gguf.constants`. A family is a function here, and an entry in `FAMILIES`. A
key that nobody reads could change what the network computes, so an unknown one is refused.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.gguf.metadata import Metadata

_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class Family(msgspec.Struct, frozen=True):
    """What a family's files say, in Hugging Face's terms.

    config: the keys of its `config.json`.
    names: by ggml's name of a layer's part ("attn_norm"), the name of the same part there. A part of one
        expert has `{}` for its number.
    rotated_pairs: of each part whose rows are in the order of llama.cpp's rotation, with the two channels of
        a pair side by side: its number of heads.
    offset_norms: whether norms are stored plus one.
    """

    config: dict[str, Any]
    names: Mapping[str, str]
    rotated_pairs: Mapping[str, int] = {}
    offset_norms: bool = False


class Stored(msgspec.Struct, frozen=True):
    """What a family needs to know of the tensors.

    names: those that the file has.
    vocab_size: how many tokens the embedding has.
    dtype: the type in which the model is to be computed.
    rope_factors: those of the tensors named in `_ROPE_FACTORS`, by name.
    """

    names: frozenset[str]
    vocab_size: int
    dtype: str
    rope_factors: Mapping[str, tuple[float, ...]]


_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _DENSE | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _with_experts(router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the names with experts, as one tensor for all or, in old files, as one for each."""
    experts = {"ffn_gate": gate, "ffn_up": up, "ffn_down": down}
    stacked = {f"{part}_exps": name for part, name in experts.items()}
    single = {f"{part}.{{}}": name for part, name in experts.items()}
    return _DENSE | {"ffn_gate_inp": router} | stacked | single


_MIXTRAL = _with_experts(
    "block_sparse_moe.gate",
    *(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
)
_QWEN_EXPERTS = _with_experts(
    "mlp.gate", *(f"mlp.experts.{{}}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
)
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""The tensors of the model itself, by ggml's names."""
NO_WEIGHTS = frozenset(_ROPE_FACTORS)
"""Tensors that are read for the configuration."""
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)(?:\.(\d+))?\.(weight|bias)", re.ASCII)


class Place(msgspec.Struct, frozen=True):
    """Where a tensor belongs.

    name: in Hugging Face's layout. With `{}` it is a stack, of one for each expert.
    part: ggml's name of it.
    """

    name: str
    part: str


def place(family: Family, stored: str) -> Place | None:
    """Return where the tensor with ggml's name `stored` belongs; None if the family has none of that name."""
    if (name := WHOLE.get(stored)) is not None:
        return Place(name, stored)
    if (found := _LAYER.fullmatch(stored)) is None:
        return None
    layer, part, expert, kind = found.groups()
    key = part if expert is None else f"{part}.{{}}"
    if (known := family.names.get(key)) is None:
        return None
    known = known if expert is None else known.format(int(expert))
    return Place(f"model.layers.{int(layer)}.{known}.{kind}", part)


def read_family(metadata: Metadata, stored: Stored) -> Family:
    """Return the family of a file. `LoadFailed` for another family, and for a key that is not known."""
    name = metadata.text("general.architecture")
    if (kind := FAMILIES.get(name)) is None:
        raise metadata.fails(
            "general.architecture", f"{name!r:.50} is not supported ({', '.join(FAMILIES)} are)"
        )
    for key in metadata.keys():  # noqa: SIM118  no dictionary
        part = key.removeprefix(f"{name}.")
        if part != key and part not in _KNOWN_KEYS and not _IGNORED.fullmatch(part):
            raise metadata.fails(key, "is not known, and might change what the network computes")
    return kind(_Sizes(metadata, name), stored)


# Keys that say nothing of the network, or nothing that its tensors do not say.
_IGNORED = re.compile(r"vocab_size|tensor_data_layout|rope\.scaling\.finetuned|attention\.layer_norm_epsilon")
_KNOWN_KEYS = frozenset({
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "pooling_type"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.sliding_window_pattern"),
    *("attention.causal", "final_logit_softcapping", "attn_logit_softcapping"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func"),
})  # fmt: skip
_SOFTMAX = 1
_POOLINGS = {1: "mean", 3: "lasttoken"}


class _Sizes:
    """The metadata of one architecture, and the keys that all families share."""

    def __init__(self, metadata: Metadata, name: str) -> None:
        self.metadata = metadata
        self.name = name
        self.layers = self.integer("block_count", most=10_000)
        self.hidden = self.integer("embedding_length")
        self.heads = metadata.same_integer(self.key("attention.head_count"), self.layers)
        self.kv_heads = metadata.same_integer(self.key("attention.head_count_kv"), self.layers, self.heads)
        self.head_dim = self.integer("attention.key_length", self.hidden // self.heads)
        self.feed_forward = metadata.same_integer(self.key("feed_forward_length"), self.layers)
        self._check("attention.value_length", self.head_dim, "values and keys must have the same size")
        self._check("rope.dimension_count", self.head_dim, "rotating only some channels is not supported")
        if not self.metadata.flag(self.key("attention.causal"), default=True):
            raise self.refusal("attention.causal", "only causal attention is supported")

    def key(self, part: str) -> str:
        return f"{self.name}.{part}"

    def refusal(self, part: str, reason: str) -> LoadFailed:
        return self.metadata.fails(self.key(part), reason)

    def has(self, part: str) -> bool:
        return self.key(part) in self.metadata

    def integer(self, part: str, default: int | None = None, *, most: int = 1 << 30) -> int:
        value = self.metadata.integer(self.key(part), default, least=1)
        if value > most:
            raise self.refusal(part, f"must be at most {most}, not {value}")
        return value

    def number(self, part: str, default: float | None = None) -> float:
        return self.metadata.number(self.key(part), default)

    def _check(self, part: str, expected: int, reason: str) -> None:
        if (value := self.integer(part, expected)) != expected:
            raise self.refusal(part, f"{reason}: {value} of {expected}")

    def config(self, architecture: str, stored: Stored, **more: Any) -> dict[str, Any]:
        """Return the keys that all families have, and `more`."""
        pooling = self.metadata.integer(self.key("pooling_type"), 0)
        if pooling and pooling not in _POOLINGS:
            raise self.refusal("pooling_type", f"{pooling} is not supported ({_POOLINGS} are)")
        if pooling:
            architecture = architecture.replace("ForCausalLM", "Model")
        return {
            "architectures": [architecture],
            "dtype": stored.dtype,
            "vocab_size": stored.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in stored.names,
            "rope_theta": self.number("rope.freq_base", 10_000.0),
            "rope_scaling": self.rope_scaling(stored),
            **more,
        }

    def rope_scaling(self, stored: Stored) -> dict[str, Any] | None:
        """Return the scaling of rotary embeddings; None if there is none.

        llama3's scaling is a tensor of factors, without the parameters that they were made of. It is given as
        longrope, which has a factor for each pair of channels.
        """
        kind = self.metadata.text(self.key("rope.scaling.type"), "none")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        original = self.integer("rope.scaling.original_context_length", self.integer("context_length"))
        sharpness = self.number("rope.scaling.attn_factor", 1.0)
        short = stored.rope_factors.get("rope_factors_short.weight")
        factors = stored.rope_factors.get("rope_freqs.weight", short)
        if factors is not None:
            if kind not in ("none", "longrope"):
                raise self.refusal("rope.scaling.type", f"{kind!r:.50} beside factors is not supported")
            scaling = {"rope_type": "longrope", "short_factor": list(factors), "attention_factor": sharpness}
            return scaling if short is None else scaling | {"original_max_position_embeddings": original}
        if kind == "none" and factor in (0.0, 1.0):  # 0 stands for none in old files
            return None
        if kind not in ("none", "linear", "yarn"):
            raise self.refusal("rope.scaling.type", f"{kind!r:.50} is not supported (linear, yarn are)")
        if sharpness != 1:
            raise self.refusal("rope.scaling.attn_factor", "is supported with a factor for each channel only")
        if kind != "yarn":
            return {"rope_type": "linear", "factor": factor, "original_max_position_embeddings": original}
        if self.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise self.refusal("rope.scaling.yarn_ext_factor", "only 1 is supported")
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if self.has("rope.scaling.yarn_attn_factor"):
            scaling["attention_factor"] = self.number("rope.scaling.yarn_attn_factor")
        if self.has("rope.scaling.yarn_log_multiplier"):
            scaling |= {"mscale": 1.0, "mscale_all_dim": self.number("rope.scaling.yarn_log_multiplier")}
        return scaling


def _llama(sizes: _Sizes, stored: Stored) -> Family:
    """Llama and what computes like it, Mistral and Mixtral: llama.cpp gives all of them one name."""
    experts = _read_experts(sizes)
    window = sizes.metadata.integer(sizes.key("attention.sliding_window"), 0)
    architecture = "MixtralForCausalLM" if experts else "MistralForCausalLM" if window else "LlamaForCausalLM"
    config = sizes.config(
        architecture,
        stored,
        attention_bias="blk.0.attn_q.bias" in stored.names,
        mlp_bias="blk.0.ffn_gate.bias" in stored.names,
        sliding_window=window or None,
        **experts,
    )
    pairs = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
    return Family(config, _MIXTRAL if experts else _DENSE, rotated_pairs=pairs)


def _qwen2(sizes: _Sizes, stored: Stored) -> Family:
    return Family(sizes.config("Qwen2ForCausalLM", stored), _DENSE)


def _qwen3(sizes: _Sizes, stored: Stored) -> Family:
    return Family(sizes.config("Qwen3ForCausalLM", stored), _DENSE)


def _qwen3_moe(sizes: _Sizes, stored: Stored) -> Family:
    experts = _read_experts(sizes)
    used = experts.get("num_experts_per_tok", 1)
    inner = sizes.integer("expert_feed_forward_length", max(1, sizes.feed_forward // used))
    more = {"moe_intermediate_size": inner, "norm_topk_prob": True, "decoder_sparse_step": 1}
    return Family(sizes.config("Qwen3MoeForCausalLM", stored, **experts, **more), _QWEN_EXPERTS)


def _gemma3(sizes: _Sizes, stored: Stored) -> Family:
    """Gemma 3's text part. Its scaling is that of the layers with full attention only."""
    metadata, window = sizes.metadata, sizes.metadata.integer(sizes.key("attention.sliding_window"), 0)
    scaling = sizes.rope_scaling(stored) or {"rope_type": "default"}
    full = {**scaling, "rope_theta": sizes.number("rope.freq_base", 1_000_000.0)}
    local = {"rope_type": "default", "rope_theta": sizes.number("rope.freq_base_swa", 10_000.0)}
    kinds = ["sliding_attention" if is_local else "full_attention" for is_local in _windows(sizes, window)]
    caps = {
        key: metadata.number(sizes.key(part)) or None
        for key, part in (
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        )
        if sizes.has(part)
    }
    config = sizes.config(
        "Gemma3ForCausalLM",
        stored,
        hidden_activation="gelu_pytorch_tanh",
        layer_types=kinds,
        rope_parameters={"full_attention": full, "sliding_attention": local},
        # The largest of them scales by the width a head would have, not by the width that it has.
        query_pre_attn_scalar=sizes.hidden // sizes.heads if sizes.layers == _GEMMA_27B else sizes.head_dim,
        **({"sliding_window": window} if window else {}),
        **caps,
    )
    del config["rope_scaling"], config["rope_theta"]
    return Family(config, _GEMMA, offset_norms=True)


_GEMMA_27B = 62  # layers, by which llama.cpp tells it from the others, too


def _windows(sizes: _Sizes, window: int) -> list[bool]:
    """Return by layer whether it has a window: a list says it, or a number: each so many-th has none."""
    part = "attention.sliding_window_pattern"
    if not window:
        return [False] * sizes.layers
    if isinstance(sizes.metadata.value(sizes.key(part), 6), int):
        pattern = sizes.integer(part, 6)
        return [(layer + 1) % pattern > 0 for layer in range(sizes.layers)]
    flags = sizes.metadata.items(sizes.key(part), bool)
    if len(flags) != sizes.layers:
        raise sizes.refusal(part, f"has {len(flags)} entries for {sizes.layers} layers")
    return flags


def _read_experts(sizes: _Sizes) -> dict[str, Any]:
    """Return the keys of a mixture of experts; none if there is one MLP."""
    if not sizes.metadata.integer(sizes.key("expert_count"), 0):
        return {}
    if sizes.metadata.integer(sizes.key("expert_gating_func"), _SOFTMAX) not in (0, _SOFTMAX):
        raise sizes.refusal("expert_gating_func", "only softmax, 1, is supported")
    count = sizes.integer("expert_count", most=4096)
    return {
        "num_local_experts": count,
        "num_experts": count,
        "num_experts_per_tok": sizes.integer("expert_used_count"),
    }


FAMILIES: dict[str, Callable[[_Sizes, Stored], Family]] = {
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
}
"""By `general.architecture`."""
