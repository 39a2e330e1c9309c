"""Notices that a child has stopped making progress. Knows no process and no frame.

A child that was asked something owes an answer, and one that has sequences owes the next step. Time counts
only in ticks that this program was awake for: after it was stopped itself, or the machine was asleep, the
child has its whole time again.
"""

import trio

TICKS = 10


class Watchdog:
    """Patience of `bound_s` seconds with each answer, and of twice that with the first.

    The first step after a model was loaded may do once what later ones need not: warm up, compile, capture.
    """

    def __init__(self, bound_s: float) -> None:
        self.bound_s = bound_s
        self._signs = 0
        self._owed = False
        self._answered = False

    def asked(self) -> None:
        """Something was sent that is to be answered."""
        if not self._owed:
            self._owed = True
            self._signs += 1  # patience begins now

    def answered(self, *, more: bool) -> None:
        """A sign of life came; with `more`, the next one is owed already."""
        self._signs += 1
        self._owed = more
        self._answered = True

    async def stuck(self) -> float:
        """Wait until an answer is overdue; return after how many seconds it was given up."""
        seen, silent_ticks, patience = self._signs, 0, TICKS
        while silent_ticks < patience:
            await trio.sleep(self.bound_s / TICKS)
            if self._owed and self._signs == seen:
                silent_ticks += 1
            else:
                seen, silent_ticks = self._signs, 0
            patience = TICKS if self._answered else 2 * TICKS
        return patience * self.bound_s / TICKS
