"""How far a command's load is, read from what its server prints."""

import math
import re
from collections.abc import Callable


def fraction_reader(pattern: str) -> Callable[[str], float | None]:
    """Return a function that finds the last match in a text and returns how far that says the load is, 0 to
    1.

    A pattern with one group matches a percentage, one with two groups how much is done and of how much. The
    function returns None where nothing matches, and where what matches is no number.
    """
    compiled = re.compile(pattern)

    def read(text: str) -> float | None:
        last = None
        for last in compiled.finditer(text):  # noqa: B007
            pass
        return None if last is None else _fraction(*last.groups())

    return read


def _fraction(done: str | None, total: str | None = "100") -> float | None:
    try:
        fraction = float(done or "") / float(total or "")
    except (ValueError, ZeroDivisionError):
        return None
    return min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else None
