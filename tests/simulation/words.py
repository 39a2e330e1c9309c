"""What every fake model answers: one text for one question, whoever gives it.

A question has a ticket (`q12z`), which a model finds in whatever it is sent. So an answer that belongs to
another question, another model or two nodes at once is seen, and so is a word that is missing or there twice.
"""

import re
from functools import cache
from random import Random

from fairlead.text.tokenizer import Tokenizer

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
    """Return the ticket of this question."""
    return f"q{number}z"


def ticket_in(text: str) -> str:
    """Return the ticket in a text; nothing if it has none."""
    found = _TICKET.search(text)
    return found[0] if found else ""


def pieces_of(tokenizer: Tokenizer, model: str, ticket: str) -> list[int]:
    """Return the tokens of a model's whole answer to a question."""
    return list(_pieces(tokenizer, model, ticket))


@cache
def _pieces(tokenizer: Tokenizer, model: str, ticket: str) -> tuple[int, ...]:
    random = Random(f"{model} {ticket}")
    words = [random.choice(_WORDS) for _ in range(random.randrange(1, MOST_WORDS))]
    text = f"{model} to {ticket}: {' '.join(words)}"
    return tuple(tokenizer.encode(text, add_special_tokens=False, param="prompt"))


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return what tokens say."""
    text: str = tokenizer.decode(token_ids)
    return text
