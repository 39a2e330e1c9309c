"""A pause that doubles with each failure, up to a bound. Pure: waiting is elsewhere."""


class Backoff:
    """The pauses after failures in a row.

    first_s: the first pause, in seconds.
    longest_s: the longest one.

        Backoff(0.5, 3) → 0.5, 1, 2, 3, 3, … and 0.5 again after `reset`
    """

    __slots__ = ("_first_s", "_longest_s", "pause_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.pause_s = first_s

    def grow(self) -> None:
        """Double the pause."""
        self.pause_s = min(2 * self.pause_s, self._longest_s)

    def take(self) -> float:
        """Return the pause of this failure; the next one is twice as long."""
        pause_s = self.pause_s
        self.grow()
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self.pause_s = self._first_s
