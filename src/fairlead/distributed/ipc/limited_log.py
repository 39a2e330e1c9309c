"""Warnings that a peer can cause at any rate, logged at a bounded one."""

from typing import Any

import structlog
import trio

INTERVAL_S = 10.0
MOST_REASONS = 16  # a peer may choose them, so only so many are logged in one interval

logger = structlog.get_logger("fairlead.distributed.ipc")


class LimitedLog:
    """Logs an event at most once in `INTERVAL_S` for each reason, with how many were left out before."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._logged_at: dict[str, float] = {}
        self._left_out = 0

    def report(self, reason: str, **details: Any) -> None:
        """Log the event with its reason, unless that was logged a short time ago."""
        now = trio.current_time()
        recent = {each: at for each, at in self._logged_at.items() if now < at + INTERVAL_S}
        if reason in recent or len(recent) == MOST_REASONS:
            self._left_out += 1
            return
        self._logged_at = {**recent, reason: now}
        if self._left_out:
            details["left_out"] = self._left_out
            self._left_out = 0
        logger.warning(self._event, reason=reason, **details)
