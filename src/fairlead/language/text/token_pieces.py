"""The text of each token of a vocabulary, as its decoder makes it: a table in place of the Rust library.

A decoder is a list of steps over a list of tokens. All that a step does to a token depends on whether this is
the first or the last one, except that bytes in a row become characters (`ByteFallback`), and that a blank is
removed from the beginning of the whole text (`Strip` after `Fuse`). A decoder with any other step is unknown.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import tokenizers

Step = Callable[[str, bool, bool], str]
"""Takes a token, whether it is the first one, and whether it is the last one; returns its text."""

_BYTE = re.compile("<0x[+0-9A-Fa-f][0-9A-Fa-f]>")  # the library accepts a sign, too

# What WordPiece's decoder writes for what its tokenizer has put apart.
_CLEANED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)


class TokenText(NamedTuple):
    """A token's text: the first of all or a `later` one, and whether another follows or it is the `last`."""

    first: str
    first_last: str
    later: str
    later_last: str

    def at(self, is_first: bool, is_last: bool) -> str:
        """Return the text of the token at this place."""
        return self[2 * (not is_first) + is_last]


class TokenPieces:
    """The texts of tokens by their spellings.

    before: the steps up to the conversion of bytes.
    has_bytes: whether tokens such as `<0x0A>` are bytes.
    after: the steps after that conversion, which change tokens and characters made of bytes.
    cut: the character that is removed from the beginning of a text, and how often.
    """

    def __init__(
        self, before: list[Step], *, has_bytes: bool, after: list[Step], cut: tuple[str, int] = ("", 0)
    ) -> None:
        self.cut = cut
        self._before = before
        self._has_bytes = has_bytes
        self._after = after

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> Self | None:
        """Return the pieces of a tokenizer; None if its decoder has an unknown step."""
        decoder = tokenizer.decoder
        if decoder is None:
            return cls([_join], has_bytes=False, after=[])
        before: list[Step] = []
        after: list[Step] = []
        has_bytes = is_one = False
        cut = "", 0
        for declared in _flatten(json.loads(decoder.__getstate__())):
            kind = declared["type"]
            if kind == "Fuse":
                is_one = True
            elif is_one:
                if kind != "Strip" or declared["stop"] or cut[1]:
                    return None
                cut = declared["content"], declared["start"]
            elif kind == "ByteFallback":
                if has_bytes:
                    return None
                has_bytes = True
            elif (step := _read_step(declared)) is None:
                return None
            else:
                (after if has_bytes else before).append(step)
        return cls(before, has_bytes=has_bytes, after=after, cut=cut)

    def read(self, spelling: str) -> TokenText | int:
        """Return the text of the token with this spelling, or its byte."""
        made = _each_place(lambda first, last: _apply(self._before, spelling, first, last))
        if self._has_bytes and (byte := read_byte(made.later)) is not None:
            return byte
        return self._finish(made)

    def characters(self, run: bytes) -> list[TokenText]:
        """Return the texts of bytes in a row: a single one, or one for each byte if they are no UTF-8."""
        try:
            texts = [run.decode()]
        except UnicodeDecodeError:
            texts = ["\N{REPLACEMENT CHARACTER}"] * len(run)
        return [self._finish(TokenText(text, text, text, text)) for text in texts]

    def _finish(self, text: TokenText) -> TokenText:
        if not self._after:
            return text
        return _each_place(lambda first, last: _apply(self._after, text.at(first, last), first, last))


def read_byte(spelling: str) -> int | None:
    """Return the byte that a token such as `<0x0A>` stands for; None if it is another token."""
    return int(spelling[3:5], 16) if _BYTE.fullmatch(spelling) else None


def _each_place(make: Callable[[bool, bool], str]) -> TokenText:
    return TokenText(make(True, False), make(True, True), make(False, False), make(False, True))


def _apply(steps: list[Step], text: str, is_first: bool, is_last: bool) -> str:
    for step in steps:
        text = step(text, is_first, is_last)
    return text


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _read_step(declared: dict[str, Any]) -> Step | None:
    """Return a step that changes each token for itself; None if it is not known."""
    match declared:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return lambda text, _first, _last: text.replace(old, new)
        case {"type": "Strip", "content": str(letter), "start": int(start), "stop": 0}:
            return lambda text, _first, _last: cut_beginning(text, letter, start)
        case {"type": "Metaspace", "replacement": str(blank), "prepend_scheme": str(scheme)}:
            keeps = scheme == "never"
            return lambda text, first, _last: text.replace(blank, "" if first and not keeps else " ")
        case {"type": "BPEDecoder", "suffix": str(suffix)} if suffix:
            return lambda text, _first, last: text.replace(suffix, "" if last else " ")
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleans)}:
            return lambda text, first, _last: _word_piece(text, prefix, is_first=first, cleans=cleans)
    return None


def cut_beginning(text: str, letter: str, most: int) -> str:
    """Return the text without this character at its beginning, up to `most` times."""
    return text[min(most, len(text) - len(text.lstrip(letter))) :]


def _word_piece(text: str, prefix: str, *, is_first: bool, cleans: bool) -> str:
    if not is_first:
        text = text.removeprefix(prefix) if text.startswith(prefix) else " " + text
    for apart, joined in _CLEANED if cleans else ():
        text = text.replace(apart, joined)
    return text


def _join(text: str, is_first: bool, _is_last: bool) -> str:
    return text if is_first else " " + text
