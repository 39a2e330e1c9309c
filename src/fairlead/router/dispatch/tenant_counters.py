"""The service that tenants have received, which outlives a dispatcher: fronts get it and return it.

Under token fairness a tenant's counter is its service in units of cost by weight. Only differences to the
`level` have an effect: it is the counter with which a new tenant joins. Under round robin all are 0.
"""

from collections.abc import Iterable
from math import isfinite

import msgspec

MAX_TENANTS = 10_000
"""Number of tenants whose counters are kept: those with the highest."""


class TenantCounters(msgspec.Struct, frozen=True, array_like=True):
    """Counters of tenants at one moment. `is_whole`: tenants that are not in it are at the level."""

    level: float = 0.0
    counters: dict[str, float] = {}
    is_whole: bool = False


class KnownCounters:
    """The latest counters above the level, in bounded memory."""

    def __init__(self) -> None:
        self._level = 0.0
        self._counters: dict[str, float] = {}

    def update(self, changes: TenantCounters) -> None:
        """Record counters that have changed."""
        known = {} if changes.is_whole else self._counters
        known = known | changes.counters
        self._level = changes.level
        above = [(counter, tenant) for tenant, counter in known.items() if counter > self._level]
        if len(above) > MAX_TENANTS:
            above = sorted(above)[-MAX_TENANTS:]
        self._counters = {tenant: counter for counter, tenant in above}

    def whole(self) -> TenantCounters:
        """Return all that are known."""
        return TenantCounters(self._level, self._counters, is_whole=True)


def highest_excess(reports: Iterable[TenantCounters]) -> dict[str, float]:
    """Return by how much each tenant's counter exceeds the level, in the report where it is most."""
    found: dict[str, float] = {}
    for report in reports:
        for tenant, counter in report.counters.items():
            excess = counter - report.level
            if isfinite(excess) and excess > found.get(tenant, 0.0):
                found[tenant] = excess
    return found
