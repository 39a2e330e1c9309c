"""Whether a node gets work: `failures` in a row open its circuit breaker, a successful probe closes it.

`Breaker` is pure: results go in, changes come out. `watch` calls it after each probe. Neither depends on
nodes. Both use the settings of a `HealthCheck`, which a reload may change.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import trio

from fairlead.config import HealthConfig

Change = Literal["up", "down"]


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
    """

    def __init__(self, failures: float) -> None:
        self.failures = failures
        self._probes = 0
        self._requests = 0
        self._is_up = False
        self._is_half_open = False

    @property
    def is_up(self) -> bool:
        """Whether the node gets work."""
        return self._is_up

    def probed(self, *, succeeded: bool) -> Change | None:
        """Count a probe, and return the change that follows, if any."""
        if not succeeded:
            self._probes += 1
            return self._open() if self._is_up and self._probes >= self.failures else None
        self._probes = 0
        if self._is_up:
            return None
        self._is_up = True
        self._requests = 0
        return "up"

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
