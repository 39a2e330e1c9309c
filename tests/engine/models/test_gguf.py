"""Models of GGUF files: each family computes what the same model computes as a folder of safetensors."""

import pytest
import torch
import transformers

from engine.models.test_agreement import LLAMA3, LONG
from engine.models.tiny import SIZES, load, save
from engine.test_cpu_step import Recorder, last_logits, relative_error
from language.checkpoint.gguf_files import convert

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
