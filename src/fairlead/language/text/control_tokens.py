"""Prevents control tokens in clients' text: `<|im_end|>` in a message stays text.

Control tokens separate the messages of a chat. A tokenizer finds them by their spelling, anywhere in a text.
So a client that spells one could end its own message and begin a system message.

A spelling counts only where the chat template has written all of it, one character after the other. A
rendered text knows that (`template_text`). Each other spelling gets a `BREAK` inside, so that the tokenizer
does not find the control token. Then the tokenizer removes the break and encodes the text as usual, also
across the ends of the client's text. Whether a client wrote a spelling, or its parts met in the template,
does not matter.

Independent of templates and vocabularies.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile

from fairlead.language.text.template_text import foreign_spans

# Two Anatolian hieroglyphs that form no word.
BREAK = "\U00014646\U00014400"

# A search blocks other threads, so long texts are searched in pieces.
_PIECE_CHARS = 16_384


class ControlTokens:
    """The control tokens of one model, each of two characters or more.

    `literals`, the strings in its chat template, are not used any more: a rendered text knows them.
    """

    def __init__(self, tokens: Iterable[str], literals: Iterable[str] = ()) -> None:  # noqa: ARG002
        tokens = {*tokens, BREAK}  # a client's own break gets a break inside, so that it remains text
        self._longest = max(map(len, tokens))
        self._spellings = re.compile(_spellings(tokens))

    def broken(self, text: str) -> str:
        """Return a text with a break in every control token of which a template has not written all."""
        foreign = foreign_spans(text)
        ends = [end for _, end in foreign]
        positions = [0]
        for begin, end in self._found(text):
            # The spans that end at `begin` or before it are no part of this token.
            index = bisect_right(ends, begin)
            if index < len(foreign):
                # Before a span, the template's own tokens may end. A span that has the first character is
                # broken after it; no token of the template has that character.
                position = max(foreign[index][0], begin + 1)
                if positions[-1] < position < end:
                    positions.append(position)
        return BREAK.join(str.__getitem__(text, slice(*cut)) for cut in pairwise([*positions, len(text)]))

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the longest control token that begins at each position, including overlapping ones."""
        for begin in range(0, len(text), _PIECE_CHARS):
            end = begin + _PIECE_CHARS
            for match in self._spellings.finditer(text, begin, end + self._longest):
                if match.start() < end:
                    yield match.start(), match.end(match.lastindex or 0)


def _spellings(tokens: Iterable[str]) -> str:
    """Return a pattern of the first character of every token; the group that matches is the rest of it."""
    rests: defaultdict[str, set[str]] = defaultdict(set)
    for token in tokens:
        rests[token[0]].add(token[1:])
    return "|".join(f"{re.escape(first)}(?=({_any_of(rest)}))" for first, rest in rests.items())


def _any_of(words: set[str]) -> str:
    """Return a pattern of the longest of these words, as a trie: its time does not grow with their number."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for word in filter(None, words):
        groups[word[0]].append(word)
    branches = []
    for group in groups.values():
        shared = _shared_prefix(min(group), max(group))
        rest = {word.removeprefix(shared) for word in group}
        branches.append(re.escape(shared) + (_any_of(rest) if rest != {""} else ""))
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}"


def _shared_prefix(one: str, other: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in pairs)
