"""The tokens that end an answer: of each file that may name them, and of the chat template."""

import json

import pytest
from tokenizers import AddedToken

from fairlead.base.errors import LoadFailed
from fairlead.engine.worker import main
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.end_tokens import _end_of_turn
from fairlead.language.text.model import TextModel
from language.text.published_templates import FOLDER
from language.text.vocabularies import library

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IM_START, IM_END = 293, 294


def load(directory, *, config=None, generation=None, tokenizer=None, **files):
    """Load a model with these files; its vocabulary is that of "llama" with the two tokens of ChatML."""
    vocabulary = library("llama").from_str(library("llama").to_str())
    vocabulary.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    vocabulary.save(str(directory / "tokenizer.json"))
    sizes = {"max_position_embeddings": 32, "vocab_size": 300}
    (directory / "config.json").write_text(json.dumps(sizes | (config or {})))
    files |= {"generation_config": generation, "tokenizer_config": tokenizer}
    for name, content in files.items():
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return TextModel.load(directory, name="small")


def ends_of(directory, **files):
    """Return the end tokens as both processes find them."""
    return same_ends(load(directory, **files), directory)


def same_ends(model, directory):
    """Return the end tokens of a loaded model, after comparing them with those of its process."""
    main._tokenizer.cache_clear()
    assert model.eos_token_ids == set(main._end_tokens(str(directory)))
    return model.eos_token_ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 1}}, {1}),
        ({"config": {"eos_token_id": [1, 0]}}, {0, 1}),
        ({"config": {"text_config": {"eos_token_id": 3}, "eos_token_id": 4}}, {3, 4}),
        ({"config": {"eos_token_id": 1}, "generation": {"eos_token_id": [0, 2]}}, {0, 1, 2}),
        ({"generation": {"eos_token_id": 5}}, {5}),
        ({"tokenizer": {"eos_token": "</s>"}}, {2}),
        ({"tokenizer": {"eos_token": {"content": "</s>", "__type": "AddedToken"}}}, {2}),
        ({"special_tokens_map": {"eos_token": "</s>"}}, {2}),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer": {"added_tokens_decoder": {}}}, set()),
        ({"config": {"eos_token_id": 0}, "tokenizer": {"eos_token": "<|im_end|>"}}, {0, IM_END}),
    ],
    ids=str,
)
def test_all_files_count(tmp_path, files, expected):
    assert ends_of(tmp_path, **files) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, set()),
        (-1, set()),
        ([2, None], {2}),
        ([-1, 2], {2}),
        ([], set()),
        (2.0, {2}),
        ([2.0, 3], {2, 3}),
    ],
)
@pytest.mark.parametrize("file", ["config", "generation"])
def test_null_and_negative_numbers_stand_for_no_token(tmp_path, file, written, expected):
    assert ends_of(tmp_path, **{file: {"eos_token_id": written}}) == expected


@pytest.mark.parametrize("written", ["2", True, 2.5, [[2]], {"id": 2}])
@pytest.mark.parametrize(
    ("file", "path"), [("config", "config.json"), ("generation", "generation_config.json")]
)
def test_what_is_no_token_id_names_its_file(tmp_path, file, path, written):
    with pytest.raises(LoadFailed, match="eos_token_id: must be a token id or a list of them") as caught:
        load(tmp_path, **{file: {"eos_token_id": written}})
    assert str(tmp_path / path) in caught.value.message


def test_ids_that_the_network_lacks_are_ignored_and_reported(tmp_path):
    model = load(tmp_path, config={"eos_token_id": [2, 300, 2**40]}, tokenizer={"eos_token": "</s>"})
    assert (same_ends(model, tmp_path), model.ignored_end_tokens) == ({2}, (300, 2**40))


def test_size_of_the_network_may_be_its_familys_default(tmp_path):
    load(tmp_path)
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": [2, 31_999, 32_000]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = TextModel.load(tmp_path, name="small")
    assert (same_ends(model, tmp_path), model.ignored_end_tokens) == ({2, 31_999}, (32_000,))
    assert (model.network_vocab_size, model.vocab_size) == (32_000, 295)


def test_token_that_only_the_configuration_has_ends_answers_if_the_network_has_it(tmp_path):
    model = load(tmp_path, tokenizer={"eos_token": "<|eot|>"})
    assert (model.eos_token_ids, model.ignored_end_tokens) == ({295}, ())
    model = load(tmp_path, config={"vocab_size": 295}, tokenizer={"eos_token": "<|eot|>"})
    assert (model.eos_token_ids, model.ignored_end_tokens) == (set(), (295,))


# The chat template -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, {2, IM_END}),
        (CHATML.replace("<|im_end|>", "</s>"), {2}),
        # of several tokens, the first may end only a part of the turn
        (CHATML.replace("<|im_end|>", "<|im_end|>\n<s>"), {2}),
        (CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"), {2}),
        (CHATML.replace("<|im_end|>", " The end."), {2}),
        (CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), {2}),
        (CHATML.replace("<|im_end|>", "<|not in the vocabulary|>"), {2}),
        ("{{ raise_exception('no') }}", {2}),
    ],
)
def test_the_only_control_token_after_the_last_content_ends_answers(tmp_path, template, expected):
    assert ends_of(tmp_path, tokenizer={"eos_token": "</s>", "chat_template": template}) == expected


@pytest.mark.parametrize(
    "part",
    [
        "{% if m.thinking %}{{ m.thinking }}<|im_end|>{% endif %}",
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}<|im_end|>{% endif %}",
    ],
)
def test_token_that_also_ends_a_part_of_the_turn_ends_no_answer(tmp_path, part):
    template = CHATML.replace("{{ m.content }}", part + "{{ m.content }}")
    assert ends_of(tmp_path, tokenizer={"chat_template": template}) == set()


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"run {FOLDER.parents[1]}/tests/text/published_templates.py")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "<|im_end|>"),
        ("meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>"),
        ("google-gemma-2-2b-it", "<end_of_turn>"),
        ("upstage-Solar-Open-100B", None),  # <|end|> ends the reasoning, too
        ("GigaChat3-10B-A1.8B", None),  # <|message_sep|> also divides content and calls
        ("microsoft-Phi-3.5-mini-instruct", None),  # <|end|>, then <|endoftext|>
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", None),  # begins the next turn
        ("GLM-4.6", None),  # writes nothing after an answer
    ],
)
def test_ends_of_published_templates(name, expected):
    class Vocabulary:
        control_tokens = frozenset(
            ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|message_sep|>", "<|endoftext|>")
        )

    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), special_tokens={"eos_token": "</s>"})
    assert _end_of_turn(template, Vocabulary) == expected
