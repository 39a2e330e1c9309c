"""How a text is cut that is too long for a model."""

from typing import Literal, NamedTuple

Side = Literal["left", "right"]

# A text is encoded up to this many tokens beyond the cut, so that those before it are as in the whole text.
_MARGIN = 64
_CHARS_PER_TOKEN = 8


class Truncation(NamedTuple):
    """A prompt is cut to `tokens`, None: to as many as the model takes, at its beginning or end.

    `side`: the end that is cut.
    """

    tokens: int | None
    side: Side

    def cut(self, ids: list[int], tokens: int) -> list[int]:
        """Return at most so many ids."""
        if len(ids) <= tokens:
            return ids
        return ids[:tokens] if self.side == "right" else ids[len(ids) - tokens :]

    def part(self, text: str, chars: int) -> str:
        """Return at most so many characters."""
        if len(text) <= chars:
            return text
        return text[:chars] if self.side == "right" else text[len(text) - chars :]


def chars_for(tokens: int) -> int:
    """Return how many characters to encode first, to get this many tokens."""
    return _CHARS_PER_TOKEN * (tokens + _MARGIN)


def is_enough(found: int, tokens: int) -> bool:
    """Return whether a part of a text with `found` tokens determines `tokens` at the end that is kept."""
    return found >= tokens + _MARGIN
