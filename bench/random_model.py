"""Create a model with a well-known shape, random weights and a tokenizer, for benchmarks.

    python bench/random_model.py SmolLM2-135M /some/folder

The speed of a step depends on the shapes, not on the values of the weights, so no download is needed. The
tokenizer is a byte-level BPE with invented merges, which every server can load. Needs transformers (the extra
`test`).
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

COMMON: dict[str, Any] = {"rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
SHAPES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "SmolLM2-135M": (
        transformers.LlamaConfig,
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-0.5B": (
        transformers.Qwen2Config,
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
END = "<|end|>"


def main() -> None:
    """Create one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=sorted(SHAPES), help="name of the shape")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    make(arguments.shape, arguments.folder)


def make(shape: str, folder: Path) -> None:
    """Write configuration, weights (bfloat16, always the same) and tokenizer, unless they exist."""
    if (folder / "tokenizer.json").exists():
        return
    family, sizes = SHAPES[shape]
    config = family(**COMMON, **sizes, dtype="bfloat16")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = sizes["vocab_size"]
    tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": sizes["max_position_embeddings"],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def tokenizer(size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of `size` tokens: the end token, 256 bytes, then merges of growing length."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([END, *alphabet])}
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges: list[tuple[str, str]] = []
    prefixes = letters
    while len(vocabulary) < size:
        longer = []
        for left, right in product(prefixes, letters):
            if len(vocabulary) < size and left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
                longer.append(left + right)
        prefixes = longer
    result = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([END])
    return result


if __name__ == "__main__":
    main()
