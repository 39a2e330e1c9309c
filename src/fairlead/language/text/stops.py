"""Finds stop strings in text that arrives in pieces. Independent of tokens.

The result does not depend on the boundaries of the pieces. The stop string that is complete first is used; of
two that are complete at the same character, the longer. Text from its beginning on is never returned.
"""

import re
from collections.abc import Sequence


class StopStrings:
    """Searches for any of `stops`; empty ones are ignored. Holds back less text than the longest."""

    __slots__ = ("_beginnings", "_pending", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(filter(None, stops))
        self._beginnings = re.compile("|".join({re.escape(stop[0]) for stop in self._stops}))
        self._pending = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what is safe to send, and the stop string that was found, if any.

        After a match, all text before it has been returned, and the text after it is discarded.
        """
        if not self._stops:
            return text, None
        if not self._pending and not self._beginnings.search(text):
            return text, None  # the usual case
        text = self._pending + text
        if (hit := self._first_hit(text)) is not None:
            start, stop = hit
            self._pending = ""
            return text[:start], stop
        safe = self._safe_chars(text)
        self._pending = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """End the text; return what was held back, which is not part of a stop string."""
        pending, self._pending = self._pending, ""
        return pending

    def _first_hit(self, text: str) -> tuple[int, str] | None:
        """Return the start of the stop string that is complete first, and the string."""
        hits = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(hits)[1:] if hits else None

    def _safe_chars(self, text: str) -> int:
        """Return the number of characters before the earliest possible beginning of a stop string."""
        safe = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), safe)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, safe)
            if start >= 0:
                safe = start
        return safe
