"""Ends an answer that nears its limit of tokens, where the rest of it fits.

While few tokens are left, a copy of the matcher writes a short rest, byte by byte: it closes what is open,
and writes only what is required. When that rest needs nearly all remaining tokens, only its tokens are
allowed. So an answer is cut in the middle only if no such rest is found, or if one
token makes the rest longer by more than `MARGIN`.

    {"name": "Ada", "tags": ["a", "b     with 12 tokens left:  "]}
"""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

HORIZON = 256
"""The tokens before the limit in which a rest is looked for, and the longest rest."""
MARGIN = 8
"""Tokens to spare: what is still possible is not looked for at each token."""
SEARCH_S = 0.05
"""CPU time of looking for a rest once. An answer for which it takes longer is not closed."""

_WORD_BITS = 32
_TEXT = 60
"""A place where more bytes than this are possible is within a text."""
_BLANKS = frozenset(b" \t\r\n")
# What is written where no text is: what closes comes first, and what may be repeated without end comes last.
_ORDER = b'}]":0123456789,ntf-['


class Closing:
    """Closes one answer of at most `most_tokens` tokens. `byte_ids`: the token of each byte; None: none."""

    def __init__(self, most_tokens: int, byte_ids: Sequence[int | None]) -> None:
        self._most_tokens = most_tokens
        self._byte_ids = byte_ids
        self._look_at = min(HORIZON, most_tokens)  # tokens left when a rest is looked for again
        self._is_slow = False
        self._rest: list[int] = []
        self._begun_at = 0

    def narrow(self, matcher: LLMatcher, consumed: int, mask: np.ndarray) -> None:
        """Leave only the next token of the rest in a mask, if it is time for that.

        `consumed`: how many tokens the matcher has consumed.
        """
        left = self._most_tokens - consumed
        if not self._rest:
            if left > self._look_at or self._is_slow:
                return
            rest = self._find(matcher, mask, min(left - 1, HORIZON))
            spare = MARGIN if rest is None else left - 1 - len(rest) - MARGIN
            if rest is None or spare > 0:
                self._look_at = left - max(1, spare // 2)
                return
            self._rest, self._begun_at = rest, consumed
        at = consumed - self._begun_at
        if at < len(self._rest) and _has(mask, self._rest[at]):
            mask[:] = 0
            mask[self._rest[at] // _WORD_BITS] = 1 << self._rest[at] % _WORD_BITS

    def _find(self, matcher: LLMatcher, mask: np.ndarray, most: int) -> list[int] | None:
        """Return the tokens of a rest; None if none is found, or the answer may end here."""
        copy, bits = matcher.deep_copy(), np.zeros_like(mask)
        rest: list[int] = []
        if copy.is_accepting():
            return None
        began_s = time.thread_time()
        while len(rest) < most:
            if time.thread_time() - began_s > SEARCH_S:
                self._is_slow = True
                return None
            copy.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            token = None if copy.is_error() else self._next(bits)
            if token is None or not copy.consume_token(token):
                return None
            rest.append(token)
            if copy.is_accepting():
                return rest
        return None

    def _next(self, bits: np.ndarray) -> int | None:
        """Return the token that leads to the end."""
        possible = {
            byte: token
            for byte, token in enumerate(self._byte_ids)
            if token is not None and _has(bits, token)
        }
        if len(possible) > _TEXT:
            return possible.get(ord('"'), possible.get(ord("a"), min(possible.values())))
        for byte in _ORDER:
            if byte in possible:
                return possible[byte]
        if possible:
            return min(
                possible.items(), key=lambda item: (item[0] in _BLANKS, item[0] == ord("\\"), item[0])
            )[1]
        words = np.flatnonzero(bits)
        if not len(words):
            return None
        word = int(bits[words[0]])  # a token that is no text
        return int(words[0]) * _WORD_BITS + (word & -word).bit_length() - 1


def byte_ids(vocabulary: LLTokenizer) -> list[int | None]:
    """Return the tokens of single bytes."""
    found = [vocabulary.tokenize_bytes(bytes([byte])) for byte in range(256)]
    return [tokens[0] if len(tokens) == 1 else None for tokens in found]


def _has(mask: np.ndarray, token: int) -> bool:
    return token // _WORD_BITS < len(mask) and bool(int(mask[token // _WORD_BITS]) >> token % _WORD_BITS & 1)
