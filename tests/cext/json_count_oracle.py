"""`jsoncount.count` in plain Python: a regular expression splits the text into tokens, which are counted."""

import re
from typing import NamedTuple

FRACTION = 4
NAME_SHOWN = 64

# Only a string at the end of the text may be unterminated.
_TOKEN = re.compile(
    rb'[ \t\n\r]+|(?P<sign>[][{},:])|(?P<literal>[^][{},:" \t\n\r]+)'
    rb'|(?P<string>"(?P<text>(?:[^"\\]|\\.)*)(?P<end>"|\\?\Z))',
    re.DOTALL,
)


class Counts(NamedTuple):
    """The result of `count`; see `jsoncount.Counts`."""

    values: int
    apart: tuple[int, ...]
    largest: bytes
    invalid_at: int


def count(body, apart=()):  # noqa: C901  # a branch for each kind of token
    """Return what `jsoncount.count` returns."""
    values, depth = 0, 0
    numbers = dict.fromkeys(apart, 0)
    members = []  # (name, number of values before its own)
    before, key = "", b""
    for token in _TOKEN.finditer(body):
        if token["string"] is not None:
            values += 1
            before, key = "string", token["text"] + (b"\\" if token["end"].startswith(b"\\") else b"")
        elif (literal := token["literal"]) is not None:
            is_number = literal[:1] in b"-0123456789"
            if is_number and before != ":" and members and members[-1][0] in numbers:
                numbers[members[-1][0]] += 1
            elif is_number and set(literal) & set(b".eE"):
                values += FRACTION
            else:
                values += 1
            before = "literal"
        elif (sign := token["sign"]) is not None:
            if sign in b"[{":
                values += 1
                depth += 1
            elif sign in b"]}":
                depth = max(0, depth - 1)
            elif sign == b":" and before == "string":
                values -= 1
                if depth == 1:
                    members.append((key, values))
            before = sign.decode()
    ends = [own for _, own in members[1:]] + [values]
    sizes = [(end - own, name) for (name, own), end in zip(members, ends, strict=False)]
    largest = max(sizes, key=lambda found: found[0])[1] if sizes else b""
    return Counts(values, tuple(numbers[name] for name in apart), largest[:NAME_SHOWN], _invalid_at(body))


def _invalid_at(body):
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return -1
