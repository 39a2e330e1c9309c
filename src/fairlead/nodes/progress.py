"""How far a command's load is, read from what its server prints."""

import math
import re
from collections.abc import Callable


def fraction_reader(pattern: str) -> Callable[[str], float | None]:
    """Return a function that finds in a text how far a load is, 0 to 1, by the last match of the pattern.

    A pattern with one group matches a percentage, one with two groups how much is done and of how much. The
    function returns None where nothing matches, and where what matches is no number.
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
