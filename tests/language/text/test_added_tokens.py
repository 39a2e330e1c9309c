"""Tokens that only the other files of a folder have: added as transformers adds them, with the same ids."""

import json
import random

import pytest
import transformers

from fairlead.base.errors import LoadFailed
from fairlead.language.text.tokenizer import Tokenizer
from language.text.vocabularies import library

TEXT = "the dog <a> <b><c>[PAD]  </s> é <image> <a>the"
WORDS = ["<a>", "<b>", "<c>", "[PAD]", "</s>", "<image>", "th", "▁the"]


def write(directory, **files):
    library("llama").save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def by_transformers(directory):
    return transformers.AutoTokenizer.from_pretrained(directory)


def facts_of(tokenizer):
    """Return what a Rust tokenizer knows of each added token, and how it encodes a text."""
    added = {
        token_id: (token.content, token.special, token.normalized, token.lstrip, token.rstrip)
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    return added, tokenizer.get_vocab(), tokenizer.encode(TEXT).ids


def random_files(seed):
    """Return the files of a folder that list tokens in random ways, contradictions included."""
    draw = random.Random(seed)

    def word():
        return draw.choice(WORDS)

    def token(**more):
        flags = {name: draw.random() < 0.3 for name in ("lstrip", "rstrip", "single_word", "special")}
        if draw.random() < 0.5:
            flags["normalized"] = draw.random() < 0.5
        return {"content": word(), **flags, **more}

    def role():
        content = with_role.pop()
        return content if draw.random() < 0.6 else token(__type="AddedToken") | {"content": content}

    def sometimes(chance, **content):
        return content if draw.random() < chance else {}

    with_role = draw.sample(WORDS, len(WORDS))
    further = [{"extra_special_tokens": {"audio_token": word()}}]
    further += [{key: [word()]} for key in ("extra_special_tokens", "additional_special_tokens")]
    start = library("llama").get_vocab_size()

    def ids():
        return [start + draw.randrange(9) for _ in range(draw.randrange(4))]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **sometimes(0.5, eos_token=role()),
        **sometimes(0.5, pad_token=role()),
        **sometimes(0.3, image_token=word()),
        **sometimes(0.5, added_tokens_decoder={str(one): token() for one in ids()}),
        **sometimes(0.5, **draw.choice(further)),
    }
    return {
        "tokenizer_config": config,
        **sometimes(0.5, added_tokens={word(): one for one in ids()}),
        **sometimes(0.4, special_tokens_map={name: word() for name in ("eos_token", "unk_token")}),
    }


@pytest.mark.parametrize("seed", range(60))
def test_added_tokens_are_those_of_transformers(tmp_path, seed):
    write(tmp_path, **random_files(seed))
    assert facts_of(Tokenizer.load(tmp_path)._tokenizer) == facts_of(by_transformers(tmp_path)._tokenizer)


def test_token_that_only_the_configuration_has_is_one_id_and_no_text(tmp_path):
    write(tmp_path, tokenizer_config={"pad_token": "[PAD]"})
    tokenizer = Tokenizer.load(tmp_path)
    size = library("llama").get_vocab_size()
    assert tokenizer.token_id("[PAD]") == size
    assert tokenizer.encode("[PAD]", add_special_tokens=False) == [size]
    assert (tokenizer.vocab_size, tokenizer.decode([size])) == (size + 1, "")
    assert tokenizer.control_tokens["[PAD]"] == size


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"7": {"special": True}}}, "content"),
        ("tokenizer_config", {"pad_token": {"special": True}}, "content"),
        ("tokenizer_config", {"image_token": {"content": 3}}, "image_token: Expected `str`"),
        ("added_tokens", {"<a>": "x"}, "Expected `int`"),
    ],
)
def test_faulty_list_of_tokens_names_its_file(tmp_path, name, content, reason):
    write(tmp_path, **{name: content})
    with pytest.raises(LoadFailed, match=reason) as caught:
        Tokenizer.load(tmp_path)
    assert f"{name}.json" in caught.value.message
