"""One model of a node that has rejected jobs as full: which tenants wait, and which job tries again. Pure.

After a rejection no job gets a seat for a while. Then one job tries. If it succeeds, all others follow. If it
is rejected, the pause begins again, twice as long, unless the node names a time.

A tenant may have requests that a node always rejects, so it is paused for the whole time, and all others only
until one of them has tried.

Example: A is rejected for 60 s. After 1 s B tries. If B succeeds, all but A go on; if B is rejected too, all
wait for the time that the node has named to B.
"""

from fairlead.base.backoff import Backoff
from fairlead.router.dispatch.ticket import Ticket

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
# The longest time that a node may name.
LONGEST_NAMED_S = 60.0
# How long a job may try, before the pause is forgotten if none does.
FORGOTTEN_S = 60.0
# Of a model's tenants, only so many are paused at a time. The first ones are forgotten.
MOST_TENANTS = 100


class Pause:
    """A pause of all tenants or of one. `may_try`: it is over, and one job may try.

    `is_named`: the node has named its length, so the end of another job does not end it. `is_limit`: the node
    answered 429.
    """

    __slots__ = ("_backoff", "is_limit", "is_named", "may_try")

    def __init__(self) -> None:
        self.may_try = False
        self.is_named = False
        self.is_limit = False
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def begin(self, named_s: float | None, *, is_limit: bool, grows: bool) -> float:
        """Begin the pause again, and return its length. `grows`: a job that tried was rejected."""
        if grows:
            self._backoff.grow()
        self.may_try, self.is_named, self.is_limit = False, named_s is not None, is_limit
        return self._backoff.pause_s if named_s is None else min(named_s, LONGEST_NAMED_S)

    def wait_for_trial(self) -> float:
        """Let no other job try, and return after which time another may try although nothing is known."""
        self.may_try = False
        return self._backoff.pause_s


class FullModel:
    """The pauses of one model on one node: `of_all` while no tenant gets a seat, and those `of_tenants`."""

    __slots__ = ("_rejected", "of_all", "of_tenants")

    def __init__(self) -> None:
        self.of_all: Pause | None = None
        self.of_tenants: dict[str, Pause] = {}
        self._rejected: set[str] = set()  # tenants, since the last success

    @property
    def is_closed(self) -> bool:
        """Whether no job gets a seat now."""
        return self.of_all is not None and not self.of_all.may_try

    def refuses(self, tenant: str) -> bool:
        """Return whether the tenant's jobs get no seat now."""
        return bool(self.waits_for(tenant))

    def holds_back(self, tenant: str) -> bool:
        """Return whether the tenant's jobs wait for a pause, or for the job that tries after it."""
        return self.of_all is not None or tenant in self.of_tenants

    def waits_for(self, tenant: str) -> list[str | None]:
        """Return the pauses for whose end the tenant's jobs wait, each by its tenant; None: of all."""
        found = ((None, self.of_all), (tenant, self.of_tenants.get(tenant)))
        return [whose for whose, pause in found if pause is not None and not pause.may_try]

    def rejected(
        self, ticket: Ticket, named_s: float | None, *, is_limit: bool
    ) -> list[tuple[str | None, float]]:
        """Record a rejection. Return the pauses that begin, with their tenants; None: of all."""
        tenant, tried = ticket.job.tenant, ticket.is_trial
        is_odd = self.of_all is None and tenant in self.of_tenants  # others succeed
        pause = self.of_tenants.pop(tenant, None) or Pause()
        self.of_tenants[tenant] = pause
        if len(self.of_tenants) > MOST_TENANTS:
            del self.of_tenants[next(iter(self.of_tenants))]
        begun: list[tuple[str | None, float]] = [
            (tenant, pause.begin(named_s, is_limit=is_limit, grows=tried))
        ]
        if is_odd:
            return begun
        self._rejected.add(tenant)
        self.of_all = self.of_all or Pause()
        if len(self._rejected) > 1:
            begun.append((None, self.of_all.begin(named_s, is_limit=is_limit, grows=tried)))
        else:
            self.of_all.begin(None, is_limit=is_limit, grows=False)
            begun.append((None, FIRST_PAUSE_S))
        return begun

    def granted(self, ticket: Ticket) -> list[tuple[str | None, float]]:
        """Record that a job gets a seat. If it is a trial, return when another may follow; see `rejected`."""
        tenant = ticket.job.tenant
        found = ((None, self.of_all), (tenant, self.of_tenants.get(tenant)))
        return [(whose, pause.wait_for_trial()) for whose, pause in found if pause is not None]

    def succeeded(self, ticket: Ticket) -> None:
        """Record that the node serves a job that tried."""
        self.of_all = None
        self._rejected.clear()
        self.of_tenants.pop(ticket.job.tenant, None)

    def resume(self, tenant: str | None) -> bool:
        """Let one job try, because a pause is over; return whether there is such a pause.

        If a job might have tried already, and none has, the pause is forgotten.
        """
        pause = self.of_all if tenant is None else self.of_tenants.get(tenant)
        if pause is None:
            return False
        if not pause.may_try:
            pause.may_try = True
            return True
        if tenant is None:
            self.of_all = None
            self._rejected.clear()
        else:
            del self.of_tenants[tenant]
        return False

    def trial_ended(self, ticket: Ticket) -> None:
        """Let another job try, because the one that tried has ended without a result."""
        for pause in (self.of_all, self.of_tenants.get(ticket.job.tenant)):
            if pause is not None:
                pause.may_try = True

    def job_ended(self) -> None:
        """Let one job try, because a job of the node has ended, unless the node has named a time."""
        for pause in (self.of_all, *self.of_tenants.values()):
            if pause is not None and not pause.is_named:
                pause.may_try = True

    def __bool__(self) -> bool:
        """Return whether a pause is left."""
        return self.of_all is not None or bool(self.of_tenants)
