"""The clock for decisions about models: load requests that wait, and models that were idle for long.

The dispatcher is that for jobs. A `ModelHost`, which owns the processes, executes the decisions.
"""

from collections.abc import Mapping
from functools import partial

import structlog
import trio

from fairlead.dispatch.effects import ModelHost
from fairlead.dispatch.node_state import NodeState
from fairlead.dispatch.scheduling import JobScheduler
from fairlead.dispatch.ticket import LoadRequest
from fairlead.dispatch.timer import Alarm, Timer
from fairlead.errors import FairleadError
from fairlead.swap.policy import EvictionPolicy, SwapReason

logger = structlog.get_logger("fairlead.fleet")


class ModelLifecycle:
    """Keeps load requests, and the time since each model had a job.

    Callers share one load request, which outlives them. `starvation_s`: after this wait it takes precedence.
    """

    def __init__(self, scheduler: JobScheduler, timer: Timer, *, starvation_s: float) -> None:
        self._scheduler = scheduler
        self._timer = timer
        self._starvation_s = starvation_s
        self._garage: ModelHost | None = None
        self._ttl_s: Mapping[str, float] = {}
        self._wishes: dict[str, _Granting] = {}
        self._closing: dict[str, trio.Event] = {}
        self._idle_since: dict[NodeState, float] = {}
        self._watched: set[NodeState] = set()

    def arrange(self, garage: ModelHost, policy: EvictionPolicy, ttl_s: Mapping[str, float]) -> None:
        """Load and unload models through `garage`. `ttl_s`: seconds each stays without a job; 0: for ever."""
        self._garage = garage
        self._ttl_s = dict(ttl_s)
        self._scheduler.arrange(policy, frozenset(ttl_s))

    # Requests ----------------------------------------------------------------------------------------

    def wish(self, model: str, *, spare: bool = False) -> "_Granting":
        """Request a model in its turn, unless it is loaded; `spare`: only if that evicts none."""
        granting = self._wishes.get(model)
        if granting is None:
            return self._make_wish(LoadRequest(model, spare=spare))
        if not spare:
            self._scheduler.strengthen(granting.wish)
        return granting

    async def load(self, model: str, *, spare: bool = False) -> None:
        """Request a model and return when it is loaded. Raises what `Dispatcher.load` raises."""
        granting = self.wish(model, spare=spare)
        await granting.over.wait()
        if granting.error is not None:
            raise granting.error

    def close(self, node_id: str) -> trio.Event:
        """Give a node no more jobs; return an event that is set when it has none."""
        event = self._closing.setdefault(node_id, trio.Event())
        self._scheduler.close(node_id)
        return event

    # Requests from the scheduler ---------------------------------------------------------------------

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """See `Effects`. Only this method logs a swap."""
        assert self._garage is not None, "nothing is loadable where nobody loads"
        rule = {"rule": reason.rule} if reason.rule else {}
        logger.info(
            "loading model",
            model=model,
            evicted=sorted(evict),
            chosen=list(reason.chosen),
            cost=reason.cost,
            **rule,
        )
        self._garage.start_swap(model, evict)

    def stop_model(self, model: str) -> None:
        """See `Effects`."""
        assert self._garage is not None, "nothing was loaded where nobody loads"
        self._garage.stop_model(model)

    def wish_ended(self, wish: LoadRequest, error: FairleadError | None) -> None:
        """See `Effects`."""
        granting = self._wishes.pop(wish.model)
        granting.error = error
        granting.over.set()
        if granting.alarm is not None:
            granting.alarm.drop()

    def closed(self, node_id: str) -> None:
        """See `Effects`."""
        if (event := self._closing.pop(node_id, None)) is not None:
            event.set()

    def idle(self, place: NodeState) -> None:
        """See `Effects`. A place has one alarm at a time, however often it becomes idle."""
        if self._ttl_of(place):
            self._idle_since[place] = trio.current_time()
            if place not in self._watched:
                self._watch(place)

    # Clocks ------------------------------------------------------------------------------------------

    def _make_wish(self, wish: LoadRequest) -> "_Granting":
        granting = self._wishes[wish.model] = _Granting(wish)
        self._scheduler.wish(wish)
        if not granting.over.is_set():
            starved = partial(self._scheduler.wish_starved, wish)
            granting.alarm = self._timer.at(trio.current_time() + self._starvation_s, starved)
        return granting

    def _watch(self, place: NodeState) -> None:
        self._watched.add(place)
        used, ends_at = place.used, self._idle_since[place] + self._ttl_of(place)

        def look() -> None:
            self._watched.discard(place)
            if place.used == used or place.busy or place.leaving:
                del self._idle_since[place]
                self._scheduler.expired(place, used)
            else:
                self._watch(place)

        self._timer.at(ends_at, look)

    def _ttl_of(self, place: NodeState) -> float:
        return max((self._ttl_s.get(model, 0.0) for model in place.node.models), default=0.0)


class _Granting:
    """A load request in progress: `over` is set at its end, and `error` if it failed."""

    __slots__ = ("alarm", "error", "over", "wish")

    def __init__(self, wish: LoadRequest) -> None:
        self.wish = wish
        self.over = trio.Event()
        self.error: FairleadError | None = None
        self.alarm: Alarm | None = None
