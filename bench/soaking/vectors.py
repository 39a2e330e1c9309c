"""A tiny embedding model with random weights and the demonstration model's tokenizer."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from fairlead.base.config import demonstration_model

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 48, 80, 4, 2, 16


def save_vectors(folder: Path, seed: int = 0) -> None:
    """Save the model into a new folder, as Qwen3 with mean pooling."""
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demonstration_model() / name, folder / name)
    vocabulary = json.loads((demonstration_model() / "config.json").read_text())["vocab_size"]
    settings = {
        "architectures": ["Qwen3Model"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    weights = {"embed_tokens.weight": weight(vocabulary, HIDDEN), "norm.weight": weight(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "self_attn.q_norm": (HEAD,),
            "self_attn.k_norm": (HEAD,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        weights |= {f"layers.{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
