"""The progress of a command's load, read from what its server prints."""

import math
import re
from collections.abc import Callable


def fraction_reader(pattern: str) -> Callable[[str], float | None]:
    """Return a function that finds a load's progress in a text, 0 to 1, by the last match of the pattern.

    A pattern with one group matches a percentage, one with two groups the amount done and the total. The
    function returns None if nothing matches, or if a match is not a number.
    """
    compiled = re.compile(pattern)

    def read(text: str) -> float | None:
        matches = list(compiled.finditer(text))
        return _fraction(*matches[-1].groups()) if matches else None

    return read


def _fraction(done: str | None, total: str | None = "100") -> float | None:
    try:
        fraction = float(done or "") / float(total or "")
    except (ValueError, ZeroDivisionError):
        return None
    return min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else None
