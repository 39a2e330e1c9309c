"""The texts that fake models generate.

A prompt contains a ticket (`q12z`). The text depends only on the model's name and the ticket, whichever node
generates it. So a test detects an answer to another prompt, of another model, or mixed from two answers, and
one with a gap or a repetition.
"""

import re
from functools import cache
from random import Random

from fairlead.language.text.tokenizer import Tokenizer

_TICKET = re.compile(r"q[0-9]+z")
_WORDS = (
    "fair",
    "turn",
    "seat",
    "queue",
    "line",
    "node",
    "model",
    "step",
    "wait",
    "time",
    "and",
    "the",
    "of",
)
MOST_WORDS = 8


def ticket(number: int) -> str:
    """Return the ticket of this number."""
    return f"q{number}z"


def ticket_in(text: str) -> str:
    """Return the ticket in a text; empty if there is none."""
    found = _TICKET.search(text)
    return found[0] if found else ""


def pieces_of(tokenizer: Tokenizer, model: str, ticket: str) -> list[int]:
    """Return the tokens of a model's complete answer."""
    return list(_pieces(tokenizer, model, ticket))


@cache
def _pieces(tokenizer: Tokenizer, model: str, ticket: str) -> tuple[int, ...]:
    random = Random(f"{model} {ticket}")
    words = [random.choice(_WORDS) for _ in range(random.randrange(1, MOST_WORDS))]
    text = f"{model} to {ticket}: {' '.join(words)}"
    return tuple(tokenizer.encode(text, add_special_tokens=False, param="prompt"))


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return the text of tokens."""
    text: str = tokenizer.decode(token_ids)
    return text
