"""Models that only transformers implements, run with our cache: logits and texts match transformers."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.test_agreement import record_logits, reference_logits
from engine.models.test_through_the_engine import EngineDriver, requests
from engine.models.tiny import SIZES, Driver, generate, load, prompt_of, save
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.engine.models.fallback import FallbackModel
from fairlead.engine.models.loader import load_model, read_source

SQUARE = {name: value for name, value in SIZES.items() if name != "head_dim"}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "phi3": transformers.Phi3Config(**SQUARE, sliding_window=19),
    "phi, biases and partial rotary": transformers.PhiConfig(**{**SQUARE, "hidden_size": 96}),
    "olmo2": transformers.Olmo2Config(**SQUARE),
    "olmo3": transformers.Olmo3Config(**SQUARE, sliding_window=21, layer_types=KINDS),
    "granite, tied and scaled": transformers.GraniteConfig(
        **SQUARE,
        tie_word_embeddings=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "cohere": transformers.CohereConfig(**SQUARE, logit_scale=0.5),
    "cohere2": transformers.Cohere2Config(**SIZES, sliding_window=17, layer_types=KINDS),
    "glm4": transformers.Glm4Config(**SIZES, partial_rotary_factor=0.5),
    "smollm3": transformers.SmolLM3Config(**SQUARE, no_rope_layers=[1, 0, 1]),
    "gemma2": transformers.Gemma2Config(
        **SIZES, sliding_window=19, query_pre_attn_scalar=16, layer_types=KINDS, attn_logit_softcapping=20.0
    ),
    "starcoder2": transformers.Starcoder2Config(**SQUARE, sliding_window=None),
}
LENGTHS = (1, 7, 16, 17, 33, 64, 90, 128)
GREEDY = Sampling(max_tokens=20, temperature=0)


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory):
    """(transformers' model, ours) with the same weights."""
    directory = tmp_path_factory.mktemp("model")
    reference = save(CONFIGS[request.param], directory)
    loaded = load(directory, kv_cache_bytes=4 << 20)
    assert isinstance(loaded.runner.forward.model, FallbackModel)
    return reference, loaded


def test_logits_match_to_a_relative_error_of_1e_4(pair, monkeypatch):
    reference, loaded = pair
    recorded = record_logits(loaded, monkeypatch)
    prompt = prompt_of(90)
    [output] = generate(loaded, [prompt], GREEDY)
    expected = reference_logits(reference, prompt + output)[len(prompt) - 1 : -1]
    assert (torch.cat(recorded) - expected).abs().max() / expected.abs().max() <= 1e-4


def test_greedy_text_in_a_mixed_batch_and_in_chunks_matches_that_of_each_prompt(pair):
    reference, loaded = pair
    prompts = [prompt_of(length) for length in LENGTHS]
    outputs = generate(loaded, prompts, GREEDY, max_batched_tokens=24)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_logits(reference, prompt + output).argmax(-1)[len(prompt) - 1 : -1]
        assert expected.tolist() == output
    assert outputs == generate(loaded, prompts, GREEDY, max_batched_tokens=1024)
    few = Sampling(max_tokens=8, temperature=0)
    alone = [generate(loaded, [prompt], few)[0] for prompt in prompts[1::3]]
    assert alone == [output[:8] for output in outputs[1::3]]


@pytest.mark.parametrize(
    "limits",
    [{"kv_cache_bytes": 4 << 20}, {"kv_cache_bytes": 1 << 18, "slots": 5, "max_batched_tokens": 40}],
    ids=["plenty", "few blocks"],
)
def test_engine_generates_the_same_for_a_request_in_a_batch_and_outside(limits, tmp_path):
    save(CONFIGS["gemma2"], tmp_path)
    loaded = load(tmp_path, kv_cache_bytes=4 << 20)
    expected = [
        generate(loaded, [prompt], sampling, seeds=[sampling.seed or 0])[0] for prompt, sampling in requests()
    ]
    served = EngineDriver(load(tmp_path, **limits), overlaps=False)
    assert expected == served.run_together(requests())
    if "slots" not in limits:
        assert served.engine.statistics().prefix_hits


def test_preempted_sequence_continues_with_the_same_text(pair):
    _, loaded = pair
    prompts = [prompt_of(50), prompt_of(20)]
    expected = generate(loaded, prompts, GREEDY)
    driver = Driver(loaded)
    sequences = [driver.add(prompt, GREEDY) for prompt in prompts]
    for _ in range(10):
        driver.step()
    assert 0 < len(sequences[0].output) < GREEDY.max_tokens
    driver.release(sequences[0])
    for _ in range(5):
        driver.step()  # the other sequence takes its blocks
    driver.admit(sequences[0])
    driver.run()
    assert expected == [text.output for text in sequences]


@pytest.mark.parametrize("name", ["olmo2", "granite, tied and scaled", "phi, biases and partial rotary"])
def test_bfloat16_logits_are_close_and_weights_are_in_memory_once(name, tmp_path, monkeypatch):
    reference = save(CONFIGS[name], tmp_path)
    loaded = load(tmp_path, dtype="bfloat16", kv_cache_bytes=1 << 20)
    parameters = sum(tensor.numel() for tensor in reference.parameters())
    assert 2 * parameters <= loaded.weight_bytes <= 2 * parameters + 2 * SIZES["vocab_size"] * 96
    recorded = record_logits(loaded, monkeypatch)
    prompt = prompt_of(40)
    [output] = generate(loaded, [prompt], Sampling(max_tokens=16, temperature=0))
    expected = reference_logits(reference, prompt + output)[len(prompt) - 1 : -1]
    assert 0 < (torch.cat(recorded) - expected).abs().max() / expected.abs().max() < 0.08


def test_windows_and_scales_are_read_from_the_layers(tmp_path):
    save(CONFIGS["gemma2"], tmp_path)
    shape = load_model(tmp_path, device=torch.device("cpu")).model.shape
    assert (shape.windows, shape.attention_cap, shape.attention_scale) == ((19, None, 19), 20.0, 0.25)
    assert (
        shape.vocab_size,
        shape.layers,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
    ) == (320, 3, 6, 2, 16)


def test_longrope_limits_the_context_to_its_short_factors(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 1e4}
    config = transformers.Phi3Config(
        **SQUARE,
        original_max_position_embeddings=64,
        rope_parameters={**rope, "original_max_position_embeddings": 64},
    )
    save(config, tmp_path)
    assert load(tmp_path, kv_cache_bytes=1 << 20).max_model_len == 64


def load_with_limit(directory, **options):
    """Load a model with a configured limit, as some have none of their own."""
    cpu = torch.device("cpu")
    source = read_source(directory, device=cpu, max_model_len=64, **options)
    return source.load(cpu, lambda _fraction: None)


def failure(directory, **options):
    with pytest.raises(LoadFailed) as caught:
        load_with_limit(directory, **options)
    assert str(directory) in caught.value.message
    return caught.value.message


EXCLUDED = {
    "sinks": (transformers.GraniteSWAConfig(**SQUARE, sliding_window=17), "s_aux"),
    "experts": (
        transformers.OlmoeConfig(**SQUARE, num_experts=4, num_experts_per_tok=2),
        "mixtures of experts",
    ),
    "layers without a body": (
        transformers.OPTConfig(
            vocab_size=64,
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        ),
        "something other than its body",
    ),
    "state space": (
        transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4),
        "layer_types",
    ),
    "convolutions": (
        transformers.Lfm2Config(**SQUARE, layer_types=["conv", "full_attention", "conv"]),
        "layer_types",
    ),
    "encoder and decoder": (
        transformers.BartConfig(
            vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, is_decoder=True
        ),
        "architectures",
    ),
    "biased by distance": (
        transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2),
        "no way to attend",
    ),
    "latent attention": (
        transformers.DeepseekV3Config(
            **{**SQUARE, "num_key_value_heads": 6},
            first_k_dense_replace=3,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        "keys and values differ",
    ),
}


