"""The load progress in a streamed answer: shown as reasoning, which chat clients show separately.

Only where the configuration enables it (`sendLoadingState`). A client that joins the content of an answer
does not see it.
"""

import time
from collections.abc import Callable

import trio

from fairlead.base.job import Job
from fairlead.dialects.dialect import ReasoningEvents, RelayDialect, WaitingEvents
from fairlead.generation.services import Services
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.fleet.status import ModelStatus

# Until then, a stream can begin with its answer, and a refused job can have an error status.
LOADING_DELAY_S = 0.25
# The interval of progress reports.
REPORT_INTERVAL_S = 1.0


class LoadingProgress:
    """`WaitingEvents` of one answer about the load of its model, as reasoning.

    events: Show a text as reasoning.
    waiting_events: The dialect's own, which follow once the model is loaded.
    job: The job that waits for it.
    status: Returns the model's state; None: it is gone.
    """

    interval_s = REPORT_INTERVAL_S

    def __init__(
        self,
        events: ReasoningEvents,
        waiting_events: WaitingEvents,
        job: Job,
        status: Callable[[], ModelStatus | None],
    ) -> None:
        self._events = events
        self._waiting_events = waiting_events
        self._job = job
        self._status = status
        self._created = int(time.time())
        self._began_at = trio.current_time()
        self._latest: str | None = None
        self._is_loaded = False

    def write(self, waiting: WaitEstimate | None, model: str) -> bytes:
        """Return what is new, and a dot if nothing is."""
        if self._is_loaded:
            return self._waiting_events.write(None, model)
        status = self._status()
        if status is not None and status.state == "ready":
            return self.end()
        line = _progress(status, waiting)
        if self._latest is None:
            text = f"Loading the model {self._job.model}\n{line}"
        else:
            text = "." if line == self._latest else f"\n{line}"
        self._latest = line
        return self._event(text)

    def end(self) -> bytes:
        """Return the time that the load took, once."""
        if self._is_loaded:
            return b""
        self._is_loaded = True
        return self._event(f"\nLoaded after {trio.current_time() - self._began_at:.1f} s\n\n")

    def _event(self, text: str) -> bytes:
        return self._events.write(self._job, self._created, text)


def loading_progress(services: Services, dialect: RelayDialect, job: Job) -> LoadingProgress | None:
    """Return the events that report a model's load; None if it is loaded, or none are configured."""
    fleet = services.fleet
    events = dialect.reasoning_events
    if events is None or not fleet.catalog.sends_loading_state(job.model):
        return None
    if any(node.state == "up" and job.model in node.models for node in fleet.nodes()):
        return None
    return LoadingProgress(events, dialect.waiting_events, job, lambda: fleet.model(job.model))


def _progress(status: ModelStatus | None, waiting: WaitEstimate | None) -> str:
    """Return the progress of the load, and the job's queue position unless it is the first."""
    parts = []
    if status is not None and status.state == "loading":
        parts.append(status.load.stage or "starting")
        if status.load.progress is not None:
            parts.append(f"{status.load.progress:.0%}")
    else:
        parts.append("waiting for room")
    if waiting is not None and waiting.position > 1:
        parts.append(f"position {waiting.position} in the queue")
    return ", ".join(parts)
