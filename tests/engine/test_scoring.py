"""Models that score texts: the scores of transformers, and bit for bit the same beside any other text."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models import tiny
from engine.models.tiny import SIZES, prompt_of
from engine.test_embedder import LENGTHS, embedded, embedder
from fairlead.base.errors import LoadFailed
from fairlead.engine.models.loader import load_model
from fairlead.engine.models.quantization.none import UnquantizedLinear

ONE = {"num_labels": 1}
CONFIGS = {
    "qwen3": (transformers.Qwen3ForSequenceClassification, transformers.Qwen3Config(**SIZES, **ONE)),
    "qwen2, tied": (
        transformers.Qwen2ForSequenceClassification,
        transformers.Qwen2Config(**SIZES, **ONE, tie_word_embeddings=True),
    ),
    "llama": (transformers.LlamaForSequenceClassification, transformers.LlamaConfig(**SIZES, **ONE)),
    "mistral, a window": (
        transformers.MistralForSequenceClassification,
        transformers.MistralConfig(**SIZES, **ONE, sliding_window=19),
    ),
    "gemma3": (
        transformers.Gemma3TextForSequenceClassification,
        transformers.Gemma3TextConfig(
            **SIZES,
            **ONE,
            sliding_window=19,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}


def save(directory, name):
    kind, config = CONFIGS[name]
    torch.manual_seed(0)
    reference = kind(config).eval()
    reference.save_pretrained(directory)
    return reference


def scores(loaded, prompts):
    numbers = [
        torch.frombuffer(bytearray(one.vector), dtype=torch.float32) for one in embedded(loaded, prompts)
    ]
    assert {len(number) for number in numbers} == {1}
    return torch.cat(numbers)


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_transformers(name, tmp_path):
    reference = save(tmp_path, name)
    prompts = [prompt_of(length, seed=row) for row, length in enumerate(LENGTHS)]
    # transformers reads the state before the first padding.
    prompts = [[token or 1 for token in prompt] for prompt in prompts]
    loaded = embedder(tmp_path)
    assert loaded.embeds
    with torch.inference_mode():
        expected = torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in prompts])
    torch.testing.assert_close(scores(loaded, prompts), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [{"true_token_id": 9, "false_token_id": 4}, {"true_token_id": 9}])
def test_score_by_logits_is_that_of_the_models_head(tied, tokens, tmp_path):
    reference = tiny.save(transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied), tmp_path)
    save_logit_score(tmp_path, **{"false_token_id": None, **tokens})
    prompts = [prompt_of(length, seed=row) for row, length in enumerate(LENGTHS)]
    loaded = embedder(tmp_path)
    assert loaded.embeds
    with torch.inference_mode():
        logits = torch.stack([reference(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    expected = logits[:, 9] - logits[:, 4] if "false_token_id" in tokens else logits[:, 9]
    torch.testing.assert_close(scores(loaded, prompts), expected, rtol=1e-3, atol=1e-4)


def test_second_copy_of_a_tied_head_is_ignored(tmp_path):
    tiny.save(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True), tmp_path)
    save_logit_score(tmp_path, true_token_id=9)
    expected = scores(embedder(tmp_path), [[1, 2, 3]])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    assert scores(embedder(tmp_path), [[1, 2, 3]]).equal(expected)


def save_logit_score(directory, **config):
    """Write the modules of a model that scores by logits, as sentence-transformers does."""
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "true_token_id"),
        ({"true_token_id": None, "false_token_id": 3}, "true_token_id"),
        ({"true_token_id": [1, 2], "false_token_id": 3}, "true_token_id"),
        ({"true_token_id": "yes"}, "true_token_id"),
        ({"true_token_id": 1, "false_token_id": 10**6}, "1000000.*not in the vocabulary"),
    ],
)
def test_invalid_tokens_of_a_score_are_refused(config, problem, tmp_path):
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    save_logit_score(tmp_path, **config)
    with pytest.raises(LoadFailed, match=problem):
        embedder(tmp_path)


def test_further_modules_of_a_model_that_scores_are_refused(tmp_path):
    save(tmp_path, "qwen3")
    save_logit_score(tmp_path, true_token_id=1)
    with pytest.raises(LoadFailed, match="LogitScore"):
        embedder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "a.Transformer"}]))
    assert embedder(tmp_path).embeds


def test_float32_score_is_bit_identical_alone_and_in_a_batch(tmp_path, monkeypatch):
    whole = UnquantizedLinear.__call__
    monkeypatch.setattr(
        UnquantizedLinear, "__call__", lambda self, x: torch.cat([whole(self, row) for row in x.split(1)])
    )
    save(tmp_path, "qwen3")
    loaded = embedder(tmp_path)
    prompts = [prompt_of(length, seed=row) for row, length in enumerate(LENGTHS[:9])]
    alone = [scores(loaded, [prompt]).item() for prompt in prompts]
    assert scores(loaded, prompts).tolist() == alone


def test_model_with_several_labels_is_refused_by_tensor(tmp_path):
    config = transformers.Qwen3Config(**SIZES, num_labels=3)
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(LoadFailed, match=r"score\.weight.*\[3, 48\], expected \[1, 48\]"):
        embedder(tmp_path)


def test_model_without_its_row_of_scores_is_refused_by_tensor(tmp_path):
    save(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["score.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(LoadFailed, match=r"'score\.weight' is missing"):
        embedder(tmp_path)


def test_score_that_is_not_a_number_fails_alone(tmp_path):
    save(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    good, bad = [1, 2, 3], [1, 7]
    first, second = embedded(embedder(tmp_path), [good, bad])
    assert (first.error, len(first.vector)) == (None, 4)
    assert second.error == "the model's vector has a NaN or infinity"


def test_model_that_scores_is_refused_for_text(tmp_path):
    save(tmp_path, "qwen3")
    with pytest.raises(LoadFailed, match="scores texts, and makes none"):
        load_model(tmp_path, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "Phi3ForSequenceClassification"])
def test_other_architectures_are_refused_by_name(name, tmp_path):
    config = {"architectures": [name], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadFailed, match=name):
        embedder(tmp_path)
