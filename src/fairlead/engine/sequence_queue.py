"""The sequences that wait for a slot and for blocks: first come, first served within a class."""

from collections import OrderedDict

from fairlead.engine.sequence import Sequence


class SequenceQueue:
    """A queue for each class. Class 0 is served first."""

    def __init__(self) -> None:
        # By class, the highest first, then by key; none is empty.
        self._classes: dict[int, OrderedDict[int, Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def head(self) -> Sequence | None:
        """Return the first sequence of the highest class."""
        for queued in self._classes.values():
            return next(iter(queued.values()))
        return None

    def append(self, sequence: Sequence) -> None:
        """Put a sequence behind those of its class."""
        queued = self._classes.get(sequence.priority)
        if queued is None:
            queued = self._classes[sequence.priority] = OrderedDict()
            self._classes = dict(sorted(self._classes.items()))
        queued[sequence.key] = sequence

    def prepend(self, sequence: Sequence) -> None:
        """Put a sequence in front of those of its class."""
        self.append(sequence)
        self._classes[sequence.priority].move_to_end(sequence.key, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Remove a queued sequence."""
        queued = self._classes[sequence.priority]
        del queued[sequence.key]
        if not queued:
            del self._classes[sequence.priority]
