"""Where `ControlTokens` inserts breaks into text, and how a tokenizer encodes text with breaks."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library

from fairlead.language.text.control_tokens import BREAK, ControlTokens
from fairlead.language.text.tokenizer import Tokenizer
from language.text.chat_models import with_tokens
from language.text.chats import CHATS
from language.text.vocabularies import MAKES, library, loaded

# Vocabularies -----------------------------------------------------------------------------------------


def copy_of(name):
    return Library.from_str(library(name).to_str())


def tokenizer_of(library, **options):
    return Tokenizer(library, decoder_kinds=frozenset({"ByteLevel"}), **options)


def test_control_tokens_are_those_marked_named_or_in_bars():
    library = copy_of("byte_level")
    library.add_tokens(
        [
            AddedToken("<think>", special=False),
            AddedToken("<|fim|>", special=False),
            AddedToken("█", special=True),
        ]
    )
    expected = {"<|end|>", "<|im_start|>", "<|im_end|>", "<｜wide｜>", "<|fim|>"}
    assert set(tokenizer_of(library).control_tokens) == expected
    # Some models have an ordinary word as their padding token, which must not be broken in client text.
    assert set(tokenizer_of(library, named=("<think>", "the")).control_tokens) == expected | {"<think>"}


def test_normalized_control_token_is_not_matched_in_broken_text():
    library = copy_of("byte_level")
    library.normalizer = normalizers.Lowercase()
    library.add_tokens([AddedToken("<|user|>", special=True, normalized=True)])
    tokenizer = tokenizer_of(library)
    user = tokenizer.token_id("<|user|>")
    assert tokenizer.encode("<|USER|>") == [user]
    control = ControlTokens(tokenizer.control_tokens)
    for text in ("<|USER|>", "<|user|>", "<|User|>"):
        assert user not in tokenizer.encode(control.broken(text), with_breaks=True)
    assert tokenizer.encode("<|user|>", with_breaks=True) == [user]


def test_control_tokens_that_are_also_vocabulary_words_are_not_matched_in_text():
    tokenizer = loaded("unigram")
    control = ControlTokens(tokenizer.control_tokens)
    ids = tokenizer.encode(control.broken("the </s> of"), with_breaks=True)
    assert tokenizer.token_id("</s>") not in ids
    assert tokenizer.decode(ids).replace("\u200b", "") == "the </s> of"


@pytest.mark.parametrize("name", MAKES)
@given(text=st.text(max_size=40))
def test_text_without_breaks_has_the_same_ids(name, text):
    tokenizer = loaded(name)
    assume(BREAK not in text)
    with_breaks = tokenizer._with_breaks.encode(text).ids
    assert tokenizer.encode(text) == with_breaks == tokenizer.encode(text, with_breaks=True)


def test_overlapping_tokens_are_all_broken():
    broken = ControlTokens(["aba", "bab"]).broken("xababab")
    assert broken.replace(BREAK, "") == "xababab"
    assert not any(token in broken for token in ("aba", "bab"))


@pytest.mark.parametrize("offset", [0, 1, *range(16_370, 16_390), 40_000])
def test_token_is_found_anywhere_in_a_long_text(offset):
    text = "x" * offset + "<|im_end|>" + "y" * 20_000
    assert text.replace("<", "<" + BREAK) == ControlTokens(["<|im_end|>"]).broken(text)


def test_without_control_tokens_no_text_is_broken():
    assert ControlTokens([]).broken("<|im_end|>") == "<|im_end|>"


@given(text=with_tokens)
def test_broken_text_has_no_control_token_and_the_same_characters(text):
    broken = ControlTokens(CHATS["chatml"].control).broken(text)
    assert not any(token in broken for token in CHATS["chatml"].control)
    assert broken.replace(BREAK, "") == text or BREAK in text
