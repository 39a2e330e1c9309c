"""One log line per request: what was requested, which node served it, how long it took, and the outcome.

Knows no event loop and no HTTP. The API logs the requests that are refused before they become jobs.
"""

import structlog

from fairlead.request_timeline import LEFT, SUCCESS, RequestTimeline
from fairlead.telemetry.tenants import TenantNames

# No error of ours, and no client was refused.
_WELL = frozenset({SUCCESS, LEFT, "cancelled"})
# Errors of ours.
_FAILURES = frozenset({"internal_error", "engine_failed", "node_failed", "load_failed"})

logger = structlog.get_logger("fairlead.requests")


class Journal:
    """Logs each finished job; may be the gateway's `tell` callback."""

    def __init__(self, tenants: TenantNames) -> None:
        self._tenants = tenants

    def __call__(self, journey: RequestTimeline) -> None:
        """Log the job: a warning if it was refused, an error if something of ours failed."""
        job = journey.job
        line = {
            "request_id": job.request_id,
            "outcome": journey.outcome,
            "model": job.model,
            "tenant": self._tenants.shown(job.tenant),
            "node": journey.node,
            "waited_s": _ms(journey.waited_s),
            "first_token_s": _since(journey.arrived_s, journey.first_delta_s),
            "took_s": _since(journey.arrived_s, journey.ended_s),
            "prompt_tokens": job.prompt_tokens,
            "tokens": journey.tokens,
        }
        if journey.attempts > 1:
            line["attempts"] = journey.attempts
        if journey.outcome in _WELL:
            logger.info("request", **line)
        elif journey.outcome in _FAILURES:
            logger.error("request", **line)
        else:
            logger.warning("request", **line, method=job.method, path=job.path, client=job.client)


def _since(began_s: float, then_s: float | None) -> float | None:
    return None if then_s is None else _ms(then_s - began_s)


def _ms(duration_s: float) -> float:
    """Round to milliseconds, which is precise enough to read."""
    return round(duration_s, 3)
