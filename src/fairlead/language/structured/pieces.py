"""What an answer consists of: pieces of reasoning, of text, and of tool calls, in their order."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class Content(NamedTuple):
    """Text of the answer itself."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of a call of the function `name`; calls are counted from 0."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """A piece of a call's arguments, which are JSON text together."""

    number: int
    text: str


Piece = Reasoning | Content | CallBegin | CallArguments
