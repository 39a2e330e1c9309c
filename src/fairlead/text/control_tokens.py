"""Prevents control tokens in clients' text: `<|im_end|>` in a message stays text.

Control tokens separate the messages of a chat. A tokenizer finds them by their spelling, anywhere in a text.
So a client that spells one could end its own message and begin a system message.

A `BREAK` is inserted after the first character of a spelling, so that the tokenizer does not find the control
token. Then the tokenizer removes the break and encodes the text as usual, also across the ends of the
client's text. A template gets the client's text with breaks only in spellings of control tokens.

A control token could also be assembled from parts: from two texts that a template writes next to each
other, or from a template's `<|` and a client's `im_end|>`. So there is also a break after a text that ends
with the beginning of a spelling, and before a text that completes what the template began. A template that
deletes from the middle of a text could still join two parts of a spelling; no such template is known.

Independent of templates and vocabularies.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile
from typing import Any

import msgspec

# Two Anatolian hieroglyphs that form no word. They are letters without case: no filter of a template changes
# them, and `repr` does not escape them.
BREAK = "\U00014646\U00014400"

# Values that templates compare with, by key. They get no breaks: a client can only choose one of these.
_FIXED = {
    "role": frozenset({"system", "developer", "user", "assistant", "tool"}),
    "type": frozenset(
        {"text", "function", "object", "array", "string", "number", "integer", "boolean", "null"}
    ),
}
# In JSON: possible white space, escaped or not, and the end of the piece that is searched.
_BLANKS = rb"(?:\s|\\(?:u[0-9a-f]{4}|[^u])|[\x80-\xff])*"
_CUT = rb"(?:\\(?:u[0-9a-f]{0,3})?)?\Z"
# A search blocks other threads, so long texts are searched in pieces.
_PIECE_CHARS = 16_384
# In bytes: more than a role, or two characters with their escapes.
_OVERLAP = 64


class ControlTokens:
    """The control tokens of one model, each of two characters or more.

    `literals` are the strings in its chat template.
    """

    def __init__(self, tokens: Iterable[str], literals: Iterable[str] = ()) -> None:
        tokens = {*tokens, BREAK}  # a client's own break gets a break inside, so that it remains text
        self._longest = max(map(len, tokens))
        self._prefixes = frozenset(token[:length] for token in tokens for length in range(1, len(token)))
        self._first = re.compile("|".join({re.escape(token[0]) for token in tokens}))
        begun = {beginning for literal in literals for beginning in self._endings(literal)}
        self._rests = tuple(
            {
                token.removeprefix(beginning)
                for beginning in begun
                for token in tokens
                if token.startswith(beginning)
            }
        )
        self._begin = re.compile(_beginnings(tokens))
        # Two patterns: usually each has a single first character, which is searched for much faster.
        patterns = filter(None, (_beginnings_in_json(tokens), _rests_in_json(self._rests)))
        self._suspicious = tuple(map(re.compile, patterns))

    def may_be_in(self, value: Any) -> bool:
        """Return whether any text in `value`, a JSON value, may need a break.

        May be true although none does, but rarely is. Takes a small fraction of the time of rendering.
        """
        try:
            written = msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):  # such as a lone surrogate
            return True
        return any(
            pattern.search(written, begin, begin + _PIECE_CHARS + _OVERLAP)
            for begin in range(0, len(written), _PIECE_CHARS)
            for pattern in self._suspicious
        )

    def broken(self, value: Any) -> Any:
        """Return `value` with a break in every text that spells a control token, or may become part of one.

        Raises `RecursionError` for a value that is nested too deeply.
        """
        match value:
            case str():
                return self._broken_text(value)
            case list() | tuple():
                return [self.broken(item) for item in value]
            case dict():
                return {
                    self.broken(key): item if _is_fixed(key, item) else self.broken(item)
                    for key, item in value.items()
                }
            case _:
                return value

    def _broken_text(self, text: str) -> str:
        positions = [position + 1 for position in self._found(text)]
        lead = text.lstrip()
        if lead and self._rests:
            trimmed = lead.rstrip()
            if any(lead.startswith(rest) or rest.startswith(trimmed) for rest in self._rests):
                positions.insert(0, len(text) - len(lead))
        stripped = text.rstrip()
        if next(self._endings(stripped), None) is not None:
            positions.append(len(stripped))
        if not positions:
            return text
        bounds = [0, *positions, len(text)]
        return BREAK.join(text[begin:end] for begin, end in pairwise(bounds))

    def _found(self, text: str) -> Iterator[int]:
        """Yield the positions where control tokens begin, including overlapping ones."""
        for begin in range(0, len(text), _PIECE_CHARS):
            end = begin + _PIECE_CHARS
            for match in self._begin.finditer(text, begin, end + self._longest):
                if match.start() < end:
                    yield match.start()

    def _endings(self, text: str) -> Iterator[str]:
        """Yield the endings of `text` that are a beginning of a control token, but not all of it."""
        for match in self._first.finditer(text, max(0, len(text) - self._longest)):
            if (ending := text[match.start() :]) in self._prefixes:
                yield ending


def _is_fixed(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and value in _FIXED.get(key, ())


def _beginnings_in_json(tokens: Iterable[str]) -> bytes:
    """Return a pattern of the beginnings of tokens in JSON: two characters, or one at a text's end."""
    heads = [re.escape(_in_json(head)) for head in {token[:2] for token in tokens}]
    firsts = [re.escape(_in_json(token[0])) + b'%b(?:"|%b)' % (_BLANKS, _CUT) for token in tokens]
    return b"|".join({*heads, *firsts})


def _rests_in_json(rests: Iterable[str]) -> bytes:
    """Return a pattern of texts in JSON that begin with a token's rest, or consist of it. Skips roles."""
    roles = b"|".join(role.encode() for role in _FIXED["role"])
    found = _beginnings_in_json(rests)
    return b'"(?:(?<!"role":")|(?!(?:%b)"))%b(?:%b|%b)' % (roles, _BLANKS, found, _CUT) if found else b""


def _in_json(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def _beginnings(tokens: Iterable[str]) -> str:
    """Return a pattern that matches the first character of every token, including overlapping ones."""
    rests: defaultdict[str, set[str]] = defaultdict(set)
    for token in tokens:
        rests[token[0]].add(token[1:])
    return "|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items())


def _any_of(words: set[str]) -> str:
    """Return a pattern of these words as a trie: its time does not grow with their number."""
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
