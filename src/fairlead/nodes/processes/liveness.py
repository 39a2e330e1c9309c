"""Detects that a server that we started hangs: its process runs, but neither answers nor computes.

A server that is stopped by a signal or deadlocked has not ended, and would keep its jobs. A server that
handles one request at a time is just as silent while it does. So silence counts only while no bytes of a
response arrive and its processes use almost no CPU. Any response is a sign of life: some send 503 when busy.
"""

import trio

from fairlead.nodes.http.client import LocalShortage, Upstream, UpstreamFailed
from fairlead.nodes.processes.health import Breaker, HealthCheck, watch
from fairlead.nodes.processes.memory import computed_s

# The fraction of one CPU that counts as work. Idle threads that poll for work take less.
WORKING_SHARE = 0.1
ANSWER_BYTES = 64 * 1024


class LivenessProbe:
    """Probes the server at `upstream` by requests for `path`; `group` is its process group."""

    def __init__(self, upstream: Upstream, path: str, *, group: int) -> None:
        self._upstream = upstream
        self._path = path
        self._group = group
        self._was_refused = False
        # The time of the last silent probe, and the CPU time of the group by then. To get that, all processes
        # of the machine are read, so it is not done for a server that answers.
        self._before: tuple[float, float | None] | None = None

    async def stopped(self, health: HealthCheck) -> None:
        """Probe as `health` says; return when `failures` probes in a row have found no sign of life."""
        breaker = Breaker(health.config.failures)
        breaker.probed(succeeded=True)
        with trio.CancelScope() as scope:

            def report(succeeded: bool) -> None:
                breaker.failures = health.config.failures
                if (
                    breaker.probed(succeeded=self._is_alive(health.config.interval_s, answered=succeeded))
                    == "dead"
                ):
                    scope.cancel()

            await watch(self._answers, report, health)

    async def _answers(self) -> bool:
        self._was_refused = False
        try:
            async with self._upstream.exchange("GET", self._path) as answer:
                await answer.read_all(ANSWER_BYTES)
        except LocalShortage:
            return True  # no request was sent
        except UpstreamFailed:
            self._was_refused = True
            return False
        return True

    def _is_alive(self, lately_s: float, *, answered: bool) -> bool:
        if answered or self._was_refused:
            self._before = None
            return answered
        before, now = self._before, (trio.current_time(), computed_s(self._group))
        self._before = now
        if now[0] - self._upstream.last_received_at < lately_s:
            return True
        if before is None or before[1] is None or now[1] is None:
            return False
        return now[1] - before[1] >= WORKING_SHARE * (now[0] - before[0])
