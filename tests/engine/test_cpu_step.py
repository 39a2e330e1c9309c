"""The compiled step instead of torch: the same logits and texts, for every native family."""

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.tiny import SIZES, Driver, generate, load, prompt_of, save
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.engine.cpu_step import CpuStep, refusal, variants
from fairlead.engine.inputs import Inputs
from fairlead.engine.models.weights import Weights
from fairlead.engine.runner import ModelRunner
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.registry import read_built_in

LONG = {"rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG}
SQUARE = {**SIZES, "hidden_size": 96}  # Qwen2 has no head_dim of its own
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied, llama3 rope": transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "llama, biases, yarn": transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "yarn", **LONG}
    ),
    "mistral, window": transformers.MistralConfig(**SIZES, sliding_window=19),
    "qwen2, upper layers slide": transformers.Qwen2Config(
        **SQUARE, use_sliding_window=True, sliding_window=21, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=23,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=30,
        final_logit_softcapping=20.0,
        attn_logit_softcapping=30.0,
    ),
}
GREEDY = Sampling(max_tokens=30, temperature=0)
PROMPTS = [prompt_of(length) for length in (1, 16, 17, 40, 90)]


def load_step(directory, dtype, **options):
    """Return the compiled step over the checkpoint in `directory`."""
    config = CheckpointConfig.read(directory / "config.json")
    spec = read_built_in(config)
    assert refusal(spec, str(dtype).removeprefix("torch.")) is None
    with Weights(open_checkpoint(directory), dtype=dtype, device=torch.device("cpu")) as weights:
        step = CpuStep.load(spec, weights, **{"threads": 2, "max_batched_tokens": 64, **options})
        weights.finish()
    return step


class Recorder:
    """Wraps a forward and keeps a copy of all its logits."""

    def __init__(self, forward):
        self.forward = forward
        self.device, self.vocab_size = forward.device, forward.vocab_size
        self.samples_several = forward.samples_several
        self.columns = forward.columns
        self.logits = []

    def __call__(self, inputs):
        logits = self.forward(inputs)
        self.logits += [torch.asarray(row, copy=True) for row in logits]
        return logits


@pytest.fixture(scope="module", params=list(CONFIGS))
def directory(request, tmp_path_factory):
    """A model with weights exact in bfloat16, so that float32 logits are the reference for both dtypes."""
    path = tmp_path_factory.mktemp("model")
    save(CONFIGS[request.param], path)
    file = path / "model.safetensors"
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
    save_file(rounded, file, metadata={"format": "pt"})
    return path


def compiled_and_torch(directory, dtype, **options):
    """Return (loaded model, recorder of its logits) twice: with torch's forward and with the compiled one."""
    results = []
    for compiled in (False, True):
        loaded = load(directory, dtype=dtype, kv_cache_bytes=4 << 20, compiled=False)
        forward = loaded.runner.forward
        if compiled:
            forward = load_step(directory, getattr(torch, dtype), **options)
            forward.allocate_cache(loaded.blocks_total)
        recorder = Recorder(forward)
        runner = ModelRunner(recorder, loaded.eos_token_ids)
        results.append((msgspec.structs.replace(loaded, runner=runner), recorder))
    return results


def last_logits(loaded, recorder):
    """Return the logits after each of the prompts, [prompts, V]."""
    driver = Driver(loaded, max_batched_tokens=64)
    for prompt in PROMPTS:
        driver.add(prompt, Sampling(max_tokens=1, temperature=0))
    driver.run()
    return torch.stack(recorder.logits).float()


def test_logits_match_torch(directory):
    expected, actual = (last_logits(*kind) for kind in compiled_and_torch(directory, "float32"))
    assert relative_error(actual, expected) <= 1e-4


def test_bfloat16_logits_are_nearer_to_float32_than_those_of_torch(directory):
    exact = last_logits(*compiled_and_torch(directory, "float32")[0])
    errors = [
        float((last_logits(*kind) - exact).norm() / exact.norm())
        for kind in compiled_and_torch(directory, "bfloat16")
    ]
    assert errors[1] < errors[0]


def relative_error(actual, expected):
    return (actual - expected).abs().max() / expected.abs().max()


def test_greedy_text_matches_torch(directory):
    texts = [generate(loaded, PROMPTS, GREEDY) for loaded, _ in compiled_and_torch(directory, "float32")]
    assert texts[0] == texts[1]


def test_greedy_text_in_a_batch_matches_each_prompt_alone(directory):
    [_, (loaded, _)] = compiled_and_torch(directory, "float32")
    together = generate(loaded, PROMPTS, GREEDY)
    assert together == [generate(loaded, [prompt], GREEDY)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("variant", variants("float32"))
def test_every_instruction_set_generates_the_same_text(tmp_path, variant):
    save(CONFIGS["gemma3"], tmp_path)
    [(torch_loaded, _), (loaded, recorder)] = compiled_and_torch(tmp_path, "float32", variant=variant)
    assert variant == recorder.forward.model.variant
    assert generate(torch_loaded, PROMPTS[3:], GREEDY) == generate(loaded, PROMPTS[3:], GREEDY)


def test_nan_weight_is_refused_with_its_tensor_and_index(tmp_path):
    save(CONFIGS["llama"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        LoadFailed, match=r"model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight'.*\[3, 4\]"
    ):
        load_step(tmp_path, torch.float32)


def test_packed_weights_take_at_most_ten_percent_more_memory(tmp_path):
    save(transformers.Qwen2Config(**{**SQUARE, "vocab_size": 2000, "hidden_size": 192}), tmp_path)
    step = load_step(tmp_path, torch.bfloat16)
    numbers = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert step.model.weight_bytes <= 1.1 * 2 * numbers


def test_only_rows_that_sample_get_logits(directory):
    step = load_step(directory, torch.float32)
    groups = len(step.shape.groups)
    step.allocate_cache([8] * groups)
    inputs = {
        "token_ids": np.arange(20, dtype=np.int32),
        "positions": np.arange(20, dtype=np.int32),
        "slot_mapping": (np.arange(20, dtype=np.int32),) * groups,
        "query_starts": np.array([0, 20], dtype=np.int32),
        "sequence_lengths": np.array([20], dtype=np.int32),
        "slots": np.array([0], dtype=np.int32),
        "tables": (np.arange(8, dtype=np.int32)[None],) * groups,
        "decodes": 0,
    }
    none = step(Inputs(sample_tokens=np.array([], dtype=np.int32), **inputs))
    one = step(Inputs(sample_tokens=np.array([19], dtype=np.int32), **inputs))
    assert tuple(none.shape) == (0, step.vocab_size)
    assert tuple(one.shape) == (1, step.vocab_size)
    assert np.isfinite(one).all()
