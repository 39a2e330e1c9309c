"""Owns the times at which sequences are out of time. Asked with the time; knows no clock."""

import heapq
from collections.abc import Container, Iterator

_SOME = 64


class Deadlines:
    """A heap. Those of sequences that ended earlier stay in it for a while, but are never most of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # (seconds, key)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: int, deadline_s: float) -> None:
        heapq.heappush(self._heap, (deadline_s, key))

    def passed(self, now_s: float) -> Iterator[int]:
        """Take out the keys whose time is over, those of ended sequences among them."""
        while self._heap and self._heap[0][0] < now_s:
            yield heapq.heappop(self._heap)[1]

    def forget_all_but(self, keys: Container[int], number: int) -> None:
        """Drop the deadlines of others, if most are; `number` of them are alive."""
        if len(self._heap) > 2 * number + _SOME:
            self._heap = [entry for entry in self._heap if entry[1] in keys]
            heapq.heapify(self._heap)
