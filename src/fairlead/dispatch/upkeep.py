"""Which models are there, as time passes: wishes that wait for their turn, models nobody has used for long.

The clock beside the scheduler's decisions about models, as the dispatcher is beside those about jobs. What is
to be done is asked of a `Garage`, which owns the processes.
"""

from collections.abc import Mapping
from functools import partial

import structlog
import trio

from fairlead.dispatch.placement import Place
from fairlead.dispatch.scheduling import JobScheduler
from fairlead.dispatch.ticket import Wish
from fairlead.dispatch.timer import Alarm, Timer
from fairlead.errors import FairleadError
from fairlead.nodes.desk import Garage
from fairlead.swap.policy import EvictionPolicy, SwapReason

logger = structlog.get_logger("fairlead.fleet")


class Upkeep:
    """Keeps wishes, and the time since each model had a job.

    A wish is asked for by many and made once; it goes on when who asked has left. `starvation_s`: after this
    it has waited long enough.
    """

    def __init__(self, scheduler: JobScheduler, timer: Timer, *, starvation_s: float) -> None:
        self._scheduler = scheduler
        self._timer = timer
        self._starvation_s = starvation_s
        self._garage: Garage | None = None
        self._ttl_s: Mapping[str, float] = {}
        self._wishes: dict[str, _Granting] = {}
        self._closing: dict[str, trio.Event] = {}
        self._idle_since: dict[Place, float] = {}
        self._watched: set[Place] = set()

    def arrange(self, garage: Garage, policy: EvictionPolicy, ttl_s: Mapping[str, float]) -> None:
        """Have these models loaded and unloaded there. `ttl_s`: how long each stays without a job; 0: on."""
        self._garage = garage
        self._ttl_s = dict(ttl_s)
        self._scheduler.arrange(policy, frozenset(ttl_s))

    # What is asked for -------------------------------------------------------------------------------

    def wish(self, model: str, *, spare: bool = False) -> "_Granting":
        """Have a model loaded in its turn, unless it is; `spare`: only if that evicts none."""
        granting = self._wishes.get(model)
        if granting is None:
            return self._make_wish(Wish(model, spare=spare))
        if not spare:
            self._scheduler.strengthen(granting.wish)
        return granting

    async def load(self, model: str, *, spare: bool = False) -> None:
        """Return when the model is loaded. Raises `LoadFailed`, `ModelNotFound` or `Draining`."""
        granting = self.wish(model, spare=spare)
        await granting.over.wait()
        if granting.error is not None:
            raise granting.error

    def close(self, node_id: str) -> trio.Event:
        """Give a node no more jobs; return what is set when it has none."""
        event = self._closing.setdefault(node_id, trio.Event())
        self._scheduler.close(node_id)
        return event

    # What the scheduler asks for ---------------------------------------------------------------------

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """See `Effects`. This is where a swap is logged, once."""
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

    def wish_ended(self, wish: Wish, error: FairleadError | None) -> None:
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

    def idle(self, place: Place) -> None:
        """See `Effects`. There is one alarm for a place at a time, however often it is idle."""
        if self._ttl_of(place):
            self._idle_since[place] = trio.current_time()
            if place not in self._watched:
                self._watch(place)

    # Clocks ------------------------------------------------------------------------------------------

    def _make_wish(self, wish: Wish) -> "_Granting":
        granting = self._wishes[wish.model] = _Granting(wish)
        self._scheduler.wish(wish)
        if not granting.over.is_set():
            starved = partial(self._scheduler.wish_starved, wish)
            granting.alarm = self._timer.at(trio.current_time() + self._starvation_s, starved)
        return granting

    def _watch(self, place: Place) -> None:
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

    def _ttl_of(self, place: Place) -> float:
        return max((self._ttl_s.get(model, 0.0) for model in place.node.models), default=0.0)


class _Granting:
    """A wish on its way: what is set when it is `over`, and why it was not granted, if it was not."""

    __slots__ = ("alarm", "error", "over", "wish")

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.over = trio.Event()
        self.error: FairleadError | None = None
        self.alarm: Alarm | None = None
