"""Measures how long load requests wait and how long models are idle, and reports both to the scheduler.

The dispatcher does this for jobs. The fleet, which owns the processes, executes the scheduler's decisions.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf

import structlog
import trio

from fairlead.base.errors import FairleadError
from fairlead.base.requester import Requester, who
from fairlead.router.dispatch.scheduling import JobScheduler
from fairlead.router.dispatch.ticket import LoadRequest
from fairlead.router.dispatch.timer import Alarm, Timer
from fairlead.router.swap.policy import EvictionPolicy, SwapReason

logger = structlog.get_logger("fairlead.router.fleet")


class ModelLifecycle:
    """Keeps load requests, and the time since each model had a job. Implements `ModelEffects`.

    Callers share one load request, which outlives them. `starvation_s`: after this wait it takes precedence.
    """

    def __init__(self, scheduler: JobScheduler, timer: Timer, *, starvation_s: float) -> None:
        self._scheduler = scheduler
        self._timer = timer
        self._starvation_s = starvation_s
        self._execute_swap: Callable[[str, frozenset[str]], None] | None = None
        self._execute_stop: Callable[[str], None] | None = None
        self._ttl_s: Mapping[str, float] = {}
        self._kept_s: dict[str, float] = {}  # overrides it for models, until their next load
        self._loads: dict[str, _PendingLoad] = {}
        self._unloaded_by: dict[str, Requester] = {}  # until the models stop
        # The latest report of each node, and the alarms of those with models that expire, with their times.
        self._idle: dict[str, _IdleNode] = {}
        self._expiries: dict[str, tuple[float, Alarm]] = {}

    def configure(
        self,
        policy: EvictionPolicy,
        ttl_s: Mapping[str, float],
        *,
        start_swap: Callable[[str, frozenset[str]], None],
        stop_model: Callable[[str], None],
    ) -> None:
        """Load the models of `ttl_s` from now on, and evict others for them as the policy decides.

        `ttl_s` maps each model to the seconds that it stays loaded without a job; 0: without limit.
        `start_swap(model, evict)` must stop the models in `evict`, which are idle or stopping already, and
        load `model` when they have stopped; `stop_model(model)` must stop an idle model, or cancel its load.
        Both are called synchronously and must not call back at once. Their results are the events `node_up`,
        `load_failed` and `stopped` of the scheduler.
        """
        self._execute_swap, self._execute_stop = start_swap, stop_model
        self._ttl_s = dict(ttl_s)
        self._scheduler.configure_models(policy, frozenset(ttl_s))

    # Requests ----------------------------------------------------------------------------------------

    def request(
        self, model: str, *, only_if_free: bool = False, by: Requester | None = None
    ) -> "_PendingLoad":
        """Request a model in its turn, unless it is loaded; `only_if_free`: only if that evicts none.

        `by`: who has requested it, if it is not for a job.
        """
        load = self._loads.get(model)
        if load is None:
            return self._new_load(LoadRequest(model, only_if_free=only_if_free), by)
        load.by = load.by or by
        if not only_if_free:
            self._scheduler.allow_eviction(load.request)
        return load

    async def load(self, model: str, *, only_if_free: bool = False, by: Requester | None = None) -> None:
        """Request that a model be loaded, as for a job that arrives now; return when it is loaded.

        `only_if_free`: only without evictions. `by`: who has requested it. Raises `LoadFailed`,
        `ModelNotFound`, `ModelUnloaded` or `Draining`.
        """
        load = self.request(model, only_if_free=only_if_free, by=by)
        await load.ended.wait()
        if load.error is not None:
            raise load.error

    def unload_is_requested(self, model: str, by: Requester | None) -> None:
        """Name who has requested the unload in its log line; None: nobody."""
        if by is None:
            self._unloaded_by.pop(model, None)
        else:
            self._unloaded_by[model] = by

    def keep(self, model: str, ttl_s: float) -> None:
        """Keep a loaded model for this time without a job, from now on, until it is unloaded.

        Infinite: without limit; 0: unload it when it is idle, and nothing waits for it.
        """
        self._kept_s[model] = ttl_s
        for node_id, node in self._idle.items():
            if model in node.models:
                self._expect_expiry(node_id, node)

    def expires_in_s(self, model: str, *, is_busy: bool) -> float:
        """Return the time until a loaded model is unloaded if it gets no job; infinite if it stays loaded."""
        expiries = [node.expires_at for node in self._idle.values() if model in node.models]
        if is_busy or not expiries:
            return self._limit_s(model)
        return max(0.0, max(expiries) - trio.current_time())

    # Effects of the scheduler ------------------------------------------------------------------------

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """See `ModelEffects`. Only this method logs a swap."""
        assert self._execute_swap is not None, "no model is loadable before `configure`"
        rule = {"rule": reason.rule} if reason.rule else {}
        load = self._loads.get(model)
        self._unloaded_by.pop(model, None)
        logger.info(
            "loading model",
            model=model,
            evicted=sorted(evict),
            chosen=list(reason.chosen),
            cost=reason.cost,
            **rule,
            **who(None if load is None else load.by),
        )
        self._kept_s.pop(model, None)
        self._execute_swap(model, evict)

    def stop_model(self, model: str) -> None:
        """See `ModelEffects`. Only this method logs an unload."""
        assert self._execute_stop is not None, "no model is loaded before `configure`"
        logger.info("unloading model", model=model, **who(self._unloaded_by.pop(model, None)))
        self._execute_stop(model)

    def load_ended(self, request: LoadRequest, error: FairleadError | None) -> None:
        """Report that the requested model is loaded, or the error because of which it will not be."""
        load = self._loads.pop(request.model)
        load.error = error
        load.ended.set()
        if load.alarm is not None:
            load.alarm.drop()

    def idle(self, node_id: str, models: frozenset[str], used: int) -> None:
        """See `ModelEffects`. A node has one alarm at a time, however often it becomes idle."""
        self._idle[node_id] = node = _IdleNode(models, used)
        self._expect_expiry(node_id, node)

    # Clocks ------------------------------------------------------------------------------------------

    def _new_load(self, request: LoadRequest, by: Requester | None) -> "_PendingLoad":
        load = self._loads[request.model] = _PendingLoad(request, by)
        self._scheduler.request_load(request)
        if not load.ended.is_set():
            starved = partial(self._scheduler.load_starved, request)
            load.alarm = self._timer.at(trio.current_time() + self._starvation_s, starved)
        return load

    def _limit_s(self, model: str) -> float:
        """Return how long a model stays loaded without a job."""
        return self._kept_s.get(model, self._ttl_s.get(model, 0.0) or inf)

    def _expect_expiry(self, node_id: str, node: "_IdleNode") -> None:
        """Let the models of a node expire after their time from now, unless it is reported again."""
        node.expires_at = trio.current_time() + max(map(self._limit_s, node.models), default=inf)
        self._set_alarm(node_id, node.expires_at)

    def _set_alarm(self, node_id: str, expires_at: float) -> None:
        """Set a node's alarm, unless it has an earlier one, which looks again."""
        at, alarm = self._expiries.get(node_id, (inf, None))
        if at <= expires_at:
            return
        if alarm is not None:
            alarm.drop()
        self._expiries[node_id] = expires_at, self._timer.at(expires_at, partial(self._expire, node_id))

    def _expire(self, node_id: str) -> None:
        del self._expiries[node_id]
        node = self._idle[node_id]
        if node.expires_at > trio.current_time():  # it has had a job and become idle again, or is kept
            self._set_alarm(node_id, node.expires_at)
        else:
            del self._idle[node_id]
            self._scheduler.expired(node_id, node.used)


class _IdleNode:
    """The latest report of a node: what `expired` gets back, and when its models expire."""

    __slots__ = ("expires_at", "models", "used")

    def __init__(self, models: frozenset[str], used: int) -> None:
        self.models = models
        self.used = used
        self.expires_at = inf


class _PendingLoad:
    """A load request in progress: `ended` is set at its end, and `error` if it failed.

    `by`: who has requested it first; None if no person has.
    """

    __slots__ = ("alarm", "by", "ended", "error", "request")

    def __init__(self, request: LoadRequest, by: Requester | None) -> None:
        self.request = request
        self.by = by
        self.ended = trio.Event()
        self.error: FairleadError | None = None
        self.alarm: Alarm | None = None
