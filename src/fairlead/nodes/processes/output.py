"""The last lines that a model's processes have printed, kept in memory across restarts.

Bounded by `LINES_KEPT` lines and by `CHARACTERS_KEPT` of text. Lines are numbered from 0. So a reader that
follows the output can request the lines after its last one, and finds out how many were dropped before.
"""

from collections import deque
from collections.abc import Sequence

LINES_KEPT = 1000
CHARACTERS_KEPT = 256 * 1024


class ProcessOutput:
    """Lines as they were printed, control characters included."""

    def __init__(self) -> None:
        self.end = 0  # the number of the next line
        self._lines: deque[str] = deque()
        self._size = 0

    @property
    def begin(self) -> int:
        """The number of the oldest line kept."""
        return self.end - len(self._lines)

    def add(self, line: str) -> None:
        """Keep a line, and drop the oldest ones above the bounds. Never blocks."""
        self._lines.append(line)
        self._size += len(line)
        self.end += 1
        while len(self._lines) > LINES_KEPT or self._size > CHARACTERS_KEPT:
            self._size -= len(self._lines.popleft())

    def since(self, number: int) -> Sequence[str]:
        """Return the lines that are still kept, from this number on."""
        skipped = max(0, number - self.begin)
        return list(self._lines)[skipped:]
