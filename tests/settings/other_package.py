"""A scheduler and an eviction policy, as another package would provide them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fairlead.base.errors import FairleadError, QueueFull
from fairlead.router.dispatch.effects import Effects
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.schedulers import SCHEDULERS
from fairlead.router.dispatch.scheduling import SchedulingOptions
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.swap.gpus import Gpus
from fairlead.router.swap.policies import POLICIES
from fairlead.router.swap.policy import EvictionPolicy


class RefusingScheduler(Scheduler):
    """Refuses every job."""

    def submit(self, ticket: Ticket, *, too_long: FairleadError | None = None) -> None:
        self._tickets.refuse(ticket, QueueFull("closed for the day"))


def refusing_scheduler(effects: Effects, options: SchedulingOptions) -> RefusingScheduler:
    return RefusingScheduler(effects, capacity=options.queue.capacity, random=options.random)


class KeepOnly(EvictionPolicy):
    """Evicts every model that its settings do not name when another model is loaded."""

    def __init__(self, settings: Mapping[str, Any], _memory_mb: Mapping[str, float], _gpus: Gpus) -> None:
        self._kept = frozenset(settings["stay"])

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        return frozenset(running) - self._kept


@contextmanager
def installed() -> Iterator[None]:
    """Register them as `closed` and `only` for configuration files, as the package's entry points would."""
    with patch.dict(SCHEDULERS._parts, closed=refusing_scheduler), patch.dict(POLICIES._parts, only=KeepOnly):
        yield
