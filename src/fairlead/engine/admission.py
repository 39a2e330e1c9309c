"""Decides whether a sequence may begin now, by the most memory that all that run will hold at once.

Reserving `max_tokens` for everyone leaves most of the cache empty, and reserving nothing recomputes a fifth
of all tokens; a guess of what each still has to say comes near to knowing it. Pure arithmetic over arrays.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

FILL = 0.97
REMEMBERED = 1000
# As if these had been seen, until there is something to go by: any length between is as likely as another.
PRIOR = (16, 32, 64, 128, 256, 512, 1024, 2048)

# The quantile that guesses use, and how far one regret moves it.
BOLDEST, MOST_CAREFUL, STEP = 0.35, 0.6, 0.02
REGRETS = 0.025


class Predictor(Protocol):
    """Says how many more tokens sequences will generate. What it says is used only to admit others."""

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:
        """For each of them, by what it has generated so far and how many more it may: a number 0…limit."""

    def learn(self, length: int) -> None:
        """Hear how many tokens a sequence had generated when it was complete."""

    def regret(self) -> None:
        """Hear that memory ran out: a sequence was preempted because others said more than was guessed."""


class PastLengths:
    """A quantile of past outputs, among those that were longer than what the sequence has said already.

    It begins with the median. Each regret makes it more careful and each complete output a little bolder, so
    that, within bounds, about `REGRETS` in a sequence are what it comes to, whatever the lengths are like.
    """

    def __init__(self) -> None:
        self._quantile = 0.5
        self._lengths = np.zeros(REMEMBERED, np.int64)
        self._lengths[: len(PRIOR)] = PRIOR
        self._learned = len(PRIOR)
        self._sorted: Counts | None = None

    def remaining(self, keys: Counts, outputs: Counts, limits: Counts) -> Counts:  # noqa: ARG002  anyone's
        lengths = self._in_order()
        longer = np.searchsorted(lengths, outputs, side="right")
        place = longer + ((len(lengths) - longer) * self._quantile).astype(np.int64)
        likely = lengths[np.minimum(place, len(lengths) - 1)]
        # One that has said more than any before: as much again as half of it.
        guess = np.where(longer < len(lengths), likely - outputs, np.maximum(16, outputs // 2))
        return np.minimum(guess, limits)

    def learn(self, length: int) -> None:
        self._lengths[self._learned % REMEMBERED] = length
        self._learned += 1
        self._sorted = None
        self._quantile = max(BOLDEST, self._quantile - REGRETS * STEP)

    def regret(self) -> None:
        self._quantile = min(MOST_CAREFUL, self._quantile + STEP)

    def _in_order(self) -> Counts:
        if self._sorted is None:
            self._sorted = np.sort(self._lengths[: min(self._learned, REMEMBERED)])
        return self._sorted


class Peak:
    """The most tokens that some sequences hold at once, if each gains one a step and ends as predicted.

    Rows are (remaining, current), those that stay longest first. When the i-th of them ends, i are left,
    each of them longer by what it has gained until then: remaining_i · i + Σ current up to i. The peak is the
    largest of these. What one more row would make of it takes a look-up, not another pass.
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
        """The peak if this row were there too."""
        place = self._place(remaining)
        alone = remaining * (place + 1) + int(self._sums[place]) + current
        return max(int(self._highest_before[place]), alone, int(self._highest_behind[place]) + current)

    def add(self, remaining: int, current: int) -> None:
        place = self._place(remaining)
        self._remaining = np.insert(self._remaining, place, remaining)
        self._current = np.insert(self._current, place, current)
        self._arrange()

    def _place(self, remaining: int) -> int:
        """How many rows stay at least as long."""
        return len(self._remaining) - int(np.searchsorted(self._remaining[::-1], remaining, side="left"))

    def _arrange(self) -> None:
        rows = len(self._remaining)
        self._sums = np.zeros(rows + 1, np.int64)  # of `current` before each place
        np.cumsum(self._current, out=self._sums[1:])
        heights = self._remaining * np.arange(1, rows + 1) + self._sums[1:]
        self._highest_before = np.zeros(rows + 1, np.int64)
        np.maximum.accumulate(heights, out=self._highest_before[1:])
        # A row in front makes each of those behind it one more to be counted.
        self._highest_behind = np.zeros(rows + 1, np.int64)
        moved = heights + self._remaining
        self._highest_behind[:rows] = np.maximum.accumulate(moved[::-1])[::-1]


class Admission:
    """The rule: whoever comes may enter while the predicted peak is at most `FILL` of every group's cache.

    `capacities` are in tokens, by group; `ceilings` the most tokens one sequence holds there at once, None
    in a group that keeps everything. Where there is a ceiling, all are taken to reach theirs at the same
    time: what has slid out is gone, but what is in sight stays for as long as the sequence does.
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
        self._peak: Peak | None = None
        self._reached: list[int] = []
        self._shared = 0

    def fits_whole(self, tokens: int) -> bool:
        """Whether sequences of so many tokens in all, counted at their longest, can never be too many."""
        return tokens <= min([capacity for capacity, _ in self._sliding] + [self._capacity or tokens])

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
        """Look at what runs now: tokens so far, of them output, and how many more are allowed.

        Those in `reserved` were promised all they are allowed. `shared` tokens of `current` lie in blocks
        that somebody else holds too.
        """
        remaining = self.predictor.remaining(keys, outputs, limits)
        if reserved is not None:
            remaining = np.where(reserved, limits, remaining)
        self._peak = Peak(remaining, current)
        self._shared = shared
        self._reached = [int(np.minimum(current + remaining, ceiling).sum()) for _, ceiling in self._sliding]

    def admit(self, key: int, current: int, output: int, limit: int) -> bool:
        """Whether one more may run beside what `begin` saw and what was admitted since.

        From then on it counts as running: whoever cannot let it in after all must `begin` again.
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
