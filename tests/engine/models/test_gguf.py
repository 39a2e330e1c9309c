"""Models of GGUF files: each family computes what the same model computes as a folder of safetensors."""

import pytest
import torch
import transformers

from engine.models.test_agreement import LLAMA3, LONG
from engine.models.tiny import SIZES, load, save
from engine.test_cpu_step import Recorder, last_logits, relative_error
from language.checkpoint.gguf_files import ROUNDED, TYPES, convert

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied, llama3 rope": transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "llama, linear rope": transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", **LONG}),
    "llama, yarn rope, biases": transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "yarn", **LONG}
    ),
    "mistral, window": transformers.MistralConfig(**SIZES, sliding_window=19),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2, tied": transformers.Qwen2Config(**{**SIZES, "hidden_size": 96}, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, sliding_window=19, query_pre_attn_scalar=16, layer_types=WINDOWS
    ),
    "gemma3, linear rope, capped logits": transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=33,
        layer_types=WINDOWS,
        query_pre_attn_scalar=16,
        final_logit_softcapping=12.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
}


WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
WIDE |= {"initializer_range": 0.05}
KINDS = [kind for kind in TYPES if kind not in ("F32", "F16", "BF16")]


def logits_of(path, **options):
    loaded = load(path, kv_cache_bytes=4 << 20, **options)
    loaded.runner.forward = Recorder(loaded.runner.forward)
    return last_logits(loaded, loaded.runner.forward)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_file_of_each_family_gives_the_logits_of_its_folder(family, compiled, tmp_path):
    save(FAMILIES[family], tmp_path)
    expected = logits_of(tmp_path, compiled=compiled)
    path = convert(tmp_path, tmp_path / "model.gguf")
    actual = logits_of(path, compiled=compiled)
    assert relative_error(actual, expected) <= 2e-5
    assert not torch.equal(actual[0], actual[1])


@pytest.mark.parametrize("kind", ["F16", "BF16", *KINDS])
def test_blocks_are_computed_with_as_torch_computes_with_their_numbers(kind, tmp_path):
    save(transformers.LlamaConfig(**WIDE, tie_word_embeddings=True), tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf", choose=lambda _name, _shape: kind)
    expected, actual = logits_of(path, compiled=False), logits_of(path)
    assert relative_error(actual, expected) <= 2e-5
    if kind in ROUNDED:  # the others are random codes, whose logits depend on the last bits
        assert relative_error(logits_of(path, dtype="bfloat16"), expected) <= 3e-2


def as_q4_k_m(name, _shape):
    return "Q6_K" if "attn_v" in name or "down" in name or "embd" in name else "Q4_K"


def test_blocks_take_the_memory_of_the_file_and_numbers_that_of_their_type(tmp_path):
    save(transformers.LlamaConfig(**WIDE), tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf", choose=as_q4_k_m)
    loaded = load(path, dtype="bfloat16", kv_cache_bytes=4 << 20)
    assert 0.95 * path.stat().st_size < loaded.weight_bytes < 1.05 * path.stat().st_size
    rounded = load(path, dtype="bfloat16", kv_cache_bytes=4 << 20, quantization="int8")
    restored = load(path, dtype="bfloat16", kv_cache_bytes=4 << 20, compiled=False)
    assert 1.4 * loaded.weight_bytes < rounded.weight_bytes < 0.6 * restored.weight_bytes


def test_gate_and_up_of_different_types_are_restored(tmp_path):
    save(transformers.LlamaConfig(**WIDE), tmp_path)
    path = convert(
        tmp_path, tmp_path / "model.gguf", choose=lambda name, _shape: "Q8_0" if "gate" in name else "Q4_K"
    )
    expected, actual = logits_of(path, compiled=False), logits_of(path)
    assert relative_error(actual, expected) <= 2e-5
