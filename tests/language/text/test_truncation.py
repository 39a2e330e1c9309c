"""Texts that are too long for a model are cut as a plain oracle cuts the whole encoding."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from fairlead.base.errors import ContextLengthExceeded, InvalidRequest
from fairlead.language.text.model import TextModel
from fairlead.language.text.truncation import Truncation
from language.text.test_scoring import ARCHITECTURE, CHAT, FIELDS, TEMPLATE
from language.text.vocabularies import MAKES, library

LENGTH = 64
WORDS = "the quick brown fox, naïve café 日本語 😀 hello world 12345\n"
_made = {}


def model_of(tmp_path_factory, vocabulary, *, framed=False, template=None):
    """Return a model with a context of `LENGTH`; `framed`: two tokens stand before each text, one after."""
    key = vocabulary, framed, template
    if key not in _made:
        directory = tmp_path_factory.mktemp("model")
        tokenizer = library(vocabulary)
        if framed:
            tokenizer.add_special_tokens(["[A]", "[B]", "[C]"])
            ids = [(token, tokenizer.token_to_id(token)) for token in ("[A]", "[B]", "[C]")]
            tokenizer.post_processor = processors.TemplateProcessing(
                single="[A] [B] $A [C]", pair="[A] $A [B] $B [C]", special_tokens=ids
            )
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {"chat_template": template} if template else {}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "config.json").write_text(
            json.dumps({"max_position_embeddings": LENGTH, **ARCHITECTURE})
        )
        _made[key] = TextModel.load(directory, name="small")
    return _made[key]


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("vocabulary", MAKES)
@given(
    repeats=st.integers(1, 60),
    start=st.integers(0, 40),
    tokens=st.none() | st.integers(4, LENGTH - 1),
    side=st.sampled_from(["left", "right"]),
)
def test_text_is_cut_at_its_tokens(tmp_path_factory, vocabulary, framed, repeats, start, tokens, side):
    model = model_of(tmp_path_factory, vocabulary, framed=framed)
    text = (WORDS * repeats)[start:]
    whole = model.tokenizer.encode(text)
    beginning, end = model.tokenizer.frame()
    most = LENGTH - 1 if tokens is None else tokens
    inner = whole[len(beginning) : len(whole) - len(end)]
    room = most - len(beginning) - len(end)
    kept = inner if len(inner) <= room else inner[:room] if side == "right" else inner[-room:]
    if framed:
        assert (len(beginning), len(end)) == (2, 1)
    found = model.encode_truncated(text, Truncation(tokens, side))
    assert found == [*beginning, *kept, *end]


def test_only_a_part_of_a_long_text_is_encoded(tmp_path_factory, monkeypatch):
    model = model_of(tmp_path_factory, "byte_level")
    encoded = []
    encode = model.tokenizer.encode
    monkeypatch.setattr(
        model.tokenizer, "encode", lambda text, **rest: encoded.append(text) or encode(text, **rest)
    )
    ids = model.encode_truncated(WORDS * 100_000, Truncation(None, "right"))
    assert len(ids) == LENGTH - 1
    assert sum(map(len, encoded)) < 10_000


def test_text_of_spaces_is_cut_too(tmp_path_factory):
    model = model_of(tmp_path_factory, "byte_level")
    assert len(model.encode_truncated(" " * 10_000, Truncation(8, "left"))) == 8


def test_limit_without_room_for_a_text_is_refused(tmp_path_factory):
    model = model_of(tmp_path_factory, "byte_level", framed=True)
    with pytest.raises(InvalidRequest, match="more than the 3 special tokens") as caught:
        model.encode_truncated(WORDS, Truncation(3, "right"))
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["tokenizer", "template"])
@pytest.mark.parametrize("vocabulary", ["byte_level", "llama"])
@given(
    repeats=st.integers(1, 40),
    tokens=st.none() | st.integers(40, LENGTH - 1),
    side=st.sampled_from(["left", "right"]),
)
def test_second_text_of_a_pair_is_cut(tmp_path_factory, vocabulary, template, repeats, tokens, side):
    model = model_of(tmp_path_factory, vocabulary, template=template or CHAT)
    text = (WORDS * repeats).strip()
    most = LENGTH - 1 if tokens is None else tokens
    found = model.encode_truncated_pair("hello", text, Truncation(tokens, side), fields=FIELDS)
    assert len(found) <= most
    # It is the encoding of a pair with as much of the text as fits, but for a few tokens at the cut.
    cuts = [text[:end] if side == "right" else text[len(text) - end :] for end in range(len(text) + 1)]
    [cut] = [one for one in cuts[: len(found) * 10] if _pair(model, one) == found][:1]
    if cut != text:
        longer = next(one for one in cuts if len(one) > len(cut) and len(_pair(model, one)) > len(found))
        assert len(found) > most - 8 or len(_pair(model, longer)) > most


def _pair(model, second):
    try:
        return model.encode_pair("hello", second, fields=FIELDS)
    except ContextLengthExceeded:
        return [0] * LENGTH
