"""Servers with one mistake each, which is visible only under faults. The simulation must catch them all.

Each is a context manager that replaces a part of the product. `WHERE` has the kinds of fault that make the
mistake visible, so that a test can omit the others.
"""

import heapq
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import trio

from fairlead.base.config import Config
from fairlead.base.telemetry import logs
from fairlead.nodes.engines.watchdog import Watchdog
from fairlead.nodes.http.links import PlainLink
from fairlead.nodes.processes.health import Breaker, Change
from fairlead.nodes.streams import attempt
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.dispatch.timer import Timer
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.quotas.quotas import Charge
from fairlead.server.listener.listener import Listener

BROKEN: dict[str, Callable[[], AbstractContextManager[None]]] = {}
FAULTS_THAT_SHOW: dict[str, tuple[str, ...]] = {}

Mistake = Callable[[], Iterator[Any]]


def mistake(*kinds: str) -> Callable[[Mistake], Mistake]:
    """Register a mistake, with the kinds of fault that make it visible."""

    def register(function: Mistake) -> Mistake:
        BROKEN[function.__name__] = contextmanager(function)
        FAULTS_THAT_SHOW[function.__name__] = kinds
        return function

    return register


@mistake("node_failing", "node_breaking_off", "node_refusing")
def seat_of_a_failed_node_is_kept() -> Iterator[None]:
    """A job that is run again does not give its first seat back."""
    real = Scheduler.requeued

    def requeued(self: Scheduler, ticket: Ticket) -> None:
        assert ticket.node is not None
        ticket.node.acquire(ticket.tokens)
        real(self, ticket)

    with patch.object(Scheduler, "requeued", requeued):
        yield


@mistake("clock_jump")
def deadlines_follow_the_wall_clock() -> Iterator[None]:
    """Deadlines are compared with the time of day."""

    def of_day() -> float:
        return time.time() - 1_750_000_000.0

    async def run(self: Timer) -> None:
        while True:
            await trio.sleep(0.1)
            due = [entry for entry in sorted(self._alarms) if entry[0] <= of_day()]
            for entry in due:
                self._alarms.remove(entry)
                entry[2].go_off()
            heapq.heapify(self._alarms)

    with patch.object(Timer, "run", run):
        yield


@mistake("reload")
def reload_ends_models_in_use() -> Iterator[None]:
    """A model with changed settings is stopped, even while it runs jobs."""
    real = Fleet.reload

    async def reload(self: Fleet, config: Config) -> Any:
        changes = await real(self, config)
        for name in (*changes.models_changed, *changes.models_removed):
            if (model := self._local.get(name)) is not None:
                model.end()
        return changes

    with patch.object(Fleet, "reload", reload):
        yield


@mistake("child_stopped")
def stuck_child_is_not_detected() -> Iterator[None]:
    """A child that makes no progress is never detected."""

    async def stuck(self: Watchdog) -> float:
        await trio.sleep_forever()
        raise AssertionError

    with patch.object(Watchdog, "stuck", stuck):
        yield


@mistake("disk_full")
def full_disk_fails_requests() -> Iterator[None]:
    """A log line that cannot be written raises in the code that logs it."""

    def msg(self: Any, message: str) -> None:
        sys.stderr.write(message + "\n")

    names = ("debug", "info", "warning", "error", "critical", "exception")
    with patch.multiple(logs._Stderr, **dict.fromkeys(("msg", *names), msg)):
        yield


@mistake("node_failing", "node_breaking_off", "node_refusing")
def broken_connections_stay_open() -> Iterator[None]:
    """A broken connection to a node is dropped without being closed."""
    real = PlainLink.close

    def close(self: PlainLink) -> None:
        if not self.is_stale():
            real(self)

    with patch.object(PlainLink, "close", close):
        yield


@mistake("child_killed", "child_fated")
def failed_job_still_counts() -> Iterator[None]:
    """A job that its node has failed counts against its key's limit of concurrent jobs forever."""
    real = Charge.end

    def end(self: Charge) -> None:
        if self._answer_tokens:
            real(self)

    with patch.object(Charge, "end", end):
        yield


@mistake("node_down", "node_unreachable")
def node_never_comes_back() -> Iterator[None]:
    """A node that has failed its probes stays down, although later probes succeed."""
    real = Breaker.probed

    def probed(self: Breaker, *, succeeded: bool, answered: bool = False) -> Change | None:
        if succeeded and not self._is_up and self._probes:
            return None
        return real(self, succeeded=succeeded, answered=answered)

    with patch.object(Breaker, "probed", probed):
        yield


@mistake("out_of_descriptors", "no_descriptor_at_times")
def listener_stops_after_an_error() -> Iterator[None]:
    """The listener stops accepting when it runs out of descriptors."""
    real = Listener._accept

    async def accept(self: Listener, listening: Any, connections: trio.Nursery) -> None:
        async def give_up(_seconds: float) -> None:
            await trio.sleep_forever()

        with patch("fairlead.server.listener.listener.trio", _Trio(give_up)):
            await real(self, listening, connections)

    with patch.object(Listener, "_accept", accept):
        yield


@mistake("node_breaking_off", "child_killed", "child_fated")
def replay_restarts_the_answer() -> Iterator[None]:
    """The answer of a second node is sent from its start, after the partial answer of the first."""

    def replay(deltas: Any, _kept: Any) -> Any:
        return deltas

    with patch.object(attempt, "_replay", replay):
        yield


class _Trio:
    """The `trio` module with a different `sleep`."""

    def __init__(self, sleep: Any) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)
