"""Tiny models of every family on a CUDA device, and what they generate there."""

import transformers

from engine.models.tiny import SIZES, Driver, Kept, load, prompt_of
from fairlead.base.job import Sampling

FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=23),
    "qwen2": transformers.Qwen2Config(**{**SIZES, "head_dim": 8}),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, sliding_window=30, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2
    ),
    "granite": transformers.GraniteConfig(**{**SIZES, "head_dim": 8}),
}
ROOM = {"kv_cache_bytes": 4 << 20, "slots": Driver.SLOTS}


def on_cuda(directory, **options):
    return load(directory, device="cuda", **{**ROOM, **options})


def outputs_of(loaded, *, ahead=False, kinds=({"temperature": 0},), rows=6):
    """Return texts and each step's logits of prompts of many lengths, prefilled in chunks beside decodes."""
    kept = loaded.runner.forward = Kept(loaded.runner.forward)
    driver = Driver(loaded, ahead=ahead)
    for row in range(rows):
        driver.add(
            prompt_of(3 + 9 * row), Sampling(**{"max_tokens": 24, **kinds[row % len(kinds)]}), seed=row
        )
    driver.run()
    loaded.runner.forward = kept.forward
    return [text.output for text in driver.sequences], kept.logits
