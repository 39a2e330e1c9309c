"""A model's vocabulary: text to token ids and back. Wraps the Rust `tokenizers` library.

No text and no id from a client makes the library panic: text that cannot be encoded is an `InvalidRequest`,
and an unknown id decodes to nothing. Independent of chats, streams and limits.
"""

from collections.abc import Collection, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from fairlead.base.errors import InvalidRequest, LoadFailed
from fairlead.language.checkpoint.checkpoint import TOKENIZER, open_checkpoint
from fairlead.language.text.added_tokens import add_tokens
from fairlead.language.text.breaking import control_tokens, with_breaks
from fairlead.language.text.control_tokens import BREAK
from fairlead.language.text.files import read_special_tokens
from fairlead.language.text.token_pieces import TokenPieces, TokenText

# The encoding of a text takes a few hundred bytes of memory per token. Up to this many bytes of text for each
# token that a prompt may have, counting the tokens first is not worth the time.
UNCOUNTED_BYTES_PER_TOKEN = 4
PIECE_CHARS = 32 * 1024
# An upper bound of the tokens that splitting a text adds at one place.
TOKENS_PER_CUT = 32
BATCH_DECODE_IDS = 256  # from this many ids on, decoding releases the GIL


class Tokenizer:
    """Converts text to ids and back, with one vocabulary. Safe to use from several threads.

    `vocab_size`: the highest id + 1. `special_ids`: ids of special tokens, which are not text. `byte_ids`:
    ids of one byte each ("<0x0A>"), for characters that the vocabulary lacks. `byte_level`: every token is a
    string of bytes. `pieces`: the texts of its tokens; None if its decoder is of an unknown kind.
    `longest_token_chars`: no token covers more characters of text than this.

    `control_tokens`: spellings and ids of the tokens that only a template may write. `named` are those that
    have a role in tokenizer_config.json, such as the end of sequence.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        decoder_kinds: frozenset[str],
        named: Collection[str] = (),
    ) -> None:
        # Truncation and padding that were saved with the tokenizer were for its training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token_chars: int = max(map(len, vocabulary), default=0)
        added: dict[int, tokenizers.AddedToken] = tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.control_tokens: dict[str, int] = control_tokens(tokenizer, named)
        self._with_breaks = with_breaks(tokenizer, self.control_tokens)
        # A token that is matched in normalized text may have spellings into which no breaks were put.
        self._always_with_breaks = any(
            token.normalized and token.content in self.control_tokens for token in added.values()
        )
        self.byte_level: bool = "ByteLevel" in decoder_kinds <= {"ByteLevel", "Fuse", "Sequence"}
        self._bytes_by_fallback_id = _fallback_bytes(vocabulary) if "ByteFallback" in decoder_kinds else {}
        self.byte_ids: frozenset[int] = frozenset(self._bytes_by_fallback_id)
        self._anchor = next(filter(self._is_plain, range(self.vocab_size)), None)
        self._bytes_by_id: dict[int, bytes] = {}  # filled on first use
        self.pieces: TokenPieces | None = TokenPieces.of(tokenizer)
        self._piece_by_id: dict[int, TokenText | int] = {}  # filled on first use

    @classmethod
    def load(cls, model: Path) -> "Tokenizer":
        """Read the tokenizer.json of a checkpoint, and add the tokens that only its other files have.

        Raises `LoadFailed`, which names the missing or invalid file.
        """
        checkpoint = open_checkpoint(model)
        path = checkpoint.document(TOKENIZER)
        named = read_special_tokens(checkpoint).values()
        try:
            content = path.read_bytes()
            declared = msgspec.json.decode(content, type=_Declared)
            library = tokenizers.Tokenizer.from_buffer(content)
            add_tokens(checkpoint, library)
            # The library raises nothing narrower than Exception.
            return cls(
                library,
                decoder_kinds=frozenset(_kinds(declared.decoder)),
                named=tuple(named),
            )
        except FileNotFoundError:
            raise LoadFailed(f"{path} is missing") from None
        except LoadFailed:
            raise
        except Exception as error:
            raise LoadFailed(f"{path} is broken: {error}") from error

    def encode(
        self,
        text: str,
        *,
        second: str | None = None,
        add_special_tokens: bool = True,
        with_breaks: bool = False,
        param: str | None = None,
    ) -> list[int]:
        """Return the text's ids, or those of the pair of texts with the `second` one.

        text: the text.
        second: the second text of a pair; None: there is none.
        add_special_tokens: whether those that the tokenizer defines are added, such as a beginning of
            sequence.
        with_breaks: a spelling of a special token with a `BREAK` in it is text, and the break is removed. Any
            other spelling becomes that token, as in transformers: completion prompts rely on it.
        param: the request's field with the text, for errors.

        Raises `InvalidRequest` if a text cannot be encoded. Encodes a few MB/s without the GIL, so a long
        text may be encoded in a worker thread. (Measured with tokenizers 0.23: `encode` holds the GIL all the
        time, `encode_batch_fast` releases it.)
        """
        removes_breaks = with_breaks and (self._always_with_breaks or BREAK in text + (second or ""))
        tokenizer = self._with_breaks if removes_breaks else self._tokenizer
        try:
            given = text if second is None else (text, second)
            (encoding,) = tokenizer.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        except TypeError:
            raise InvalidRequest(
                "the text is not Unicode: it has half of a surrogate pair", param=param
            ) from None
        except Exception as error:  # the library raises nothing narrower
            raise InvalidRequest(f"the text cannot be tokenized: {error}", param=param) from error
        ids: list[int] = encoding.ids
        return ids

    def beginning(self) -> list[int]:
        """Return the special tokens that every text begins with, such as a beginning of sequence."""
        return self.frame()[0]

    def frame(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that every text begins with, and those that it ends with."""
        ids, text = self.encode("a"), self.encode("a", add_special_tokens=False)
        if not text:
            return [], []
        first = ids.index(text[0])
        return ids[:first], ids[first + len(text) :]

    def token_ends(self, text: str) -> list[int]:
        """Return where in a text, in characters, each of its tokens ends."""
        try:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        except Exception:  # noqa: BLE001  # `encode` reports the error
            return []
        return [end for _, end in encoding.offsets]

    def encode_continuation(
        self, text: str, *, with_breaks: bool = False, param: str | None = None
    ) -> list[int]:
        """Return the ids of a text in the middle of another, without special tokens.

        Some tokenizers add a space to the beginning of every text. So the text is encoded after a line break,
        which these join with nothing.
        """

        def encode(text: str) -> list[int]:
            return self.encode(text, add_special_tokens=False, with_breaks=with_breaks, param=param)

        line_break = encode("\n")
        if len(line_break) > 1:
            ids = encode("\n" + text)
            if ids[: len(line_break)] == line_break:
                return ids[len(line_break) :]
        return encode(text)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the ids' text. Unknown ids are skipped; bytes that are not UTF-8 become U+FFFD."""
        size = self.vocab_size
        known = [token_id for token_id in ids if 0 <= token_id < size]
        text: str
        if len(known) < BATCH_DECODE_IDS:
            text = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        else:  # as in `encode`, only the batch method releases the GIL
            (text,) = self._tokenizer.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def has_token(self, token_id: int) -> bool:
        """Return whether there is a token with this id."""
        return self.spelling(token_id) is not None

    def spelling(self, token_id: int) -> str | None:
        """Return how the vocabulary spells a token; None if there is none with this id."""
        found: str | None = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return found

    def token(self, token_id: int) -> str:
        """Return the token's text within a longer text (a leading space is kept); "" if unknown."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of the token in a text, perhaps only part of a character; b"" if unknown."""
        if (found := self._bytes_by_id.get(token_id)) is None:
            if (token := self.spelling(token_id)) is None:
                return b""  # not cached: clients can send any number of unknown ids
            found = self._bytes_by_id[token_id] = self._compute_bytes(token_id, token)
        return found

    def piece(self, token_id: int) -> TokenText | int | None:
        """Return the token's text or byte as `pieces` has it, which must not be None; None if unknown."""
        if (found := self._piece_by_id.get(token_id)) is None:
            if (token := self.spelling(token_id)) is None:
                return None  # not cached: clients can send any number of unknown ids
            assert self.pieces is not None
            found = self._piece_by_id[token_id] = self.pieces.read(token)
        return found

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with exactly this spelling in the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def may_fit(self, text: str, max_tokens: int) -> bool:
        """Return whether a text may have at most `max_tokens` tokens, without encoding it as a whole.

        A text that may be too long is encoded in pieces, and the tokens are counted until there are too many.
        Wrongly False only if a normalizer discards most of a text, such as a megabyte of spaces.
        """
        if len(text) > max_tokens * self.longest_token_chars:
            return False
        most_bytes = len(text) if text.isascii() else 4 * len(text)
        if most_bytes <= UNCOUNTED_BYTES_PER_TOKEN * max_tokens:
            return True
        tokens = 0
        for begin in range(0, len(text), PIECE_CHARS):
            try:
                (encoding,) = self._tokenizer.encode_batch_fast(
                    [text[begin : begin + PIECE_CHARS]], add_special_tokens=False
                )
            except Exception:  # noqa: BLE001  # `encode` reports the error
                return True
            tokens += max(0, len(encoding) - TOKENS_PER_CUT)
            if tokens > max_tokens:
                return False
        return True

    def _compute_bytes(self, token_id: int, token: str) -> bytes:
        if self.byte_level:
            return _spelled_bytes(token)
        if (byte := self._bytes_by_fallback_id.get(token_id)) is not None:
            return byte
        if token_id in self.special_ids or self._anchor is None:
            return token.encode()
        # Decoders treat the first token of a text differently, so it is decoded as the second.
        first = self.decode([self._anchor])
        return self.decode([self._anchor, token_id])[len(first) :].encode()

    def _is_plain(self, token_id: int) -> bool:
        return token_id not in self.byte_ids and self.decode([token_id]).isalnum()


class _Declared(msgspec.Struct):
    """The field of tokenizer.json that is read here, besides by the library."""

    decoder: dict[str, Any] | None = None


def _kinds(decoder: dict[str, Any] | None) -> Iterable[str]:
    """Yield the type of a decoder and those of the decoders in it."""
    if decoder is not None:
        yield decoder["type"]
        for inner in decoder.get("decoders", ()):
            yield from _kinds(inner)


def _fallback_bytes(vocabulary: dict[str, int]) -> dict[int, bytes]:
    spellings = ((f"<0x{byte:02{case}}>", bytes([byte])) for byte in range(256) for case in "Xx")
    return {vocabulary[token]: byte for token, byte in spellings if token in vocabulary}


def _byte_level_alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes: visible Latin-1 as itself, the rest from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = count(0x100)
    return {chr(byte if byte in visible else next(stand_ins)): byte for byte in range(256)}


_ALPHABET = _byte_level_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """Return a byte-level token's bytes. A token with a character outside the alphabet is plain text."""
    try:
        return bytes([_ALPHABET[letter] for letter in token])
    except KeyError:
        return token.encode()
