"""Infilling prompts: the marks that each vocabulary has, in the order that its models were trained with."""

import dataclasses

import pytest
import tokenizers

from fairlead.base.errors import ContextLengthExceeded, InvalidRequest
from fairlead.language.text.infill import SPELLINGS, InfillTokens
from fairlead.language.text.model import TextModel
from fairlead.language.text.tokenizer import Tokenizer
from language.text.vocabularies import library

# The published prompts, with {p} for the text before the cursor and {s} for the text after it.
PUBLISHED = {
    "Qwen2.5-Coder, CodeGemma, Granite 4": "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>",
    "StarCoder, Granite Code": "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>",
    "SantaCoder": "<fim-prefix>{p}<fim-suffix>{s}<fim-middle>",
    "DeepSeek-Coder": "<｜fim▁begin｜>{p}<｜fim▁hole｜>{s}<｜fim▁end｜>",
    "Code Llama": "▁<PRE>{p}▁<SUF>{s}▁<MID>",
    "Codestral": "[SUFFIX]{s}[PREFIX]{p}",
    "CodeGeeX4": "<|code_suffix|>{s}<|code_prefix|>{p}<|code_middle|>",
}


def model_with(kind: str, tokens: list[str], **options) -> TextModel:
    """Return a model with this kind of vocabulary and added tokens, of which none is marked as special."""
    own = tokenizers.Tokenizer.from_str(library(kind).to_str())
    own.add_tokens(tokens)
    decoders = {
        "byte_level": {"ByteLevel"},
        "llama": {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip"},
    }
    tokenizer = Tokenizer(own, decoder_kinds=frozenset(decoders[kind]))
    values = {"eos_token_ids": frozenset({2}), "max_model_len": 64, "max_input_tokens": None} | options
    return TextModel(
        name="small",
        path=None,
        tokenizer=tokenizer,
        chat_template=None,
        defaults=None,
        created=0,
        infill=InfillTokens.find(tokenizer.control_tokens),
        **values,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompt_is_the_published_one_of_each_vocabulary(name):
    [spelling] = [one for one in SPELLINGS if one.prefix in PUBLISHED[name]]
    model = model_with("byte_level", list(spelling.marks))
    expected = model.tokenize(PUBLISHED[name].format(p="def f(", s="return 1\n"))
    assert model.encode_infill("def f(", "return 1\n") == expected


def test_every_spelling_is_tested():
    assert len(PUBLISHED) == len(SPELLINGS)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_model_without_one_of_the_marks_has_no_infilling(missing):
    marks = [mark for place, mark in enumerate(SPELLINGS[0].marks) if place != missing]
    model = model_with("byte_level", marks)
    assert model.infill is None
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle tokens") as caught:
        model.encode_infill("a", "b")
    assert caught.value.param == "suffix"


def test_marks_and_the_vocabularys_other_ends_end_the_answer():
    spelling = SPELLINGS[1]
    model = model_with("byte_level", [*spelling.marks, "<file_sep>", "<think>"])
    ids = {model.tokenizer.token_id(token) for token in spelling.marks}
    assert ids <= set(model.infill.ends)
    # "<file_sep>" is no control token here, because the vocabulary does not mark it as special.
    assert model.tokenizer.token_id("<file_sep>") not in model.infill.ends
    special = tokenizers.Tokenizer.from_str(library("byte_level").to_str())
    special.add_special_tokens([*spelling.marks, "<file_sep>"])
    tokenizer = Tokenizer(special, decoder_kinds=frozenset({"ByteLevel"}))
    assert tokenizer.token_id("<file_sep>") in InfillTokens.find(tokenizer.control_tokens).ends


@pytest.mark.parametrize("place", ["prompt", "suffix"])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.prefix)
def test_spelled_marks_in_either_text_stay_text(spelling, place):
    model = model_with("byte_level", [*spelling.marks], max_model_len=256)
    spelled = "x" + "".join(spelling.marks) + "<|im_end|>y"
    texts = {"prompt": "a", "suffix": "b"} | {place: spelled}
    ids = model.encode_infill(**texts)
    marks = [model.tokenizer.token_id(mark) for mark in spelling.marks]
    assert [ids.count(mark) for mark in marks] == [1] * len(marks)
    assert model.tokenizer.token_id("<|im_end|>") not in ids
    text = model.tokenizer.decode([one for one in ids if one not in marks], skip_special_tokens=False)
    assert text in (texts["prompt"] + texts["suffix"], texts["suffix"] + texts["prompt"])


def test_spelled_marks_are_parsed_on_request():
    marks = SPELLINGS[0].marks
    model = model_with("byte_level", list(marks))
    ids = model.encode_infill(f"a{marks[0]}", "b", special_tokens="parse")
    assert ids.count(model.tokenizer.token_id(marks[0])) == 2


@pytest.mark.parametrize(("prompt", "suffix"), [("", "b"), ("a", ""), ("", "")])
def test_either_text_may_be_empty(prompt, suffix):
    model = model_with("byte_level", list(SPELLINGS[0].marks))
    expected = model.tokenize("<|fim_prefix|>" + prompt + "<|fim_suffix|>" + suffix + "<|fim_middle|>")
    assert model.encode_infill(prompt, suffix) == expected


def test_beginning_of_sequence_is_first_and_the_suffix_gets_no_space():
    model = model_with("llama", list(SPELLINGS[4].marks))
    token_id = model.tokenizer.token_id
    assert model.encode_infill("the", "the lo") == [
        *(token_id(token) for token in ("<s>", "▁<PRE>", "▁the", "▁<SUF>")),
        *(token_id(token) for token in ("th", "e", "▁", "lo", "▁<MID>")),
    ]


@pytest.mark.parametrize(
    ("prompt", "suffix", "param"),
    [("a " * 40, "b " * 20, "prompt"), ("a " * 20, "b " * 40, "suffix"), ("a" * 10**7, "b", "prompt")],
)
def test_both_texts_count_for_the_limit_and_the_longer_one_is_named(prompt, suffix, param):
    model = model_with("byte_level", list(SPELLINGS[0].marks))
    with pytest.raises(ContextLengthExceeded) as caught:
        model.encode_infill(prompt, suffix)
    assert caught.value.param == param


def test_prompt_of_exactly_the_limit_is_accepted():
    model = model_with("byte_level", list(SPELLINGS[0].marks))
    ids = model.encode_infill("a", "b")
    assert dataclasses.replace(model, max_model_len=len(ids) + 1).encode_infill("a", "b") == ids
    with pytest.raises(ContextLengthExceeded):
        dataclasses.replace(model, max_model_len=len(ids)).encode_infill("a", "b")
