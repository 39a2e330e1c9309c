"""The grants that a child's open sequences hold, and the highest epoch that it has seen. Pure."""

from fairlead.base.grant import FIRST_GRANT, Grant


class Grants:
    """Counts the sequences of each grant. A grant is forgotten when its last sequence ends.

    A dispatcher that is not the leader any more may still grant, and two dispatchers may grant the same seat.
    So a grant of a lower epoch is refused, and so is one that another holder uses. A job that runs may go on:
    its holder may use its grant again, although a higher epoch has been seen since.

    `first` is the first grant that can be for this run of the engine. Earlier ones of its epoch were given
    for another run, and the dispatcher does not count their seats any more.
    """

    def __init__(self, first: Grant = FIRST_GRANT) -> None:
        self._first = first
        self._epoch = first.epoch
        self._holders: dict[Grant, int] = {}
        self._sequences: dict[Grant, int] = {}

    def __len__(self) -> int:
        """Return the number of grants in use."""
        return len(self._holders)

    def raise_epoch(self, epoch: int) -> None:
        """Refuse new grants of lower epochs from now on."""
        self._epoch = max(self._epoch, epoch)

    def take(self, grant: Grant, holder: int) -> str | None:
        """Count one more sequence of the grant; return the reason if it is refused instead."""
        user = self._holders.get(grant)
        if user is None and grant.epoch < self._epoch:
            return f"the grant is of epoch {grant.epoch}, and the engine has seen epoch {self._epoch}"
        if user is None and grant.epoch == self._first.epoch and grant.number < self._first.number:
            return f"grant {grant.number} of epoch {grant.epoch} is older than this run of the engine"
        if user is not None and user != holder:
            return f"grant {grant.number} of epoch {grant.epoch} is in use by another front"
        self.raise_epoch(grant.epoch)
        self._holders[grant] = holder
        self._sequences[grant] = self._sequences.get(grant, 0) + 1
        return None

    def release(self, grant: Grant) -> None:
        """Count one sequence of the grant less."""
        self._sequences[grant] -= 1
        if not self._sequences[grant]:
            del self._sequences[grant], self._holders[grant]
