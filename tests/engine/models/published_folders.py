"""Writes a published form as a small folder: few layers, narrow matrices, a vocabulary of bytes and tokens.

Kept are the context, the windows, the rotary embeddings, the channels of a head, and the ratio of heads.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.published_forms import Form, Json
from language.structured.families import FAMILIES

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_LAYERS = 2
_IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_index",
    "boi_token_index",
    "eoi_token_index",
)
_VISION = {
    "hidden_size": 16,
    "image_size": 28,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}


def write(form: Form, folder: Path) -> None:
    """Write all files; the one of the weights is there, but has none of them."""
    ids = {id_: len(BYTES) + at for at, id_ in enumerate(sorted(form.tokens))}
    config = shortened(form.config, ids)
    tokenizer = dict(form.tokenizer)
    if form.family is not None:
        tokenizer["chat_template"] = FAMILIES[form.family].template
    files = {"config.json": config, "tokenizer_config.json": tokenizer, **form.files}
    if form.generation is not None:
        files["generation_config.json"] = _with_ids(form.generation, ids)
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    vocabulary(form.tokens).save(str(folder / "tokenizer.json"))
    save_file({"no_weights": np.zeros(1, np.float32)}, folder / "model.safetensors")


def vocabulary(tokens: dict[int, str]) -> Tokenizer:
    """Return a tokenizer of single bytes, and of these tokens in the order of their ids."""
    made = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(BYTES)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    for id_ in sorted(tokens):
        made.add_tokens([AddedToken(tokens[id_], special=True, normalized=False)])
    return made


def shortened(config: Json, ids: dict[int, int]) -> Json:
    """Return a configuration with small sizes, and with the ids of the small vocabulary."""
    made = _with_ids(config, ids)
    if "text_config" in made:
        made["text_config"] = shortened(made["text_config"], ids)
    if "vision_config" in made:
        made["vision_config"] |= _VISION
        made["mm_tokens_per_image"] = 4
    if "hidden_size" not in config:
        return made
    made |= _heads(config)
    made["intermediate_size"] = 32
    for name, small in (("moe_intermediate_size", 16), ("num_experts", 8), ("num_local_experts", 4)):
        if name in made:
            made[name] = small
    if "vocab_size" in made:
        made["vocab_size"] = len(BYTES) + sum(id_ < config["vocab_size"] for id_ in ids)
    layers = _layers(config)
    made["num_hidden_layers"] = layers
    for name in ("layer_types", "no_rope_layers"):
        if name in made:
            made[name] = made[name][:layers]
    if "max_window_layers" in made:
        made["max_window_layers"] = layers
    return made


def _layers(config: Json) -> int:
    """Return few layers, of which some have a window and some have none, as published."""
    if config["model_type"] == "gemma3_text":  # each sixth attends to all
        return 7
    return 4 if "layer_types" in config or "no_rope_layers" in config else _LAYERS


def _heads(config: Json) -> Json:
    """Return sizes with the ratio of the heads, and with the channels of each; absent keys stay absent."""
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is None:
        return {"hidden_size": 32}
    shared = math.gcd(heads, kv_heads or heads)
    kept = 2 if shared == heads else 1  # not a single head
    made = {"num_attention_heads": heads // shared * kept}
    if kv_heads is not None:
        made["num_key_value_heads"] = kv_heads // shared * kept
    if config.get("head_dim") is None:  # it follows from the hidden size
        return made | {"hidden_size": config["hidden_size"] // heads * made["num_attention_heads"]}
    return made | {"hidden_size": 16 * made["num_attention_heads"]}


def _with_ids(values: Json, ids: dict[int, int]) -> Json:
    def mapped(value: Any) -> Any:
        return [mapped(each) for each in value] if isinstance(value, list) else ids.get(value, value)

    return {name: mapped(value) if name in _IDS else value for name, value in values.items()}
