"""Token ids to text, as they come. Promises that the pieces add up to what decoding all ids at once gives.

Text is handed out when no later token can change it. That holds back an unfinished character, and with
vocabularies that fall back to single bytes a whole run of them: the library turns *every* byte of a run with
a fault in it into U+FFFD. (Its own `DecodeStream` gives out text too early there or raises, and takes
quadratic time over bytes that never become a character.) Knows no stop strings and no sequences.
"""

import codecs
from collections.abc import Sequence

from fairlead.text.tokenizer import Tokenizer

# Tokens that show nothing, or (with a decoder of a make we do not know) a fault at the end that may yet
# become a character, are decoded again with those to come, but not for ever.
_WINDOW_TOKENS = 16


class Detokenizer:
    """Turns one sequence's ids into text, a few microseconds a token however long the sequence is.

    `context`: ids the text goes on from (a prompt), so that a first " word" keeps its blank with decoders
    that take it from the beginning of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _Bytes | _Window = (
            _Bytes(tokenizer, skipped) if tokenizer.byte_level else _Window(tokenizer, skipped, context)
        )

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is certain now. Unknown ids are no text."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """End the text; return what was held back. Nothing may be pushed after it."""
        return self._stream.flush()


class _Bytes:
    """Byte-level vocabularies: tokens are bytes, their text is UTF-8, and nothing else matters."""

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


class _Window:
    """Any other vocabulary: decode the new tokens behind the last one told, and tell what that adds.

    Decoders look at a token's neighbours (the first of a text loses its blank, words are joined), never
    further; so the last token whose text is out is context enough. `_run`: byte tokens whose run may go on.
    """

    __slots__ = ("_run", "_skipped", "_tokenizer", "_told_chars", "_window")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._run: list[int] = []
        self._window = next(
            (
                [token_id]
                for token_id in reversed(context)
                if token_id not in tokenizer.byte_ids and self._shows(token_id)
            ),
            [],
        )
        self._told_chars = len(self._decoded())

    def push(self, ids: Sequence[int]) -> str:
        byte_ids, before = self._tokenizer.byte_ids, len(self._window)
        for token_id in filter(self._shows, ids):
            if token_id in byte_ids:
                self._run.append(token_id)
            else:
                self._end_run()
                self._window.append(token_id)
        return self._tell() if len(self._window) > before else ""

    def flush(self) -> str:
        self._end_run()
        return self._decoded()[self._told_chars :]

    def _tell(self) -> str:
        text = self._decoded()
        news = text[self._told_chars :]
        undecided = not news or news.endswith("\N{REPLACEMENT CHARACTER}")
        if undecided and len(self._window) <= _WINDOW_TOKENS:
            return ""
        del self._window[:-1]
        self._told_chars = len(self._decoded())
        return news

    def _end_run(self) -> None:
        self._window += self._run
        self._run.clear()

    def _shows(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.knows(token_id)

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
