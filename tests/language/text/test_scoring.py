"""How a model scores pairs of texts: its activation, and how a pair becomes one prompt."""

import json
import math

import pytest

from fairlead.base.errors import ContextLengthExceeded, LoadFailed
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.model import TextModel
from fairlead.language.text.scoring import ScoringSettings, read_scoring
from language.text.vocabularies import library

TEMPLATE = (
    "<|im_start|>Q:{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "|D:{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>"
)
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
ARCHITECTURE = {"architectures": ["Qwen3ForSequenceClassification"]}
FIELDS = ("query", "documents")


def settings(directory, template=None, **config):
    (directory / "config.json").write_text(json.dumps(config))
    return read_scoring(directory, None if template is None else ChatTemplate(template))


def model(directory, vocabulary="byte_level", template=None) -> TextModel:
    library(vocabulary).save(str(directory / "tokenizer.json"))
    config = {"chat_template": template} if template else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **ARCHITECTURE}))
    return TextModel.load(directory, name="small")


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": ["Qwen3ForCausalLM"]}])
def test_other_models_score_no_pairs(config, tmp_path):
    assert settings(tmp_path, **config) is None


@pytest.mark.parametrize(
    ("config", "is_probability"),
    [
        ({}, True),
        ({"sentence_transformers": {"version": "5"}}, True),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, True),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, False),
        ({"sbert_ce_default_activation_function": IDENTITY}, False),
    ],
)
def test_activation_is_that_of_sentence_transformers_entry_else_a_sigmoid(config, is_probability, tmp_path):
    found = settings(tmp_path, **ARCHITECTURE, **config)
    assert found == ScoringSettings(uses_template=False, is_probability=is_probability)


@pytest.mark.parametrize("named", ["torch.nn.modules.activation.Tanh", "code.of.its.Own"])
def test_another_activation_is_refused_with_the_directory(named, tmp_path):
    with pytest.raises(
        LoadFailed, match=f"only the activations Sigmoid and Identity .* not {named}"
    ) as caught:
        settings(tmp_path, **ARCHITECTURE, sentence_transformers={"activation_fn": named})
    assert str(tmp_path) in caught.value.message


def with_modules(directory, *kinds, **config):
    types = [{"type": f"sentence_transformers.{kind}"} for kind in kinds]
    (directory / "modules.json").write_text(json.dumps(types))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(config))
    return directory


LOGITS = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")


def test_model_with_logits_of_a_score_in_its_modules_scores_pairs(tmp_path):
    with_modules(tmp_path, *LOGITS, activation_fn=IDENTITY, prompts={}, default_prompt_name=None)
    assert settings(tmp_path) == ScoringSettings(uses_template=False, is_probability=False)
    with_modules(tmp_path, *LOGITS)
    assert settings(tmp_path, TEMPLATE) == ScoringSettings(uses_template=True, is_probability=True)


def test_model_with_pooling_in_its_modules_scores_no_pairs(tmp_path):
    with_modules(tmp_path, "models.Transformer", "models.Pooling")
    assert settings(tmp_path, architectures=["Qwen3Model"]) is None


def test_default_prompt_is_a_system_message_before_the_pair(tmp_path):
    with_modules(tmp_path, *LOGITS, prompts={"web": "Be strict.", "other": "x"}, default_prompt_name="web")
    found = settings(tmp_path, TEMPLATE)
    assert [message["role"] for message in found.messages("a", "b")] == ["system", "query", "document"]
    assert [message["content"] for message in found.messages("a", "b")] == ["Be strict.", "a", "b"]
    with pytest.raises(LoadFailed, match="default prompt") as caught:
        settings(tmp_path, CHAT)
    assert "config_sentence_transformers.json" in caught.value.message


@pytest.mark.parametrize("number", [-1000.0, -5.5, 0.0, 0.25, 30.0, 1000.0])
def test_probability_is_the_sigmoid_of_any_number(number):
    expected = 1 / (1 + math.exp(-number)) if number > -700 else 0.0
    assert ScoringSettings(False, True).score(number) == pytest.approx(expected, abs=1e-12)
    assert ScoringSettings(False, False).score(number) == number


@pytest.mark.parametrize(("template", "expected"), [(TEMPLATE, True), (CHAT, False), (None, False)])
def test_only_a_template_with_both_roles_writes_pairs(template, expected, tmp_path):
    assert settings(tmp_path, template, **ARCHITECTURE).uses_template == expected


def test_model_that_scores_makes_neither_text_nor_embeddings(tmp_path):
    found = model(tmp_path)
    assert (found.task, found.embedding, found.infill) == ("score", None, None)


def test_template_writes_the_pair(tmp_path):
    found = model(tmp_path, template=TEMPLATE)
    expected = found.tokenize("<|im_start|>Q:a b|D:the dog<|im_end|>", add_special_tokens=False)
    assert found.encode_pair("a b", "the dog", fields=FIELDS) == expected


@pytest.mark.parametrize("vocabulary", ["byte_level", "llama"])
def test_without_a_template_the_tokenizer_joins_the_texts(vocabulary, tmp_path):
    found = model(tmp_path, vocabulary, template=CHAT)
    expected = library(vocabulary).encode("the lot", "other").ids
    assert found.encode_pair("the lot", "other", fields=FIELDS) == expected


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_spelled_control_tokens_in_a_pair_stay_text(template, tmp_path):
    found = model(tmp_path, template=template)
    harmless = found.encode_pair("x", "x", fields=FIELDS)
    ids = found.encode_pair("<|im_end|>", "a<|im_start|>", fields=FIELDS)
    for token_id in found.tokenizer.control_tokens.values():
        assert ids.count(token_id) == harmless.count(token_id)
    assert "<|im_end|>" in found.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("first", "second", "param"),
    [("a" * 10**6, "b", "query"), ("a", "b" * 10**6, "documents"), ("a " * 25, "b " * 25, "documents")],
)
def test_pair_that_is_too_long_is_refused_by_field(first, second, param, tmp_path):
    with pytest.raises(ContextLengthExceeded) as caught:
        model(tmp_path).encode_pair(first, second, fields=FIELDS)
    assert caught.value.param == param
