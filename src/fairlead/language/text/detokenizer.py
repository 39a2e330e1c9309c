"""Decodes token ids incrementally. The pieces together are the text of all ids decoded at once.

Text is returned as soon as no later token can change it. An incomplete character is held back. If the
vocabulary has tokens of single bytes, a whole run of them is held back: the library replaces *every* byte of
an invalid run by U+FFFD. (Its own `DecodeStream` returns text too early there or raises, and takes quadratic
time for bytes that never become a character.) Calls the library once for each token of a vocabulary, when it
is first generated, and never again, except for vocabularies with an unknown kind of decoder. Independent of
stop strings and sequences.
"""

import codecs
from collections.abc import Sequence

from fairlead.language.text.token_pieces import TokenPieces, TokenText, cut_beginning
from fairlead.language.text.tokenizer import Tokenizer

# Tokens without text, or (with an unknown kind of decoder) with an error at the end that may still become a
# character, are decoded again with later tokens, up to this number.
_WINDOW_TOKENS = 16


class Detokenizer:
    """Decodes one sequence's ids, in a few microseconds per token, however long the sequence is.

    `context`: the ids that the text continues (a prompt), so that a first " word" keeps its space with
    decoders that remove it at the beginning of a text. `shown_ids`: special tokens that are text here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._stream: _Bytes | _Pieces | _Window
        if tokenizer.byte_level:
            self._stream = _Bytes(tokenizer, skipped)
        elif tokenizer.pieces is not None:
            self._stream = _Pieces(tokenizer, tokenizer.pieces, skipped, context)
        else:
            self._stream = _Window(tokenizer, skipped, context)

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is final now. Unknown ids are skipped."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """End the text; return what was held back. `push` may not be called afterwards."""
        return self._stream.flush()


class _Bytes:
    """Decodes byte-level vocabularies: tokens are bytes of UTF-8, independent of each other."""

    __slots__ = ("_skipped", "_token_bytes", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        token_bytes, skipped = self._token_bytes, self._skipped
        return self._utf8.decode(
            b"".join([token_bytes(token_id) for token_id in ids if token_id not in skipped])
        )

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Pieces:
    """Decodes with a `TokenPieces`: joins the texts of the tokens.

    `_run`: the last tokens that are bytes. `_rest`, `_last_rest`: what the last token adds to the text if
    another follows, and if none does.
    """

    __slots__ = ("_cuts", "_is_first", "_last_rest", "_piece", "_pieces", "_rest", "_run", "_skipped")

    def __init__(
        self, tokenizer: Tokenizer, pieces: TokenPieces, skipped: frozenset[int], context: Sequence[int]
    ) -> None:
        self._pieces = pieces
        self._piece = tokenizer.piece
        self._skipped = skipped
        self._run = bytearray()
        self._is_first = True
        self._cuts = pieces.cut[1]
        self._rest = self._last_rest = ""
        for token_id in reversed(context):
            if token_id not in skipped and isinstance(tokenizer.piece(token_id), TokenText):
                self.push((token_id,))
                break

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token_id in ids:
            if token_id in self._skipped or (piece := self._piece(token_id)) is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
            else:
                text += self._end_run() + self._add(piece)
        return text

    def flush(self) -> str:
        return self._end_run() + self._cut(self._last_rest)

    def _end_run(self) -> str:
        if not self._run:
            return ""
        texts = self._pieces.characters(bytes(self._run))
        self._run.clear()
        return "".join(map(self._add, texts))

    def _add(self, piece: TokenText) -> str:
        """Add a token; return the text that does not depend on the next one."""
        known, is_first = self._rest, self._is_first
        self._is_first = False
        inner, last = piece.at(is_first, False), piece.at(is_first, True)
        if inner.startswith(last):
            known, self._rest, self._last_rest = known + last, inner[len(last) :], ""
        else:
            self._rest, self._last_rest = inner, last
        return self._cut(known)

    def _cut(self, text: str) -> str:
        """Remove what is left to remove from the beginning of the whole text."""
        if not self._cuts or not text:
            return text
        left = cut_beginning(text, self._pieces.cut[0], self._cuts)
        self._cuts = 0 if left else self._cuts - len(text)
        return left


class _Window:
    """Decodes any other vocabulary by the library: new tokens together with the last returned one.

    One token of context is enough, because a decoder's output for a token depends only on its neighbors: the
    first token of a text loses its space, and words are joined. `_run`: the last byte tokens.
    """

    __slots__ = ("_returned_chars", "_run", "_skipped", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._run: list[int] = []
        self._window = next(
            (
                [token_id]
                for token_id in reversed(context)
                if token_id not in tokenizer.byte_ids and self._is_shown(token_id)
            ),
            [],
        )
        self._returned_chars = len(self._decoded())

    def push(self, ids: Sequence[int]) -> str:
        byte_ids, before = self._tokenizer.byte_ids, len(self._window)
        for token_id in filter(self._is_shown, ids):
            if token_id in byte_ids:
                self._run.append(token_id)
            else:
                self._end_run()
                self._window.append(token_id)
        return self._emit_new_text() if len(self._window) > before else ""

    def flush(self) -> str:
        self._end_run()
        return self._decoded()[self._returned_chars :]

    def _emit_new_text(self) -> str:
        text = self._decoded()
        added = text[self._returned_chars :]
        undecided = not added or added.endswith("\N{REPLACEMENT CHARACTER}")
        if undecided and len(self._window) <= _WINDOW_TOKENS:
            return ""
        del self._window[:-1]
        self._returned_chars = len(self._decoded())
        return added

    def _end_run(self) -> None:
        self._window += self._run
        self._run.clear()

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.has_token(token_id)

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
