"""The weights of the lines that wait for a model, summed up: shares take no time in proportion to the lines.

A *line* is a tenant's place in the queue, and a *unit* is what has a part of the whole: a team, or a tenant
without one. The lines of a team divide its part. Pure.
"""

from collections import Counter


class LineWeights:
    """The lines that wait for one model.

    entries: by line, how many entries wait.
    whole: the weight of all units together.
    """

    __slots__ = ("_members", "_units", "entries", "whole")

    def __init__(self) -> None:
        self.entries: Counter[str] = Counter()
        self.whole = 0.0
        self._members: dict[str, float] = {}  # by unit: the weight of its lines together
        self._units: dict[str, float] = {}  # by unit: its weight in `whole`

    def add(self, line: str, weight: float, unit: str, unit_weight: float) -> None:
        """Count an entry of a line."""
        self.entries[line] += 1
        if self.entries[line] > 1:
            return
        self._members[unit] = self._members.get(unit, 0.0) + weight
        if unit not in self._units:
            self._units[unit] = unit_weight
            self.whole += unit_weight

    def remove(self, line: str, weight: float, unit: str) -> None:
        """Count an entry that has left."""
        self.entries[line] -= 1
        if self.entries[line]:
            return
        del self.entries[line]
        self._members[unit] -= weight
        if self._members[unit] < weight / 2:  # the last one; a sum of floats may not be exactly 0
            del self._members[unit]
            self.whole -= self._units.pop(unit)

    def reweigh(self, unit: str, unit_weight: float) -> None:
        """Change the weight of a unit, if it waits."""
        if unit in self._units:
            self.whole += unit_weight - self._units[unit]
            self._units[unit] = unit_weight

    def has(self, unit: str) -> bool:
        """Return whether lines of a unit wait."""
        return unit in self._units

    def members(self, unit: str) -> float:
        """Return the weight of a unit's lines that wait."""
        return self._members.get(unit, 0.0)
