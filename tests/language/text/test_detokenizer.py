"""The joined pieces of a `Detokenizer` are the text of all ids, however the ids are split."""

import time
from functools import cache
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as Library

from fairlead.language.text.detokenizer import Detokenizer
from fairlead.language.text.tokenizer import Tokenizer
from language.text.vocabularies import EXACT, MAKES, library, loaded

TEXTS = [
    "the dog sleeps, hello world",
    "😀 a 👩\u200d👩\u200d👧 🏳️\u200d🌈",
    "e\u0301 n\u0303 \u0301",
    "日本語のテキスト 中文",
    "  two  blanks\n\n\tand tabs ",
    "\ufffd itself \ufffd",
]


def in_chunks(data, ids):
    """Split the ids at random positions."""
    chunks = []
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        chunks.append(ids[:size])
        ids = ids[size:]
    return chunks


def detokenized(detokenizer, chunks):
    return [*map(detokenizer.push, chunks), detokenizer.flush()]


@cache
def id_lists(name):
    """Return lists of random ids (a few unknown), ids of text, special ids, and byte tokens if it has any."""
    tokenizer = loaded(name)
    kinds = [
        st.lists(st.integers(-1, tokenizer.vocab_size + 1), max_size=12),
        st.builds(tokenizer.encode, st.sampled_from(TEXTS) | st.text(max_size=12)),
        st.sampled_from(sorted(tokenizer.special_ids) or [0]).map(lambda token_id: [token_id]),
    ]
    if tokenizer.byte_ids:
        ids_by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in tokenizer.byte_ids}
        data = st.binary(max_size=8) | st.text(max_size=4).map(str.encode)
        kinds.append(data.map(lambda data: [ids_by_byte[bytes([byte])] for byte in data]))
    return st.lists(st.one_of(kinds), max_size=5).map(lambda lists: [*chain.from_iterable(lists)])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_joined_pieces_are_the_text_of_all_ids(name, skip, data):
    ids = data.draw(id_lists(name))
    chunks = in_chunks(data, ids)
    known = [token_id for token_id in ids if 0 <= token_id < loaded(name).vocab_size]
    expected = library(name).decode(known, skip_special_tokens=skip)
    assert expected == "".join(detokenized(Detokenizer(loaded(name), skip_special_tokens=skip), chunks))


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
def test_returned_text_is_never_changed_by_later_ids(name, data):
    ids, later = data.draw(id_lists(name)), data.draw(id_lists(name))
    tokenizer = loaded(name)
    returned = "".join(map(Detokenizer(tokenizer).push, in_chunks(data, ids)))
    assert tokenizer.decode(ids + later).startswith(returned)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_is_decoded_token_by_token(name, text):
    tokenizer = loaded(name)
    ids = tokenizer.encode(text)
    pieces = detokenized(Detokenizer(tokenizer), [[token_id] for token_id in ids])
    assert tokenizer.decode(ids) == "".join(pieces)


ODD_TOKENS = [
    *("a", "▁", "▁▁b", "c▁", "##d", "e##", ".", " ,", "n't", "f</w>", "</w>g", "</w>", "", " ", "  h", "é"),
    *(f"<0x{byte:02x}>" for byte in (0x20, 0x41, 0xC3, 0xA9, 0xE2, 0x96, 0x81)),
    *("<0x+A>", "<0x4>", "<0xZZ>", "q"),
]
STEPS = st.sampled_from(
    [
        *(decoders.Replace("▁", " "), decoders.Replace("q", "▁"), decoders.Replace(Regex("[aq]"), "")),
        *(decoders.ByteFallback(), decoders.Fuse(), decoders.CTC()),
        *(decoders.Strip(" ", 1, 0), decoders.Strip(" ", 2, 0)),
        *(decoders.Metaspace(prepend_scheme=scheme) for scheme in ("always", "first", "never")),
        *(decoders.WordPiece(cleanup=cleanup) for cleanup in (True, False)),
        decoders.BPEDecoder(),
    ]
)


