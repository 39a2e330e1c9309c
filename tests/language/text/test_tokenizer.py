"""`Tokenizer`: encoding, decoding, limits and loading; no client input makes the Rust library panic."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.errors import InvalidRequest, LoadFailed
from fairlead.language.text.tokenizer import BATCH_DECODE_IDS, Tokenizer
from language.text.vocabularies import MAKES, library, loaded


def save(directory, name="llama"):
    library(name).save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("name", MAKES)
@given(text=st.text(max_size=40))
def test_encode_and_decode_match_the_library(name, text):
    tokenizer, model = loaded(name), library(name)
    ids = tokenizer.encode(text)
    assert model.encode(text).ids == ids
    assert model.decode(ids) == tokenizer.decode(ids)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_byte_level_text_survives_a_round_trip(text):
    tokenizer = loaded("byte_level")
    ids = tokenizer.encode(text)
    assert text.encode() == b"".join(map(tokenizer.token_bytes, ids))
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", MAKES)
@given(ids=st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 400), max_size=20))
def test_unknown_ids_decode_to_no_text(name, ids):
    tokenizer = loaded(name)
    known = [token_id for token_id in ids if tokenizer.has_token(token_id)]
    assert tokenizer.decode(known) == tokenizer.decode(ids)
    assert all(tokenizer.token_bytes(token_id) == b"" for token_id in set(ids) - set(known))


def test_lone_surrogate_raises_invalid_request():
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        loaded("byte_level").encode("half \ud83d a smile", param="prompt")
    assert caught.value.param == "prompt"


def test_unknown_word_without_an_unk_token_raises_invalid_request(tmp_path):
    save(tmp_path, "no_decoder")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"]["vocab"]["<unk>"]
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidRequest, match="cannot be tokenized"):
        Tokenizer.load(tmp_path).encode("a cat")


def test_a_hundred_thousand_ids_are_decoded():
    tokenizer = loaded("byte_level")
    ids = tokenizer.encode("hello world ") * 40_000
    assert len(ids) > 100_000
    assert tokenizer.decode(ids) == "hello world " * 40_000


def test_special_token_in_the_text_is_encoded_as_that_token():
    tokenizer = loaded("llama")
    assert [tokenizer.token_id("</s>")] == tokenizer.encode("</s>", add_special_tokens=False)


def test_special_tokens_are_added_and_skipped_when_requested():
    tokenizer = loaded("llama")
    with_special, without = tokenizer.encode("the"), tokenizer.encode("the", add_special_tokens=False)
    assert [tokenizer.token_id("<s>"), *without] == with_special
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(with_special) == "the"
    assert tokenizer.decode(with_special, skip_special_tokens=False) == "<s> the"


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("byte_level", "Ġ", b" "),
        ("byte_level", "Ċ", b"\n"),
        ("byte_level", "Ń", b"\xad"),
        ("byte_level", "<|end|>", b"<|end|>"),
        ("byte_level", "<｜wide｜>", "<｜wide｜>".encode()),
        ("byte_level", "added word", b"added word"),
        ("llama", "▁the", b" the"),
        ("llama", "<0xF0>", b"\xf0"),
        ("llama", "<s>", b"<s>"),
        ("unigram", "▁the", b" the"),
        ("unigram", "日", "日".encode()),
        ("word_piece", "##s", b"s"),
        ("word_piece", "the", b" the"),
    ],
)
def test_token_bytes_are_what_a_token_adds_to_the_text(name, token, expected):
    tokenizer = loaded(name)
    token_id = tokenizer.token_id(token)
    assert expected == tokenizer.token_bytes(token_id)
    assert expected.decode(errors="replace") == tokenizer.token(token_id)


def test_vocab_size_is_one_above_the_highest_id():
    tokenizer = loaded("byte_level")
    assert tokenizer.has_token(tokenizer.vocab_size - 1)
    assert not tokenizer.has_token(tokenizer.vocab_size)
    assert not tokenizer.has_token(-1)


@pytest.mark.parametrize("name", ["byte_level", "llama", "unigram"])
@given(text=st.text(max_size=60) | st.sampled_from(["▁▁", "  ", "lo"]).map(lambda text: text * 20))
def test_may_fit_is_true_for_text_that_fits(name, text):
    tokenizer = loaded(name)
    assert tokenizer.may_fit(text, len(tokenizer.encode(text)))


def test_saved_truncation_and_padding_are_ignored(tmp_path):
    save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    path.write_text(json.dumps(content))
    assert loaded("llama").encode("the " * 10) == Tokenizer.load(tmp_path).encode("the " * 10)


def test_error_names_the_missing_file(tmp_path):
    with pytest.raises(LoadFailed, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_truncated_file_is_named(tmp_path, part):
    save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(LoadFailed, match=r"tokenizer\.json is broken"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\xff\xfe", b'{"model": 1}', b'{"decoder": {"kind": 1}}'])
def test_error_names_a_file_of_another_format(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(LoadFailed, match=r"tokenizer\.json is broken"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", MAKES)
@given(text=st.text(max_size=400) | st.text("the quick😀日本語 \n", max_size=400))
def test_may_fit_is_true_for_text_that_fits_when_it_is_cut(name, text):
    """Cut every 60 characters and allow 8 tokens a cut: the real allowance is larger."""
    tokenizer = loaded(name)
    limit = len(tokenizer.encode(text, add_special_tokens=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairlead.language.text.tokenizer.UNCOUNTED_BYTES_PER_TOKEN", 0)
        patch.setattr("fairlead.language.text.tokenizer.PIECE_CHARS", 60)
        patch.setattr("fairlead.language.text.tokenizer.TOKENS_PER_CUT", 8)
        # A longer text is one from which a normalizer removed many characters.
        if len(text) <= limit * tokenizer.longest_token_chars:
            assert tokenizer.may_fit(text, limit)


def test_text_that_does_not_fit_is_not_encoded_to_its_end(monkeypatch):
    tokenizer = loaded("byte_level")
    monkeypatch.setattr(tokenizer, "longest_token_chars", 10**6, raising=False)
    counted = []
    library = tokenizer._tokenizer

    class CountingTokenizer:
        def encode_batch_fast(self, texts, **options):
            counted.extend(map(len, texts))
            return library.encode_batch_fast(texts, **options)

    monkeypatch.setattr(tokenizer, "_tokenizer", CountingTokenizer())
    assert not tokenizer.may_fit("x" * 10_000_000, 4096)
    assert sum(counted) < 100_000


def test_may_fit_does_not_encode_a_short_text(monkeypatch):
    tokenizer = loaded("byte_level")
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    assert tokenizer.may_fit("x" * 4 * 4096, 4096)
    assert not tokenizer.may_fit("x" * (4096 * tokenizer.longest_token_chars + 1), 4096)


@pytest.mark.parametrize("name", MAKES)
def test_many_ids_are_decoded_as_by_the_library(name):
    tokenizer = loaded(name)
    ids = tokenizer.encode("The quick brown fox, naïve 日本語 😀 </s> " * 50)
    assert len(ids) > BATCH_DECODE_IDS
    for skip in (True, False):
        expected = library(name).decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_other_threads_run_while_a_long_text_is_encoded():
    """The library must release the GIL, otherwise this thread would not run until the end."""
    tokenizer = loaded("byte_level")
    text = "the quick brown fox jumps over the lazy dog " * 20_000
    thread = threading.Thread(target=tokenizer.encode, args=[text])
    thread.start()
    turns = 0
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 5
