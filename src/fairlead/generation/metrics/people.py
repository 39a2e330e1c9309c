"""The tenants: their waiting and running requests, and their shares of the seats. Pure, and bounded."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from fairlead.generation.metrics.activity import SHARE_WINDOWS, Activity
from fairlead.generation.metrics.requests import EndedRequest, RequestScope
from fairlead.router.dispatch.open_jobs import OpenJob

PEOPLE_AT_MOST = 1000
KEYS_AT_MOST = 8


class SeatShare(msgspec.Struct, frozen=True):
    """What a tenant got in a time.

    part: of the seconds of all seats that were used, 0 to 1.
    fair: the fair share, among the tenants that held or wanted seats. Teams, and tenants without a team,
        divide the whole by weight; the tenants of a team divide its part.
    """

    part: float = 0.0
    fair: float = 0.0


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that has used the server within a day, or waits now.

    tenant: the user, key or address.
    team: its team; "": none.
    keys: the ids of the keys that it has used lately.
    waiting: its requests that wait.
    running: its requests that run.
    oldest_wait_s: how long its oldest waiting request waits; None: none does.
    minute: its share of the last minute.
    hour: its share of the last hour.
    day: its share of the last day.
    """

    tenant: str
    team: str = ""
    keys: tuple[str, ...] = ()
    waiting: int = 0
    running: int = 0
    oldest_wait_s: float | None = None
    minute: SeatShare = SeatShare()
    hour: SeatShare = SeatShare()
    day: SeatShare = SeatShare()


class _Known:
    """What is known of a tenant besides its requests."""

    def __init__(self) -> None:
        self.team = ""
        self.weight = 1.0
        self.keys: OrderedDict[str, None] = OrderedDict()


class People:
    """Remembers the team and the keys of each tenant, at most `PEOPLE_AT_MOST` of them."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def note(self, request: EndedRequest | OpenJob) -> None:
        """Record the team and the key of a request's tenant."""
        known = self._known.setdefault(request.tenant, _Known())
        self._known.move_to_end(request.tenant)
        while len(self._known) > PEOPLE_AT_MOST:
            self._known.popitem(last=False)
        known.team, known.weight = request.team, request.team_weight
        if key := request.owner.partition("/")[0]:
            known.keys[key] = None
            known.keys.move_to_end(key)
            while len(known.keys) > KEYS_AT_MOST:
                known.keys.popitem(last=False)

    def find(
        self, activity: Activity, open_jobs: list[OpenJob], now: float, scope: RequestScope
    ) -> list[Person]:
        """Return the people that a caller may see: those with the greatest share of the day first.

        activity: what requests that ended have used.
        open_jobs: those that wait or run.
        now: the time, in seconds since 1970.
        scope: what the caller may see. Models do not matter: a share is one of all models.
        """
        mine: defaultdict[str, list[OpenJob]] = defaultdict(list)
        for job in open_jobs:
            self.note(job)
            mine[job.tenant].append(job)
        shares = {
            name: self._shares(activity.rings[window].seat_s(past_s, now, open_jobs), mine)
            for name, (window, past_s) in SHARE_WINDOWS.items()
        }
        people = [
            self._person(
                tenant, mine.get(tenant, []), {name: each.get(tenant) for name, each in shares.items()}
            )
            for tenant in list(self._known)
            if tenant in mine or tenant in shares["day"]
        ]
        seen = [person for person in people if self._sees(scope, person)]
        return sorted(seen, key=lambda person: (-person.day.part, person.tenant))

    def _sees(self, scope: RequestScope, person: Person) -> bool:
        return scope.includes(person.tenant) or scope.key in person.keys

    def _person(self, tenant: str, jobs: list[OpenJob], shares: Mapping[str, SeatShare | None]) -> Person:
        waits = [job.age_s for job in jobs if job.state == "waiting"]
        known = self._known[tenant]
        return Person(
            tenant=tenant,
            team=known.team,
            keys=tuple(known.keys),
            waiting=len(waits),
            running=len(jobs) - len(waits),
            oldest_wait_s=max(waits, default=None),
            **{name: share or SeatShare() for name, share in shares.items()},
        )

    def _shares(self, seat_s: Mapping[str, float], waiting: Iterable[str]) -> dict[str, SeatShare]:
        """Return the shares of the tenants that held seats, or want them now."""
        tenants = {*seat_s, *waiting}
        total = sum(seat_s.values())
        weights: dict[tuple[str, str], float] = {}
        members: defaultdict[tuple[str, str], int] = defaultdict(int)
        for tenant in tenants:
            turn, weight = self._turn(tenant)
            weights[turn] = weight
            members[turn] += 1
        whole = sum(weights.values())
        return {
            tenant: SeatShare(
                part=seat_s.get(tenant, 0.0) / total if total else 0.0,
                fair=weights[turn] / whole / members[turn],
            )
            for tenant in tenants
            for turn in (self._turn(tenant)[0],)
        }

    def _turn(self, tenant: str) -> tuple[tuple[str, str], float]:
        """Return whose turns a tenant takes, its team's or its own, and the weight of these."""
        known = self._known.get(tenant)
        if known is None or not known.team:
            return ("", tenant), 1.0
        return (known.team, ""), known.weight