@given(data=st.data(), steps=st.lists(STEPS, max_size=5))
def test_any_decoder_is_read_as_the_library_reads_it(data, steps):
    vocabulary = {token: token_id for token_id, token in enumerate(ODD_TOKENS)}
    made = Library(models.WordLevel(vocabulary, unk_token="a"))
    made.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(made, decoder_kinds=frozenset())
    assume(tokenizer.pieces is not None)
    ids = data.draw(st.lists(st.integers(0, len(ODD_TOKENS) - 1), min_size=1, max_size=12))
    assert made.decode(ids) == "".join(detokenized(Detokenizer(tokenizer), in_chunks(data, ids)))


@pytest.mark.parametrize("name", EXACT)
def test_library_is_called_once_for_each_token_of_a_vocabulary(name, monkeypatch):
    tokenizer = loaded(name)
    ids = tokenizer.encode("the dog 日本 😀 a dog")
    first = "".join(detokenized(Detokenizer(tokenizer), [ids]))
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    assert first == "".join(detokenized(Detokenizer(tokenizer, context=ids[:0]), [[one] for one in ids]))


def test_character_is_returned_with_its_last_byte():
    tokenizer = loaded("byte_level")
    ids = [
        next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([b]))
        for b in "é".encode()
    ]
    assert detokenized(Detokenizer(tokenizer), [[token_id] for token_id in ids]) == ["", "é", ""]


def test_run_of_byte_tokens_is_kept_until_it_ends():
    tokenizer = loaded("llama")
    run = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    the = tokenizer.token_id("▁the")
    assert detokenized(Detokenizer(tokenizer), [run, [the]]) == ["", "€ the", ""]
    invalid = [*run, tokenizer.token_id("<0x80>")]
    assert detokenized(Detokenizer(tokenizer), [invalid, [the]]) == ["", "\ufffd" * 4 + " the", ""]


def test_text_before_a_run_of_byte_tokens_is_returned_at_once():
    tokenizer = loaded("llama")
    the, byte = tokenizer.token_id("▁the"), tokenizer.token_id("<0xE2>")
    assert detokenized(Detokenizer(tokenizer), [[the], [the, byte]]) == ["the", " the", "\ufffd"]


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_only_the_beginning_of_a_text_loses_its_blank(name):
    tokenizer = loaded(name)
    the = tokenizer.token_id("▁the")
    assert detokenized(Detokenizer(tokenizer), [[the], [the]]) == ["the", " the", ""]
    assert detokenized(Detokenizer(tokenizer, context=[the]), [[the], [the]]) == [" the", " the", ""]


@given(context=id_lists("llama"))
def test_context_is_never_in_the_text(context):
    tokenizer = loaded("llama")
    ids = tokenizer.encode("a dog 日本 😀", add_special_tokens=False)
    text = "".join(detokenized(Detokenizer(tokenizer, context=context), [ids]))
    assert text.removeprefix(" ") == "a dog 日本 😀"


@pytest.mark.parametrize("name", MAKES)
def test_long_answer_takes_linear_time(name):
    tokenizer = loaded(name)
    assert_linear(tokenizer, [token_id % tokenizer.vocab_size for token_id in range(20_000)])


@pytest.mark.parametrize(("name", "byte"), [("byte_level", 0x80), ("llama", 0xF0), ("unigram", 0x80)])
def test_invalid_bytes_take_linear_time(name, byte):
    tokenizer = loaded(name)
    (invalid_id,) = (i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))
    pieces = assert_linear(tokenizer, [invalid_id] * 20_000)
    assert "".join(pieces) == "\ufffd" * 20_000


def assert_linear(tokenizer, ids):
    """Push the ids one by one. Quadratic work would take minutes, so a loose bound suffices."""
    begin = time.process_time()
    pieces = detokenized(Detokenizer(tokenizer), [[token_id] for token_id in ids])
    assert time.process_time() - begin < 5
    return pieces
