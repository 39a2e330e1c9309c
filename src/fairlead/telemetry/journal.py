"""The log's one line a request: what was asked, who served it, how long it took, and what came of it.

Knows no event loop and no HTTP. What was refused before it became a job has its line from the api's door.
"""

import structlog

from fairlead.journey import LEFT, SUCCESS, Journey
from fairlead.telemetry.tenants import TenantNames

# As good as it can be: nothing of ours went wrong, and nobody was turned away.
_WELL = frozenset({SUCCESS, LEFT, "cancelled"})
# Ours to mend.
_FAILURES = frozenset({"internal_error", "engine_failed", "node_failed", "load_failed"})

logger = structlog.get_logger("fairlead.requests")


class Journal:
    """Writes down each job when it is over; to be the gateway's `tell`."""

    def __init__(self, tenants: TenantNames) -> None:
        self._tenants = tenants

    def __call__(self, journey: Journey) -> None:
        """Write the job's line: a warning if it was turned away, an error if something of ours failed."""
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
    """To the millisecond: nobody reads more."""
    return round(duration_s, 3)
