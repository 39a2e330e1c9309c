"""Logs and traces each finished job: one log line, and a trace if an OpenTelemetry collector is configured.

A log line costs more time than sending a short answer. So it is written in a later turn of the event loop,
after the response has been sent. Each job is logged once and in order, the last ones when `run` ends. An
error in logging affects nothing else. The API logs requests that are refused before they become jobs.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import trio

from fairlead.base.config import Config
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.timeline import LEFT, SUCCESS, RequestTimeline
from fairlead.generation.traces import LoadTimes, Traces, open_traces

# Logged as information.
_EXPECTED = frozenset({SUCCESS, LEFT, "cancelled"})
# Logged as errors; all other outcomes are refusals, which are warnings.
_FAILURES = frozenset({"internal_error", "engine_failed", "node_failed", "load_failed"})

logger = structlog.get_logger("fairlead.requests")


class RequestLog:
    """Collects finished jobs, synchronously. `run` logs and traces them soon after."""

    def __init__(self, tenants: TenantNames, traces: Traces | None = None) -> None:
        self._tenants = tenants
        self._traces = traces
        self._pending: deque[tuple[RequestTimeline, LoadTimes]] = deque()
        self._added = trio.Event()

    def add(self, timeline: RequestTimeline, load: LoadTimes) -> None:
        """Add a finished job; `load` has the times at which the load of its model began and ended."""
        self._pending.append((timeline, load))
        self._added.set()

    async def run(self) -> None:
        """Log jobs until cancelled, then the remaining ones."""
        try:
            while True:
                await self._added.wait()
                self._added = trio.Event()
                self.flush()
        finally:
            self.flush()

    def flush(self) -> None:
        """Log and trace all jobs that were added."""
        while self._pending:
            timeline, load = self._pending.popleft()
            try:
                self._log(timeline)
                if self._traces is not None:
                    self._traces(timeline, load)
            except Exception:
                logger.exception("request not logged", request_id=timeline.job.request_id)

    def _log(self, timeline: RequestTimeline) -> None:
        """Log the job, at the level of its outcome."""
        job = timeline.job
        line = {
            "request_id": job.request_id,
            "outcome": timeline.outcome,
            "model": job.model,
            "tenant": self._tenants.shown(job.tenant),
            "node": timeline.node,
            "waited_s": _rounded(timeline.waited_s),
            "first_token_s": _since(timeline.arrived_s, timeline.first_delta_s),
            "took_s": _since(timeline.arrived_s, timeline.ended_s),
            "prompt_tokens": job.prompt_tokens,
            "tokens": timeline.tokens,
        }
        if timeline.attempts > 1:
            line["attempts"] = timeline.attempts
        if timeline.outcome in _EXPECTED:
            logger.info("request", **line)
        elif timeline.outcome in _FAILURES:
            logger.error("request", **line)
        else:
            logger.warning("request", **line, method=job.method, path=job.path, client=job.client)


@contextmanager
def open_request_log(config: Config) -> Iterator[RequestLog]:
    """Yield a request log; afterwards send the remaining traces, for some seconds at most.

    Raises `ConfigError` if traces are configured and OpenTelemetry is not installed.
    """
    tenants = TenantNames(config)
    traces = None if config.otlp_endpoint is None else open_traces(config.otlp_endpoint, tenants=tenants)
    try:
        yield RequestLog(tenants, traces)
    finally:
        if traces is not None:
            traces.close()


def _since(began_s: float, then_s: float | None) -> float | None:
    return None if then_s is None else _rounded(then_s - began_s)


def _rounded(duration_s: float) -> float:
    """Round seconds to milliseconds."""
    return round(duration_s, 3)
