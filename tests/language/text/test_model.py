"""`TextModel`: loading a directory, with errors that name the file, and encoding prompts and chats."""

import json
import os
import subprocess
import sys

import pytest

from fairlead.base.config import ConfigError
from fairlead.base.errors import ContextLengthExceeded, InvalidRequest, LoadFailed
from fairlead.language.text.model import TextModel
from fairlead.language.text.settings import GenerationDefaults
from fairlead.language.text.tokenizer import Tokenizer
from language.text.vocabularies import library

CONFIG = {"max_position_embeddings": 32, "eos_token_id": 2, "rope_theta": float("inf")}
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"


@pytest.fixture
def directory(tmp_path):
    library("llama").save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", CONFIG)
    write(tmp_path, "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "</s>"})
    return tmp_path


def write(directory, name, content):
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def load(directory, **options):
    return TextModel.load(directory, name="small", **options)


def user(content):
    return [{"role": "user", "content": content}]


# Loading -------------------------------------------------------------------------------------------


def test_load_reads_a_model_from_its_directory(directory):
    os.utime(directory / "config.json", (1_700_000_000.5, 1_700_000_000.5))
    model = load(directory)
    assert (
        model.name,
        model.path,
        model.max_model_len,
        model.created,
    ) == ("small", directory, 32, 1_700_000_000)
    assert frozenset({2}) == model.eos_token_ids
    assert GenerationDefaults() == model.defaults


@pytest.mark.parametrize(
    ("template", "special_tokens", "expected"),
    [
        (TEMPLATE, "text", []),
        ("{% for m in messages %}{{ '%s%s' % ('<s>', m.content) }}</s>{% endfor %}", "text", ["<s>"]),
        ("{% for m in messages %}{{ '%s%s' % ('<s>', m.content) }}</s>{% endfor %}", "parse", []),
        ("{{ raise_exception('no') }}", "text", []),
    ],
)
def test_control_tokens_that_a_template_loses_are_found(directory, template, special_tokens, expected):
    write(directory, "tokenizer_config.json", {"chat_template": template})
    model = load(directory, special_tokens=special_tokens)
    assert model.untraced_tokens() == expected


@pytest.mark.parametrize(
    ("config", "requested", "expected"),
    [
        ({"max_position_embeddings": 32}, 16, 16),
        ({"max_position_embeddings": 32}, 32, 32),
        ({"max_position_embeddings": 32, "sliding_window": 8}, None, 32),
        ({"n_positions": 24}, None, 24),
        ({"text_config": {"max_position_embeddings": 48}}, None, 48),
        ({}, 16, 16),
    ],
)
def test_limit_is_that_of_the_model_unless_a_smaller_one_is_set(directory, config, requested, expected):
    write(directory, "config.json", config)
    assert expected == load(directory, max_model_len=requested).max_model_len


def test_configured_wire_format_is_used_and_an_unknown_one_refused(directory):
    format_of = load(directory, wire_format="llama-3").answer_format
    assert (format_of.wire_format.name, format_of.detected.source) == ("llama-3", "configuration")
    with pytest.raises(ConfigError, match="wireFormat: there is no wire format llama; known are"):
        load(directory, wire_format="llama")


@pytest.mark.parametrize("config", [{"max_position_embeddings": 32}, {"text_config": {"n_positions": 32}}])
def test_limit_above_that_of_the_model_is_a_configuration_error(directory, config):
    write(directory, "config.json", config)
    with pytest.raises(ConfigError) as caught:
        load(directory, max_model_len=33)
    assert str(caught.value) == (
        "maxModelLen (--max-model-len): 33 is above the model's own limit of 32 tokens, "
        f"which {directory / 'config.json'} gives; set it to 32 or less, or leave it out"
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20}, GenerationDefaults(temperature=0.7, top_k=20)),
        ({"top_p": 0.8, "min_p": 0.1}, GenerationDefaults(top_p=0.8, min_p=0.1)),
        ({"repetition_penalty": 1.1, "temperature": None}, GenerationDefaults(repetition_penalty=1.1)),
        ({"do_sample": False, "temperature": 0.7}, GenerationDefaults()),
    ],
)
def test_generation_defaults_apply_unless_do_sample_is_false(directory, written, expected):
    write(directory, "generation_config.json", written)
    assert expected == load(directory).defaults


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", None, "missing"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        ("config.json", "[]", "must be a JSON object"),
        ("config.json", {"max_position_embeddings": "many"}, "max_position_embeddings"),
        ("config.json", {"max_position_embeddings": 1}, "no room"),
        ("config.json", {}, "max_position_embeddings: is missing; set maxModelLen"),
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "{}", "broken"),
        ("tokenizer_config.json", "null and void", "not JSON"),
        ("tokenizer_config.json", {"chat_template": "{{"}, "chat template"),
        ("generation_config.json", {"temperature": "hot"}, "temperature"),
    ],
)
def test_error_names_the_invalid_file_and_the_reason(directory, name, content, reason):
    if content is None:
        (directory / name).unlink()
    else:
        write(directory, name, content)
    with pytest.raises(LoadFailed, match=reason) as caught:
        load(directory)
    assert str(directory / name) in caught.value.message


