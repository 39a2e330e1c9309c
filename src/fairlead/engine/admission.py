"""Decides whether a sequence may start now, by the predicted peak memory of all running sequences.

Reserving `max_tokens` for each leaves most of the cache empty, and reserving nothing recomputes a fifth of
all tokens. Predictions of the remaining output of each are almost as good as the true lengths. Pure
arithmetic over arrays.
"""

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

FILL = 0.97
REMEMBERED = 1000
# Lengths assumed to have been seen at the start, evenly spread over the orders of magnitude.
PRIOR = (16, 32, 64, 128, 256, 512, 1024, 2048)

# Bounds of the quantile that predictions use, and how far one preemption moves it.
LOWEST_QUANTILE, HIGHEST_QUANTILE, STEP = 0.35, 0.6, 0.02
PREEMPTIONS_PER_SEQUENCE = 0.025


class Predictor(Protocol):
    """Predicts how many more tokens sequences will generate. Predictions are used only for admission."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:
        """Return a number 0…limit for each, from its output so far and how many more tokens are allowed."""

    def learn(self, length: int) -> None:
        """Record how many tokens a completed sequence has generated."""

    def on_preemption(self) -> None:
        """Record a preemption: memory ran out because outputs were longer than predicted."""


class PastLengths:
    """A quantile of past output lengths, among those longer than the sequence's output so far.

    It begins with the median. Each preemption raises the quantile, each complete output lowers it a little.
    Within its bounds it leads to about `PREEMPTIONS_PER_SEQUENCE`, whatever the lengths are.
    """

    def __init__(self) -> None:
        self._quantile = 0.5
        self._lengths = deque(PRIOR, maxlen=REMEMBERED)
        self._sorted: Counts | None = None

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:  # noqa: ARG002  the same for all keys
        lengths = self._in_order()
        longer = np.searchsorted(lengths, outputs, side="right")
        position = longer + ((len(lengths) - longer) * self._quantile).astype(np.int64)
        likely = lengths[np.minimum(position, len(lengths) - 1)]
        # An output longer than any before: half as much again, at least 16.
        guess = np.where(longer < len(lengths), likely - outputs, np.maximum(16, outputs // 2))
        return np.minimum(guess, limits)

    def learn(self, length: int) -> None:
        self._lengths.append(length)
        self._sorted = None
        if self._quantile > LOWEST_QUANTILE:
            self._quantile = max(LOWEST_QUANTILE, self._quantile - PREEMPTIONS_PER_SEQUENCE * STEP)

    def on_preemption(self) -> None:
        self._quantile = min(HIGHEST_QUANTILE, self._quantile + STEP)

    def _in_order(self) -> Counts:
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._lengths, np.int64))
        return self._sorted


class Peak:
    """The most tokens that some sequences hold at once, if each gains one per step and ends as predicted.

    Rows are (remaining, current), the largest `remaining` first. When the i-th row ends, i rows are left,
    each longer by remaining_i: they hold remaining_i · i + Σ current up to i. The peak is the largest of
    these sums. `with_row` takes a look-up, not another pass.
    """

    def __init__(self, remaining: Counts, current: Counts) -> None:
        order = np.argsort(-remaining, kind="stable")
        self._remaining = remaining[order]
        self._current = current[order]
        self._arrange()

    @property
    def tokens(self) -> int:
        return int(self._highest_before[-1])

    def with_row(self, remaining: int, current: int) -> int:
        """Return the peak if this row were added."""
        position = self._position(remaining)
        alone = remaining * (position + 1) + int(self._sums[position]) + current
        return max(int(self._highest_before[position]), alone, int(self._highest_behind[position]) + current)

    def add(self, remaining: int, current: int) -> None:
        position = self._position(remaining)
        self._remaining = np.insert(self._remaining, position, remaining)
        self._current = np.insert(self._current, position, current)
        self._arrange()

    def _position(self, remaining: int) -> int:
        """Return how many rows have at least this `remaining`."""
        return len(self._remaining) - int(np.searchsorted(self._remaining[::-1], remaining, side="left"))

    def _arrange(self) -> None:
        rows = len(self._remaining)
        self._sums = np.zeros(rows + 1, np.int64)  # of `current` before each index
        np.cumsum(self._current, out=self._sums[1:])
        heights = self._remaining * np.arange(1, rows + 1) + self._sums[1:]
        self._highest_before = np.zeros(rows + 1, np.int64)
        np.maximum.accumulate(heights, out=self._highest_before[1:])
        # A row inserted in front adds one to the row count of each row behind it.
        self._highest_behind = np.zeros(rows + 1, np.int64)
        moved = heights + self._remaining
        self._highest_behind[:rows] = np.maximum.accumulate(moved[::-1])[::-1]


class SequenceAdmission:
    """The rule: admit sequences while the predicted peak is at most `FILL` of every group's cache.

    `capacities` are in tokens, by group. `ceilings`: the most tokens that one sequence holds there at once,
    None in a group without a window. Where there is a ceiling, all sequences are assumed to reach theirs at
    the same time: blocks that slid out are free, but those in the window stay as long as the sequence runs.
    """

    def __init__(
        self, capacities: list[int], ceilings: list[int | None], predictor: Predictor | None = None
    ) -> None:
        self.predictor: Predictor = predictor if predictor is not None else PastLengths()
        full = [tokens for tokens, ceiling in zip(capacities, ceilings, strict=True) if ceiling is None]
        self._capacity = int(FILL * min(full)) if full else None
        self._sliding = [
            (int(FILL * tokens), ceiling)
            for tokens, ceiling in zip(capacities, ceilings, strict=True)
            if ceiling is not None
        ]
        self._smallest = int(FILL * min(capacities))
        self._peak: Peak | None = None
        self._reached: list[int] = []
        self._shared = 0

    def always_fits(self, tokens: int) -> bool:
        """Return whether sequences with `tokens` tokens in all, at their longest, always fit."""
        return tokens <= self._smallest

    def begin(
        self,
        keys: Counts,
        current: Counts,
        outputs: Counts,
        limits: Counts,
        *,
        reserved: npt.NDArray[np.bool_] | None = None,
        shared: int = 0,
    ) -> None:
        """Record what runs now: tokens so far, how many of them are output, and how many more are allowed.

        For rows in `reserved`, all allowed tokens are reserved. `shared` tokens of `current` are in blocks
        that are counted for another sequence too.
        """
        remaining = self.predictor.remaining(keys, outputs, limits)
        if reserved is not None:
            remaining = np.where(reserved, limits, remaining)
        self._peak = Peak(remaining, current)
        self._shared = shared
        self._reached = [int(np.minimum(current + remaining, ceiling).sum()) for _, ceiling in self._sliding]

    def admit(self, key: int, current: int, output: int, limit: int) -> bool:
        """Return whether one more may run beside those of `begin` and those admitted since.

        If so, it counts as running from then on. A caller that cannot start it must call `begin` again.
        """
        assert self._peak is not None
        row = (np.array([number], np.int64) for number in (key, output, limit))
        remaining = int(self.predictor.remaining(*row)[0])
        peak = self._peak.with_row(remaining, current) - self._shared
        if self._capacity is not None and peak > self._capacity:
            return False
        reached = [
            before + min(current + remaining, ceiling)
            for before, (_, ceiling) in zip(self._reached, self._sliding, strict=True)
        ]
        if any(tokens > capacity for tokens, (capacity, _) in zip(reached, self._sliding, strict=True)):
            return False
        self._peak.add(remaining, current)
        self._reached = reached
        return True
