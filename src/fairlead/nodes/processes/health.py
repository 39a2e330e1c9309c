"""Whether a node gets work: `failures` in a row open its circuit breaker, a successful probe closes it.

An open breaker only stops new work. Whether the running exchanges are lost as well is another question, which
only probes answer: a user may cause failures of requests, and any answer, also an error, shows that the
server lives.

`Breaker` is pure: results go in, changes come out. `watch` calls it after each probe. Neither depends on
nodes. Both use the settings of a `HealthCheck`, which a reload may change.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import trio

from fairlead.base.config import HealthConfig

Change = Literal["up", "down", "dead"]

Outcome = Literal["succeeded", "progressed", "failed"]
"""What is known of a request: it was answered, with any status; its answer goes on; its connection failed."""

SERVED_S = 5.0
MOST_TENANTS = 100


class HealthCheck:
    """The settings in force. `change` replaces them at once, even during a pause between two probes."""

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self._changed = trio.Event()

    def change(self, config: HealthConfig) -> None:
        """Use these settings from now on."""
        self.config = config
        self._changed.set()
        self._changed = trio.Event()

    async def pause(self, began_s: float) -> None:
        """Sleep until an interval has passed since a probe began."""
        is_over = False
        while not is_over:
            with trio.move_on_at(began_s + self.config.interval_s) as interval:
                await self._changed.wait()
            is_over = interval.cancelled_caught


class Breaker:
    """A circuit breaker that is open at first: a node is probed before it gets work.

    Probes and requests are counted separately, because a server may answer one and fail the other. `failures`
    in a row of either open it, and only a successful probe closes it. Requests count by their tenants: while
    the server has served another tenant within `SERVED_S`, and that one's requests do not fail, failures are
    taken to be caused by the requests themselves. `failures` may change at any time.

    The changes are "up" and "down", for new work, and "dead": `failures` probes in a row got no answer at
    all, so that what runs there is lost. A node that is up is then down, too.
    """

    def __init__(self, failures: float) -> None:
        self.failures = failures
        self._probes = 0
        self._unanswered = 0
        self._requests = 0
        self._failing: set[str] = set()  # the tenants of the latest requests in a row that have failed
        self._served: dict[str, float] = {}  # by tenant, the latest last: when it was last served
        self._is_up = False
        self._is_dead = False

    @property
    def is_up(self) -> bool:
        """Whether the node gets work."""
        return self._is_up

    @property
    def is_dead(self) -> bool:
        """Whether its probes get no answer. False before the first probes: nothing is known then."""
        return self._is_dead

    def probed(self, *, succeeded: bool, answered: bool = False) -> Change | None:
        """Count a probe, and return the change that follows, if any.

        `answered`: a probe that has failed got an answer, such as an HTTP error.
        """
        if succeeded or answered:
            self._unanswered = 0
            self._is_dead = False
        if succeeded:
            self._probes = 0
            return self._close()
        self._probes += 1
        self._unanswered += not answered
        if self._unanswered >= self.failures and not self._is_dead:
            self._is_up = False
            self._is_dead = True
            return "dead"
        return self._open() if self._is_up and self._probes >= self.failures else None

    def requested(self, outcome: Outcome, tenant: str, *, at: float) -> Change | None:
        """Count a request of a tenant, and return the change, if any. Ignored while the breaker is open."""
        if not self._is_up:
            return None
        if outcome != "failed":
            self._served.pop(tenant, None)
            self._served[tenant] = at
            if len(self._served) > MOST_TENANTS:
                del self._served[next(iter(self._served))]
            if outcome == "succeeded":
                self._forget_requests()
            return None
        self._requests += 1
        if len(self._failing) < MOST_TENANTS:
            self._failing.add(tenant)
        if self._requests < self.failures or self._serves_others(at):
            return None
        return self._open()

    def _serves_others(self, at: float) -> bool:
        """Return whether a tenant whose requests do not fail was served lately."""
        return any(
            at - served_at <= SERVED_S and tenant not in self._failing
            for tenant, served_at in self._served.items()
        )

    def _forget_requests(self) -> None:
        self._requests = 0
        self._failing.clear()

    def _close(self) -> Change | None:
        if self._is_up:
            return None
        self._is_up = True
        self._forget_requests()
        return "up"

    def _open(self) -> Change:
        self._is_up = False
        return "down"


async def watch(
    probe: Callable[[], Awaitable[bool]], report: Callable[[bool], None], health: HealthCheck
) -> None:
    """Probe at once and then every `interval_s`, until cancelled; report whether each probe succeeded.

    A probe that takes longer than `timeout_s` has failed. One longer than the interval delays the next.
    """
    while True:
        began_s = trio.current_time()
        succeeded = False
        with trio.move_on_after(health.config.timeout_s):
            succeeded = await probe()
        report(succeeded)
        await health.pause(began_s)