@pytest.mark.parametrize("name", list(EXCLUDED))
def test_unsupported_model_is_refused_with_file_and_reason(name, tmp_path):
    config, reason = EXCLUDED[name]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    message = failure(tmp_path)
    assert "config.json: " in message or "safetensors" in message
    assert reason in message


def spoil_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def olmo(tmp_path):
    save(CONFIGS["olmo2"], tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"architectures": ["AutoModelForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["CohereForCausalLM"]}, "does not belong to CohereForCausalLM"),
        ({"model_type": "nonsense"}, "config.json"),
        ({"hidden_size": "many"}, "config.json"),
        ({"hidden_size": 50}, "has shape"),
        ({"max_position_embeddings": None}, "config.json"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"num_hidden_layers": 2}, "is unexpected"),
        ({"intermediate_size": 81}, "has shape"),
    ],
)
def test_invalid_config_is_refused_with_the_reason(olmo, values, reason):
    spoil_config(olmo, **values)
    assert reason in failure(olmo)


def test_code_in_the_model_repository_is_never_run(olmo):
    (olmo / "evil.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nModel = 1\n"
    )
    spoil_config(olmo, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Model"})
    assert "never run" in failure(olmo)
    assert not (olmo / "ran").exists()


def test_missing_or_misshapen_tensor_is_named(olmo):
    path = olmo / "model.safetensors"
    tensors = load_file(path)
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path)
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in failure(olmo)
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": removed[:-1].clone()}, path)
    assert "'model.layers.1.mlp.up_proj.weight' has shape" in failure(olmo)


def test_model_with_other_results_under_our_attention_is_refused(olmo, monkeypatch):
    # Simulates layers that change the queries inside attention, which the call's arguments do not show.
    from transformers.models.olmo2 import modeling_olmo2

    eager = modeling_olmo2.eager_attention_forward

    def differing(module, query, key, value, mask, **options):
        return eager(module, query * 1.5, key, value, mask, **options)

    monkeypatch.setattr(modeling_olmo2, "eager_attention_forward", differing)
    assert "has other results with our attention" in failure(olmo, dtype="float32")


def test_window_in_the_config_but_not_in_the_layers_is_refused(olmo, monkeypatch):
    monkeypatch.setattr(transformers.Olmo2Config, "sliding_window", 16, raising=False)
    assert "sliding_window" in failure(olmo)


def test_error_without_the_hf_extra_names_what_to_install(olmo, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = failure(olmo)
    assert "fairlead[hf]" in message
    assert "LlamaForCausalLM" in message


def test_progress_and_weight_bytes_are_reported_as_for_built_in_models(olmo):
    progress = []
    loaded = load_model(olmo, device=torch.device("cpu"), report=progress.append)
    assert progress[-1] == 1
    assert max(later - earlier for earlier, later in zip([0.0, *progress], progress, strict=False)) <= 0.05
    stored_tensors = load_file(Path(olmo) / "model.safetensors")
    assert sum(tensor.nbytes for tensor in stored_tensors.values()) == loaded.weight_bytes
