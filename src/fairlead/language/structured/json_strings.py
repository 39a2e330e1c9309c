"""Regular expressions over the JSON writing of strings, for texts that a regular expression describes.

A character of a JSON string has several writings: `ü` is also `\\u00fc`. A mask that lets `\\u00` begin must
let `fc` follow, or the model's text is changed into another one. So an expression allows all writings of all
of its characters, or, where each is printable ASCII, only the plain ones: then no `\\` may begin.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_SHORT = {'"': '"', "\\": "\\\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_MUST_ESCAPE = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_PLAIN_ASCII = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E))

Ranges = tuple[tuple[int, int], ...]
"""Characters as ranges of code points, in order, that neither touch nor overlap."""
ALL: Ranges = ((0, 0xD7FF), (0xE000, _LAST))

CHARACTER = (
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
"""Any character of a JSON string in any writing. Half a surrogate pair is no character."""


def ranges(parts: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges of all of these, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(_without(merged, [_SURROGATES]))


def complement(one: Ranges) -> Ranges:
    """Return all other characters."""
    return tuple(_without(ALL, one))


def common(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Ranges:
    """Return the characters in both."""
    return ranges(
        (max(low, first), min(high, last))
        for low, high in one
        for first, last in other
        if max(low, first) <= min(high, last)
    )


def is_plain(one: Ranges) -> bool:
    """Return whether all characters are printable ASCII that needs no escape."""
    return not _without(one, _PLAIN_ASCII)


@lru_cache(maxsize=4096)
def written(one: Ranges, *, plain: bool) -> str:
    """Return what matches one of these characters. `plain`: only as it is, without an escape."""
    if one == ALL and not plain:
        return CHARACTER
    raw = _without(one, _MUST_ESCAPE)
    ways = [_class(raw)] if raw else []
    if not plain:
        short = "".join(
            name for character, name in _SHORT.items() if common(one, [(ord(character), ord(character))])
        )
        ways += [rf"\\[{short}]"] if short else []
        units = list(_units(one))
        ways += [rf"\\u{units[0]}" if len(units) == 1 else rf"\\u(?:{'|'.join(units)})"] if units else []
    if not ways:
        return r"[^\x00-\x{10ffff}]"
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def literal(text: str, *, plain: bool) -> str:
    """Return what matches the writings of a text between its quotation marks."""
    return "".join(written(ranges([(ord(one), ord(one))]), plain=plain) for one in text)


def _without(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    left = list(one)
    for first, last in other:
        left = [
            part
            for low, high in left
            for part in ((low, min(high, first - 1)), (max(low, last + 1), high))
            if part[0] <= part[1]
        ]
    return left


def _class(parts: Sequence[tuple[int, int]]) -> str:
    if len(parts) == 1 and parts[0][0] == parts[0][1]:
        return _class_character(parts[0][0])
    return f"[{''.join(map(_class_range, parts))}]"


def _class_range(part: tuple[int, int]) -> str:
    low, high = part
    return f"{_class_character(low)}-{_class_character(high)}" if high > low else _class_character(low)


def _class_character(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _units(one: Ranges) -> Iterator[str]:
    """Yield what matches the four digits behind `\\u`, and for the other planes the second half too."""
    for low, high in common(one, [(0, 0xFFFF)]):
        yield from _hexadecimal(low, high, 4)
    for low, high in common(one, [(0x10000, _LAST)]):
        first, last = low - 0x10000, high - 0x10000
        for lead, (begin, end) in _pairs(first, last):
            leads = "|".join(_hexadecimal(0xD800 + lead[0], 0xD800 + lead[1], 4))
            trails = "|".join(_hexadecimal(0xDC00 + begin, 0xDC00 + end, 4))
            yield rf"(?:{leads})\\u(?:{trails})"


def _pairs(first: int, last: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield ranges of leading and trailing surrogates, each below 0x400, that make up a range."""
    lead, end = first >> 10, last >> 10
    if lead == end:
        yield (lead, lead), (first & 0x3FF, last & 0x3FF)
        return
    if first & 0x3FF:
        yield (lead, lead), (first & 0x3FF, 0x3FF)
        lead += 1
    if last & 0x3FF != 0x3FF:
        yield (end, end), (0, last & 0x3FF)
        end -= 1
    if lead <= end:
        yield (lead, end), (0, 0x3FF)


def _hexadecimal(low: int, high: int, digits: int) -> Iterator[str]:
    """Yield what matches the numbers of a range, written with so many hexadecimal digits."""
    if digits == 0:
        yield ""
        return
    size = 16 ** (digits - 1)
    first, last = low // size, high // size
    if low % size == 0 and high % size == size - 1:
        yield _digits(first, last) + (f"[0-9a-fA-F]{{{digits - 1}}}" if digits > 1 else "")
        return
    if first == last:
        yield from (
            f"{_digits(first, first)}{rest}" for rest in _hexadecimal(low % size, high % size, digits - 1)
        )
        return
    if low % size:
        yield from _hexadecimal(low, (first + 1) * size - 1, digits)
        low = (first + 1) * size
    if high % size != size - 1:
        yield from _hexadecimal(last * size, high, digits)
        high = last * size - 1
    if low <= high:
        yield from _hexadecimal(low, high, digits)


def _digits(first: int, last: int) -> str:
    """Return the digits of a range, in both cases, for a character class."""
    forms = "".join(sorted({form for one in range(first, last + 1) for form in (f"{one:x}", f"{one:X}")}))
    return forms if len(forms) == 1 else f"[{forms}]"
