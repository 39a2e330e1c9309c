"""Contents are decoded as they were encoded, in small pieces, and nothing else is accepted."""

import gzip
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.formats.content_coding import MEMBERS, PIECE_BYTES, WINDOW_LOG, InvalidContent, decoder_of
from nodes.coded import ENCODERS, zstd

encoders = pytest.mark.parametrize("encoder", ENCODERS)


def decode(coding: str, *parts: bytes) -> bytes:
    decoder = decoder_of(coding)
    pieces = [piece for part in parts for piece in decoder.decode(part)]
    decoder.end()
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)
    return b"".join(pieces)


@encoders
@given(data=st.binary(max_size=300) | st.integers(0, 300_000).map(bytes), cuts=st.lists(st.integers(0, 400)))
def test_content_is_decoded_however_it_is_cut(encoder, data, cuts):
    coding, encode = ENCODERS[encoder]
    encoded = encode(data)
    places = [0, *sorted(min(cut, len(encoded)) for cut in cuts), len(encoded)]
    parts = [encoded[begin:end] for begin, end in pairwise(places)]
    assert decode(coding, *parts) == data


@encoders
@given(data=st.binary(min_size=1, max_size=100), left=st.floats(0, 1, exclude_max=True))
def test_content_that_ends_too_early_is_refused(encoder, data, left):
    coding, encode = ENCODERS[encoder]
    encoded = encode(data)
    part = encoded[: 1 + int(left * (len(encoded) - 1))]
    if len(part) < len(encoded):
        with pytest.raises(InvalidContent):
            decode(coding, part)


@encoders
@given(data=st.binary(min_size=2, max_size=200))
def test_any_bytes_are_decoded_or_refused(encoder, data):
    coding, _ = ENCODERS[encoder]
    with suppress(InvalidContent):
        decode(coding, data)


@pytest.mark.parametrize("encoder", ["gzip", "zstd"])
def test_members_are_joined_and_bounded(encoder):
    coding, encode = ENCODERS[encoder]
    assert decode(coding, encode(b"a") + encode(b""), encode(b"b")) == b"ab"
    assert decode(coding, encode(b"a") * MEMBERS) == b"a" * MEMBERS
    with pytest.raises(InvalidContent, match="members"):
        decode(coding, encode(b"") * (MEMBERS + 1))


def test_empty_members_take_little_time():
    data = gzip.compress(b"") * 400_000  # quadratic time would be minutes
    with pytest.raises(InvalidContent, match="members"):
        decode("gzip", data)


@encoders
def test_a_bomb_comes_in_small_pieces(encoder):
    coding, encode = ENCODERS[encoder]
    bomb = encode(bytes(50_000_000))
    assert len(bomb) < 100_000
    sizes = list(map(len, decoder_of(coding).decode(bomb)))
    assert (sum(sizes), max(sizes)) == (50_000_000, PIECE_BYTES)


def test_frame_of_zstd_that_asks_for_more_memory_than_http_allows_is_refused():
    window = zstd.CompressionParameter.window_log
    data = bytes(2 ** (WINDOW_LOG + 1))

    def encoded(log):
        compressor = zstd.ZstdCompressor(options={window: log})
        return compressor.compress(data) + compressor.flush()

    assert decode("zstd", encoded(WINDOW_LOG)) == data
    with pytest.raises(InvalidContent, match="memory"):
        decode("zstd", encoded(WINDOW_LOG + 1))


def test_no_content_needs_no_decoding():
    for coding in ("gzip", "deflate", "zstd"):
        assert decode(coding) == b""


@pytest.mark.parametrize("header", ["", "identity", " Identity ", ",", "identity, identity"])
def test_identity_has_no_decoder(header):
    assert decoder_of(header) is None


@pytest.mark.parametrize("header", ["gzip", " GZIP ", "identity, gzip", "zstd"])
def test_known_coding_has_a_decoder(header):
    assert decoder_of(header) is not None


@pytest.mark.parametrize("header", ["br", "compress", "gzip, zstd", "gzip, gzip", "gzip zstd", "aws-chunked"])
def test_unknown_or_several_codings_are_refused(header):
    with pytest.raises(ValueError, match="not known"):
        decoder_of(header)
