"""Faults of a simulated run: when each begins and ends, and which errors it may cause.

An error that no fault may cause, and nothing else explains, is a defect. So each kind of fault lists the
error codes that it may cause, and for which models. A full disk and a jumping clock may cause none.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

from trio.testing import MockClock

from simulation.deployment import Deployment
from simulation.engine_child import ChildPlan, Fate, Loading
from simulation.entropy import Source
from simulation.machine import Machine, Strike
from simulation.parent import Parent

# After this time, backoffs, probes and loads have ended, and a fault may cause no more errors.
RECOVERY_S = 90.0

# Effects that have no error code.
CUT = "cut"  # a connection is refused, or ends without a complete answer
LATE = "late"  # an answer comes after all deadlines
GARBLED = "garbled"  # a node's unreadable events are passed on
ENDS_OF_JOBS = frozenset(
    {
        "node_failed",
        "load_failed",
        "nodes_full",
        "no_node",
        "queue_timeout",
        "queue_full",
        "request_timeout",
        "model_loading",
    }
)

Undo = Callable[[], None]


@dataclass
class InjectedFault:
    """One fault. `models`: those affected; None: all. `allowed_errors`: codes and effects it may cause.

    `keys`: API keys that it removes from the configuration; when they return, their limits start anew.
    `is_unexpected`: the injected error is one that no code can foresee, so a traceback in the log is correct.
    """

    name: str
    began_s: float
    models: frozenset[str] | None = None
    allowed_errors: frozenset[str] = frozenset()
    is_unexpected: bool = False
    keys: frozenset[str] = frozenset()
    ended_s: float = float("inf")

    def may_cause(self, effect: str, model: str, began_s: float, ended_s: float) -> bool:
        """Return whether it may have caused this effect on a request that took this time."""
        if self.models is not None and model not in self.models:
            return False
        return effect in self.allowed_errors and self._is_during(began_s, ended_s)

    def may_reset_limit(self, key: str | None, spent_s: float, seen_s: float) -> bool:
        """Return whether what a key spent at one time may no longer count against its limits at another."""
        return key in self.keys and self._is_during(spent_s, seen_s)

    def _is_during(self, began_s: float, ended_s: float) -> bool:
        return self.began_s <= ended_s and began_s <= self.ended_s + RECOVERY_S


@dataclass
class ChildFaults:
    """The faults of child processes; each child reads them when it starts.

    `next_fates`: the fates of the next child, by frame. `fates`: those of all children of a model, at frames
    that are drawn for each child. `left_stopped`: a child was stopped and never continued.
    """

    random: Random
    loading: dict[str, Loading] = field(default_factory=dict)
    fates: dict[str, tuple[Fate, ...]] = field(default_factory=dict)
    left_stopped: bool = False
    next_fates: dict[int, Fate] = field(default_factory=dict)
    plans: list[ChildPlan] = field(default_factory=list)

    def child(self, deployment: Deployment, model: str) -> ChildPlan:
        """Return how the next child of a model behaves."""
        fates, self.next_fates = self.next_fates, {}
        if model in self.fates:
            fates = {self.random.randrange(1, 60): fate for fate in self.fates[model]}
        plan = replace(deployment.child, loading=self.loading.get(model, "well"), fates=fates)
        self.plans.append(plan)
        return plan

    def clear_faults(self) -> None:
        """Remove the faults of all children, present and future."""
        self.loading.clear()
        self.fates.clear()
        for plan in self.plans:
            plan.fates.clear()


@dataclass
class Stage:
    """Everything that a fault can reach."""

    parent: Parent
    deployment: Deployment
    child_faults: ChildFaults
    random: Random
    source: Source
    clock: MockClock
    faults: list[InjectedFault] = field(default_factory=list)

    @property
    def machine(self) -> Machine:
        """The machine that the server runs on."""
        return self.parent.system.machine

    def strike(self, strike: Strike) -> Undo:
        """Let a fault decide on each system call."""
        self.machine.strikes.append(strike)
        return lambda: self.machine.strikes.remove(strike)

    def strike_sometimes(self, calls: Iterable[str], error: Callable[[], BaseException]) -> Undo:
        """Fail some of these calls, at random."""
        affected = frozenset(calls)
        probability = self.random.choice((0.01, 0.1, 0.5))

        def strike(call: str) -> BaseException | None:
            return error() if call in affected and self.random.random() < probability else None

        return self.strike(strike)
