"""An amount that is shared fairly between holders: bytes of memory, or places in a queue. Pure.

A holder's share is the total divided by the number of holders. A holder may have more as long as no other
needs it. When the holdings exceed the total, the largest holder's newest holding is revoked, and so on until
the rest fits. A holder within its share loses nothing because of another, with one exception. A holding that
is `kept` is not revoked, even if its holder exceeds its share. `spare` makes a holding the last that its
holder loses.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Holding:
    """One request's part of the amount.

    name: Whose it is.
    owner: For the caller's use.
    amount: How much it is.
    kept: It can no longer be revoked.
    gone: It was revoked or released.
    """

    name: str
    owner: Any = None
    amount: int = 0
    kept: bool = False
    gone: bool = False


@dataclass(slots=True)
class _Holder:
    """All holdings of one name. The keys of `revocable` are those not kept; the last is revoked first."""

    amount: int = 0
    holdings: int = 0
    revocable: OrderedDict[Holding, None] = field(default_factory=OrderedDict)


class Shares:
    """A `total` amount of something, held under names."""

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self.taken = 0
        self._holders: dict[str, _Holder] = {}

    @property
    def holders(self) -> int:
        """The number of names with at least one holding."""
        return len(self._holders)

    def enter(self, name: str, owner: Any = None) -> Holding:
        """Return a new, empty holding. It ends with `leave`, or when it is revoked."""
        holding = Holding(name, owner)
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = _Holder()
        holder.holdings += 1
        holder.revocable[holding] = None
        return holding

    def grow(self, holding: Holding, amount: int) -> list[Holding]:
        """Add to a holding that is not kept. Return the holdings revoked for it, which may include itself."""
        if holding.gone:
            return []
        assert not holding.kept
        holding.amount += amount
        self._holders[holding.name].amount += amount
        self.taken += amount
        revoked: list[Holding] = []
        while self.taken > self.total:
            last = self._last_of_largest() or holding
            self.leave(last)
            revoked.append(last)
        return revoked

    def shrink(self, holding: Holding, amount: int) -> None:
        """Release a part of a holding, if it is not gone."""
        if not holding.gone:
            assert 0 <= amount <= holding.amount
            holding.amount -= amount
            self._holders[holding.name].amount -= amount
            self.taken -= amount

    def spare(self, holding: Holding) -> None:
        """Revoke this holding after all others of its holder, until one of these is spared."""
        if not (holding.gone or holding.kept):
            self._holders[holding.name].revocable.move_to_end(holding, last=False)

    def keep(self, holding: Holding) -> None:
        """Make a holding irrevocable."""
        if not holding.gone:
            holding.kept = True
            self._holders[holding.name].revocable.pop(holding, None)

    def leave(self, holding: Holding) -> None:
        """Release all of a holding, if it is not gone."""
        if holding.gone:
            return
        holding.gone = True
        holder = self._holders[holding.name]
        holder.revocable.pop(holding, None)
        holder.amount -= holding.amount
        holder.holdings -= 1
        self.taken -= holding.amount
        if not holder.holdings:
            del self._holders[holding.name]

    def _last_of_largest(self) -> Holding | None:
        """Return the newest revocable holding of the largest holder that is above its share, if any."""
        losing = [holder for holder in self._holders.values() if holder.revocable]
        largest = max(losing, key=lambda holder: holder.amount, default=None)
        if largest is None or largest.amount * len(self._holders) <= self.total:
            return None
        return next(reversed(largest.revocable))
