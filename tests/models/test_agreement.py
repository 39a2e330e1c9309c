"""Our logits and texts against transformers', on the same random weights, in float32 on the CPU."""

import pytest
import torch
import transformers

from fairlead.job import Sampling
from models.tiny import SIZES, generate, load, prompt_of, save

LONG = {"rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG}
SQUARE = {**SIZES, "hidden_size": 96}  # Qwen2 has no head_dim of its own
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied, llama3 rope": transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "llama, biases, linear rope": transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "linear", **LONG}
    ),
    "llama, yarn rope": transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", **LONG}),
    "mistral, window": transformers.MistralConfig(**SIZES, sliding_window=19),
    "qwen2, tied": transformers.Qwen2Config(**SQUARE, tie_word_embeddings=True),
    "qwen2, upper layers slide": transformers.Qwen2Config(
        **SQUARE, use_sliding_window=True, sliding_window=21, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**SIZES),
}
LENGTHS = (1, 7, 16, 17, 33, 64, 90, 128)  # around the block, the windows and rope's original 64
GREEDY = Sampling(max_tokens=64, temperature=0)


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory):
    """The same weights twice: (transformers' model, ours)."""
    directory = tmp_path_factory.mktemp("model")
    reference = save(CONFIGS[request.param], directory)
    return reference, load(directory, kv_cache_bytes=4 << 20)


def reference_logits(reference, token_ids):
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0]


def record_logits(loaded, monkeypatch):
    """What the model says at each sampling step, as it will be said."""
    recorded = []
    said = loaded.runner._model.logits

    def record(hidden):
        recorded.append(said(hidden))
        return recorded[-1]

    monkeypatch.setattr(loaded.runner._model, "logits", record)
    return recorded


def test_logits_agree_to_a_relative_error_of_1e_4(pair, monkeypatch):
    reference, loaded = pair
    recorded = record_logits(loaded, monkeypatch)
    prompt = prompt_of(90)
    [output] = generate(loaded, [prompt], GREEDY)
    expected = reference_logits(reference, prompt + output)[len(prompt) - 1 : -1]
    error = (torch.cat(recorded) - expected).abs().max() / expected.abs().max()
    assert error <= 1e-4


def test_greedy_text_is_that_of_generate(pair):
    reference, loaded = pair
    prompt = prompt_of(70)
    ids = torch.tensor([prompt])
    expected = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_tokens, do_sample=False
    )[0, len(prompt) :].tolist()
    assert len(set(expected)) > 20  # a text that means something as a test
    assert [expected] == generate(loaded, [prompt], GREEDY)


def test_greedy_text_in_a_batch_of_eight_is_what_each_says_alone(pair):
    reference, loaded = pair
    prompts = [prompt_of(length) for length in LENGTHS]
    outputs = generate(loaded, prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        # The likeliest token at every position of the whole text is what a greedy loop would have said.
        expected = reference_logits(reference, prompt + output).argmax(-1)[len(prompt) - 1 : -1]
        assert expected.tolist() == output
    assert outputs[1::3] == [generate(loaded, [prompt], GREEDY)[0] for prompt in prompts[1::3]]


def test_a_prompt_in_one_chunk_says_what_it_says_in_many(pair):
    _, loaded = pair
    prompts = [prompt_of(length) for length in LENGTHS]
    sampling = Sampling(max_tokens=8, temperature=0)
    expected = generate(loaded, prompts, sampling, max_batched_tokens=1024)
    assert expected == generate(loaded, prompts, sampling, max_batched_tokens=9)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float16", 0.01)])
def test_half_precision_stays_close(dtype, tolerance, tmp_path, monkeypatch):
    reference = save(CONFIGS["llama"], tmp_path)
    loaded = load(tmp_path, dtype=dtype, kv_cache_bytes=1 << 20)
    assert dtype == loaded.dtype
    recorded = record_logits(loaded, monkeypatch)
    prompt = prompt_of(40)
    [output] = generate(loaded, [prompt], Sampling(max_tokens=16, temperature=0))
    expected = reference_logits(reference, prompt + output)[len(prompt) - 1 : -1]
    assert 0 < (torch.cat(recorded) - expected).abs().max() / expected.abs().max() < tolerance
