"""Content codings are decoded in bounded pieces, however the data is cut."""

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.http.content_coding import PIECE_BYTES, ContentDecoder
from nodes.coded import CODINGS, ENCODE

TEXT = bytes(range(256)) * 1000


def decoded(decoder, *pieces):
    return b"".join(part for piece in pieces for part in decoder.feed(piece))


@pytest.mark.parametrize("coding", CODINGS)
@given(text=st.binary(max_size=200), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_text_is_decoded_at_any_cut(coding, text, cuts):
    data = ENCODE[coding](text)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder = ContentDecoder(coding)
    assert decoded(decoder, *(data[begin:end] for begin, end in pairwise(edges))) == text
    assert decoder.is_complete


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_and_frames_follow_each_other(coding):
    data = ENCODE[coding](TEXT) + ENCODE[coding](b"more")
    assert decoded(ContentDecoder(coding), data) == TEXT + b"more"
    assert decoded(ContentDecoder(coding), *(data[at : at + 1] for at in range(len(data)))) == TEXT + b"more"


@pytest.mark.parametrize("coding", CODINGS)
def test_bomb_comes_in_small_pieces(coding):
    data = ENCODE[coding](bytes(50_000_000))
    tracemalloc.start()
    pieces = ContentDecoder(coding).feed(data)
    sizes = [len(next(pieces)) for _ in range(100)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max(sizes) <= PIECE_BYTES
    assert peak_bytes < 10_000_000


@pytest.mark.parametrize("coding", CODINGS)
def test_body_that_is_cut_off_is_not_complete(coding):
    decoder = ContentDecoder(coding)
    decoded(decoder, ENCODE[coding](TEXT)[:-1])
    assert not decoder.is_complete


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("data", [b"no such data", b"\0" * 100])
def test_invalid_data_is_an_error(coding, data):
    with pytest.raises(ValueError, match=f"invalid {coding} data"):
        decoded(ContentDecoder(coding), data)


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress", "x" * 1000])
def test_other_codings_are_an_error(coding):
    with pytest.raises(ValueError, match="not known"):
        ContentDecoder(coding)
