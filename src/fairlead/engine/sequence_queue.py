"""The sequences that wait for a slot and for blocks: first come, first served within a class.

Sequences that had a slot before, and were preempted or suspended, go before new ones of their class.
"""

from collections import OrderedDict

from fairlead.engine.sequence import Sequence


class SequenceQueue:
    """Two queues for each class: of returning and of new sequences. Class 0 is served first."""

    def __init__(self) -> None:
        # By class, the highest first, returning ones before new ones, then by key; none is empty.
        self._classes: dict[tuple[int, bool], OrderedDict[int, Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def head(self) -> Sequence | None:
        """Return the first sequence of the highest class."""
        for queued in self._classes.values():
            return next(iter(queued.values()))
        return None

    def append(self, sequence: Sequence, *, returns: bool = False) -> None:
        """Put a sequence behind those of its class; one that `returns` goes before the new ones."""
        queued = self._classes.get((sequence.priority, not returns))
        if queued is None:
            queued = self._classes[sequence.priority, not returns] = OrderedDict()
            self._classes = dict(sorted(self._classes.items()))
        queued[sequence.key] = sequence

    def prepend(self, sequence: Sequence) -> None:
        """Put a returning sequence in front of those of its class."""
        self.append(sequence, returns=True)
        self._classes[sequence.priority, False].move_to_end(sequence.key, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Remove a queued sequence."""
        for part in ((sequence.priority, False), (sequence.priority, True)):
            queued = self._classes.get(part)
            if queued is not None and queued.pop(sequence.key, None) is not None:
                if not queued:
                    del self._classes[part]
                return
        raise KeyError(sequence.key)
