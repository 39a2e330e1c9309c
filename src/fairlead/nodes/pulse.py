"""Whether a server that we have started still lives, though its process does: it answers, or it works.

A server that was stopped, or waits for itself for ever, has not ended, and would keep its jobs. One that
does one thing at a time is as silent while it does it: so silence counts only while nothing of an answer
comes, and its processes do next to nothing. Whatever it answers, it lives: some say 503 when they are busy.
"""

import trio

from fairlead.nodes.health import Breaker, HealthCheck, watch
from fairlead.nodes.memory import computed_s
from fairlead.nodes.upstream import LocalShortage, Upstream, UpstreamFailed

# What part of one processor's time is work. Threads that only look whether there is some take less.
WORK = 0.1
ANSWER_BYTES = 64 * 1024


class Pulse:
    """Feels the server at `upstream`, by asking for `path`; `group` is its process group."""

    def __init__(self, upstream: Upstream, path: str, *, group: int) -> None:
        self._upstream = upstream
        self._path = path
        self._group = group
        self._was_refused = False
        # When it was silent last, and how long its processes had computed by then. To know that takes a look
        # at all processes of the machine, so a server that answers is not looked at.
        self._before: tuple[float, float | None] | None = None

    async def stopped(self, health: HealthCheck) -> None:
        """Probe as `health` says; return when as many probes in a row as it says found no sign of life."""
        breaker = Breaker(health.config.failures)
        breaker.probed(well=True)
        with trio.CancelScope() as scope:

            def report(well: bool) -> None:
                breaker.failures = health.config.failures
                if breaker.probed(well=self._lives(health.config.interval_s, answered=well)) == "down":
                    scope.cancel()

            await watch(self._answers, report, health)

    async def _answers(self) -> bool:
        self._was_refused = False
        try:
            async with self._upstream.exchange("GET", self._path) as answer:
                await answer.read_all(ANSWER_BYTES)
        except LocalShortage:
            return True  # it was not asked
        except UpstreamFailed:
            self._was_refused = True
            return False
        return True

    def _lives(self, lately_s: float, *, answered: bool) -> bool:
        if answered or self._was_refused:
            self._before = None
            return answered
        before, now = self._before, (trio.current_time(), computed_s(self._group))
        self._before = now
        if now[0] - self._upstream.last_heard < lately_s:
            return True
        if before is None or before[1] is None or now[1] is None:
            return False
        return now[1] - before[1] >= WORK * (now[0] - before[0])
