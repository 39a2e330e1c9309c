"""The load progress in a streamed chat: deltas of `reasoning_content`, which chat clients show.

Only where the configuration enables it (`sendLoadingState`). A client that joins the content of an answer
does not see it.
"""

import time
from collections.abc import Callable

import msgspec
import trio

from fairlead.api.services import Services, Waiting
from fairlead.fleet.status import ModelStatus
from fairlead.job import Job

# Until then, a stream can begin with its answer, and a refused job can have an error status.
LOADING_AFTER_S = 0.25
# The interval of progress reports.
REPORT_EVERY_S = 1.0

_encode = msgspec.json.Encoder().encode


class LoadingProgress:
    """`Notices` of one chat about the load of its model; `status` returns the model's state."""

    interval_s = REPORT_EVERY_S

    def __init__(self, job: Job, status: Callable[[], ModelStatus | None]) -> None:
        self._job = job
        self._status = status
        self._created = int(time.time())
        self._began_at = trio.current_time()
        self._latest: str | None = None
        self._is_loaded = False

    def write(self, waiting: Waiting | None) -> bytes:
        """Return what is new, a dot if nothing is, and a comment once the model is loaded."""
        if self._is_loaded:
            return b": running\n\n"
        status = self._status()
        if status is not None and status.state == "ready":
            return self.end()
        line = _progress(status, waiting)
        if self._latest is None:
            text = f"Loading the model {self._job.model}\n{line}"
        else:
            text = "." if line == self._latest else f"\n{line}"
        self._latest = line
        return self._delta(text)

    def end(self) -> bytes:
        """Return the time that the load took, once."""
        if self._is_loaded:
            return b""
        self._is_loaded = True
        return self._delta(f"\nLoaded after {trio.current_time() - self._began_at:.1f} s\n\n")

    def _delta(self, text: str) -> bytes:
        # Without a role: clients that merge deltas would have it twice.
        choice = {"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}
        chunk = {
            "id": self._job.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._job.model,
            "choices": [choice],
        }
        return b"data: " + _encode(chunk) + b"\n\n"


def loading_progress(services: Services, job: Job) -> LoadingProgress | None:
    """Return the notices for a chat whose model no node has loaded; None where none are configured."""
    fleet = services.fleet
    if not fleet.sends_loading_state(job.model):
        return None
    if any(node.state == "up" and job.model in node.models for node in fleet.nodes()):
        return None
    return LoadingProgress(job, lambda: fleet.model(job.model))


def _progress(status: ModelStatus | None, waiting: Waiting | None) -> str:
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
