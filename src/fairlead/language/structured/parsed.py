"""What the parsers of calls return."""

import json
from collections.abc import Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """What was read of a call: its name, with the first of them, and more of its arguments."""

    name: str | None = None
    arguments: str = ""


class Parsed(NamedTuple):
    """What a text has of calls, and the text after the content; None if the content goes on.

    `is_faulty`: `rest` begins with what no call can have there.
    """

    calls: Sequence[Call] = ()
    rest: str | None = None
    is_faulty: bool = False


def escaped(text: str) -> str:
    """Return a text as it is within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
