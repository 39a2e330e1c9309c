"""The deadlines of sequences. The caller passes the time in; this module reads no clock."""

import heapq
from collections.abc import Container, Iterator

_SOME = 64


class Deadlines:
    """A heap. Entries of ended sequences are not removed at once; `forget_all_but` bounds their number."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # (seconds, key)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def earliest_s(self) -> float | None:
        """The earliest deadline, which may be of a sequence that has ended; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def add(self, key: int, deadline_s: float) -> None:
        heapq.heappush(self._heap, (deadline_s, key))

    def passed(self, now_s: float) -> Iterator[int]:
        """Remove and yield the keys with a passed deadline, including those of ended sequences."""
        while self._heap and self._heap[0][0] < now_s:
            yield heapq.heappop(self._heap)[1]

    def forget_all_but(self, keys: Container[int], number: int) -> None:
        """Drop entries of other keys if most entries are stale; `number` sequences are live."""
        if len(self._heap) > 2 * number + _SOME:
            self._heap = [entry for entry in self._heap if entry[1] in keys]
            heapq.heapify(self._heap)
