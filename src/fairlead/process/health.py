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

from fairlead.config import HealthConfig

Change = Literal["up", "down", "dead"]


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
    in a row of either open it, and only a successful probe closes it. After requests have opened it, a single
    failed request opens it again, until one succeeds. `failures` may change at any time.

    The changes are "up" and "down", for new work, and "dead": `failures` probes in a row got no answer at
    all, so that what runs there is lost. A node that is up is then down, too.
    """

    def __init__(self, failures: float) -> None:
        self.failures = failures
        self._probes = 0
        self._unanswered = 0
        self._requests = 0
        self._is_up = False
        self._is_dead = False
        self._is_half_open = False

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

    def requested(self, *, succeeded: bool) -> Change | None:
        """Count a request, and return the change, if any. Ignored while the breaker is open."""
        if not self._is_up:
            return None
        if succeeded:
            self._requests = 0
            self._is_half_open = False
            return None
        self._requests += 1
        if self._requests < self.failures and not self._is_half_open:
            return None
        self._is_half_open = True
        return self._open()

    def _close(self) -> Change | None:
        if self._is_up:
            return None
        self._is_up = True
        self._requests = 0
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