def test_path_that_is_not_a_directory_is_refused(directory):
    with pytest.raises(LoadFailed, match="no such directory"):
        load(directory / "config.json")


# Encoding ------------------------------------------------------------------------------------------


def test_prompt_has_the_special_tokens_that_are_added(directory):
    model = load(directory)
    assert model.tokenizer.encode("the") == model.encode_prompt("the")


def test_chat_has_only_the_special_tokens_that_the_template_writes(directory):
    model = load(directory)
    assert model.encode_chat(user("")) == [1, 2]
    assert model.encode_chat(user("the")).count(1) == 1


def test_prompt_may_fill_all_but_one_token_of_the_context(directory):
    model = load(directory)
    longest = "a" * 29  # with <s> and ▁ it is 31 tokens
    assert len(model.encode_prompt(longest)) == 31
    with pytest.raises(ContextLengthExceeded, match=r"32 tokens.* this one has 32") as caught:
        model.encode_prompt(longest + "a")
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded, match="32 tokens") as caught:
        model.encode_chat(user("a" * 40))
    assert caught.value.param == "messages"


def test_text_of_sixteen_megabytes_is_refused_without_encoding_it(directory, monkeypatch):
    model, text = load(directory), "a" * 16_000_000
    encoded = []
    monkeypatch.setattr(Tokenizer, "encode", lambda _self, text, **_options: encoded.append(text))
    with pytest.raises(ContextLengthExceeded, match="16000000 characters"):
        model.encode_prompt(text, param="input")
    assert not encoded


@pytest.mark.parametrize(
    ("ids", "reason"), [([], "empty"), ([-1], r"0\.\.\.292"), ([10**9], r"0\.\.\.292"), ([1] * 32, "32")]
)
def test_invalid_prompt_ids_are_refused(directory, ids, reason):
    model = load(directory)
    model.check_prompt([0] * 31)
    with pytest.raises(InvalidRequest, match=reason):
        model.check_prompt(ids)


def test_empty_prompt_is_refused_when_no_special_token_is_added(directory):
    library("byte_level").save(str(directory / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="empty"):
        load(directory).encode_prompt("")


def test_lone_surrogate_is_refused(directory):
    model = load(directory)
    for encode in (model.encode_prompt, lambda text: model.encode_chat(user(text))):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode("\ud83d")


def test_chat_is_refused_for_a_model_without_a_template(directory):
    write(directory, "tokenizer_config.json", {})
    with pytest.raises(InvalidRequest, match="no chat template"):
        load(directory).encode_chat(user("hi"))


def test_template_variables_are_passed_but_reserved_names_are_refused(directory):
    write(directory, "chat_template.jinja", "{{ mood }}")
    model = load(directory)
    assert model.tokenizer.encode("the", add_special_tokens=False) == model.encode_chat(
        user("hi"), variables={"mood": "the"}
    )
    with pytest.raises(InvalidRequest, match="tools"):
        model.encode_chat(user("hi"), variables={"tools": []})


def test_text_package_imports_neither_torch_nor_trio():
    program = (
        "import sys, fairlead.language.text.model, fairlead.language.text.answer;"
        "print(sorted({'torch', 'transformers', 'trio', 'quart'} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"
