"""A sliding window of values, with quantiles. Pure."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque


class SlidingWindow:
    """The last `kept` values, also kept in order of size, so that quantiles need no sorting."""

    def __init__(self, *, kept: int) -> None:
        self._kept = kept
        self._by_age: deque[float] = deque()
        self._by_size: list[float] = []

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, value: float) -> None:
        """Add a value, and remove the oldest one if there are too many."""
        if len(self._by_age) == self._kept:
            oldest = self._by_age.popleft()
            del self._by_size[bisect_left(self._by_size, oldest)]
        self._by_age.append(value)
        insort(self._by_size, value)

    def quantile(self, share: float) -> float:
        """Return what the next value will not exceed with probability `share`, if it is like these.

        That is the ⌈share · (n + 1)⌉-th smallest of n: the plain sample quantile is too optimistic for small
        n. The window must not be empty.
        """
        rank = math.ceil(share * (len(self._by_size) + 1))
        return self._by_size[min(rank, len(self._by_size)) - 1]

    def median_above(self, value: float) -> float | None:
        """Return the median of the values greater than `value`; None if there are none."""
        first = bisect_right(self._by_size, value)
        if first == len(self._by_size):
            return None
        middle = first + len(self._by_size) - 1
        return (self._by_size[middle // 2] + self._by_size[(middle + 1) // 2]) / 2
