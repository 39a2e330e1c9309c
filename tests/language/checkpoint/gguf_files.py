"""Writes GGUF files with the library `gguf`: of any metadata and tensors, or of a folder as llama.cpp would.

`blocks` makes content of each type: rounded numbers where the library rounds, else random codes with scales
like those of published files.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

ROUNDED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The types to which the library can round."""
TYPES = (*ROUNDED, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
# Where the float16 scales of a block are.
_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma3ForCausalLM": "gemma3",
}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def blocks(kind, shape, rng, size=0.02):
    """Return numbers of this type and shape as they are stored: an array that `write` takes."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    if kind in ROUNDED:
        return rounded((rng.standard_normal(shape) * size).astype(np.float32), kind)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), dtype=np.uint8)
    scales = (rng.uniform(0.2, 1, (*raw.shape[:-1], 2)) * size / 200).astype(np.float16)
    for number, at in enumerate(_SCALES.get(kind, ())):
        raw[..., at : at + 2] = scales[..., number : number + 1].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(116, 124, raw.shape[:-1])
    return raw.reshape(*shape[:-1], -1)


def rounded(values, kind):
    """Return float32 numbers as they are stored in one of the types of `ROUNDED`."""
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16)
    return gguf.quants.quantize(values, Type[kind])


def numbers(stored, kind):
    """Return what the library makes of stored numbers, in float32."""
    return gguf.quants.dequantize(stored, Type[kind]).astype(np.float32)


def write(path, architecture, metadata, tensors):
    """Write a file. `metadata` by key; `tensors` by name: (array, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, (array, kind) in tensors.items():
        raw = None if kind in ("F32", "F16") else Type[kind]
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, key, value):
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def paired(weights, heads):
    """Return rows of queries or keys with the two channels of a pair side by side, as Llama's are kept."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def convert(folder: Path, path: Path, *, choose=lambda _name, _shape: "F32", metadata=None):
    """Write the model in a folder as a GGUF.

    choose: takes name and shape of a matrix; returns its type. The library does not round to some: then
        the weights are random.
    metadata: more keys, or others.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["architectures"][0]]
    weights = {name: value.float().numpy() for name, value in load_file(folder / "model.safetensors").items()}
    stored = {}
    experts = {}
    for own_name, values in weights.items():
        name, expert = _named(own_name, architecture)
        if expert is None:
            stored[name] = _as_llama_cpp(name, values, architecture, config)
        else:
            experts.setdefault(name, {})[expert] = values
    for name, each in experts.items():
        stored[name] = np.stack([each[index] for index in sorted(each)])
    tensors = {}
    for name, values in stored.items():
        kind = "F32" if values.ndim == 1 or "gate_inp" in name else choose(name, values.shape)
        if kind in ROUNDED:
            tensors[name] = rounded(values, kind), kind
        else:
            tensors[name] = blocks(kind, values.shape, np.random.default_rng(len(tensors)), 8.0), kind
    factors = _llama3_factors(config)
    if factors is not None:
        tensors["rope_freqs.weight"] = factors, "F32"
    return write(path, architecture, {**_sizes(config, architecture), **(metadata or {})}, tensors)


def _named(name, architecture):
    """Return llama.cpp's name, and the expert's number if it is one of a stack."""
    whole, _, kind = name.rpartition(".")
    if whole in _WHOLE:
        return f"{_WHOLE[whole]}.{kind}", None
    layer, _, part = whole.removeprefix("model.layers.").partition(".")
    if ".experts." in part:
        _, _, expert = part.partition(".experts.")
        number, _, matrix = expert.partition(".")
        return f"blk.{layer}.ffn_{_EXPERT[matrix]}_exps.{kind}", int(number)
    parts = _GEMMA_PARTS if architecture == "gemma3" else _PARTS
    return f"blk.{layer}.{parts[part]}.{kind}", None


def _as_llama_cpp(name, values, architecture, config):
    if architecture == "llama" and ".attn_q." in name:
        return paired(values, config["num_attention_heads"])
    if architecture == "llama" and ".attn_k." in name:
        return paired(values, config["num_key_value_heads"])
    if architecture == "gemma3" and "norm" in name:
        return values + 1
    return values


def _rope(config):
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found.get("full_attention", found)


def _sizes(config, architecture):
    rope = _rope(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
        if "original_max_position_embeddings" in rope:
            found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.get("sliding_window") and (architecture == "gemma3" or config.get("model_type") == "mistral"):
        found["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma3":
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        found["rope.freq_base_swa"] = float(local)
        found["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config["layer_types"]
        ]
        if config.get("final_logit_softcapping"):
            found["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        found |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
        if "moe_intermediate_size" in config:
            found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _llama3_factors(config):
    """Return by pair of channels how much slower llama3's scaling turns it, as the converter computes it."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original = rope["original_max_position_embeddings"]
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factors = []
    for length in (2 * torch.pi / frequencies).tolist():
        if length < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif length > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / length - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def vocabulary(library, *, model, pre=None, merges=None, types=None, scores=None, **more):
    """Return the metadata of a tokenizer of the Rust library.

    library: the tokenizer.
    model: "gpt2" or "llama".
    pre: the name of its pre-tokenizer.
    merges, scores: of the vocabulary.
    types: of tokens by spelling; others are normal, or control or user-defined as the library says.
    more: further keys, without their prefix.
    """
    ids = library.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.get)
    added = {
        token.content: 3 if token.special else 4 for token in library.get_added_tokens_decoder().values()
    }
    kinds = added | (types or {})
    found = {"model": model, "tokens": tokens, "token_type": [kinds.get(token, 1) for token in tokens]}
    optional = {"pre": pre, "merges": merges, "scores": scores}
    found |= {key: value for key, value in optional.items() if value is not None}
    return {f"tokenizer.ggml.{key}": value for key, value in {**found, **more}.items()}
