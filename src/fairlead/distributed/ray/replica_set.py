"""How many replicas a model has, and which are started and ended: a state machine without clock and IO.

Rules: never fewer wanted than the minimum or more than the maximum; one change of the wanted number at a
time; a replica that was up is drained before it is ended. A replica that has ended is replaced. At a constant
load the number settles: a replica is unnecessary only if the others would have seats to spare.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fairlead.base.backoff import Backoff

ReplicaState = Literal["starting", "up", "draining", "ending"]

# The other replicas must have room for the jobs of an unnecessary one in this part of their seats.
FULL_ENOUGH = 0.6
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
# A replica that was up for so long has not failed to start.
STEADY_S = 60.0

TRANSITIONS: frozenset[tuple[ReplicaState, ReplicaState]] = frozenset(
    {
        ("starting", "up"),
        ("starting", "ending"),
        ("up", "draining"),
        ("up", "ending"),  # its node was removed by an operator, or does not answer
        ("draining", "ending"),
    }
)


class ScalingRules(NamedTuple):
    """Bounds of the number of replicas, and when it changes.

    min: the fewest replicas.
    max: the most.
    target_wait_s: the estimated wait above which there are too few.
    up_after_s: how long there must be too few before one is started.
    down_after_s: how long there must be too many before one is ended.
    """

    min: int
    max: int
    target_wait_s: float = 5.0
    up_after_s: float = 10.0
    down_after_s: float = 300.0


class ModelLoad(NamedTuple):
    """The load of a model.

    waiting: jobs that wait.
    wait_s: the estimated wait of a new one.
    busy: the busy seats of each replica that is up, by number.
    seats: all seats of each of them.
    """

    waiting: int = 0
    wait_s: float = 0.0
    busy: Mapping[int, int] = {}
    seats: Mapping[int, int] = {}


class LaunchReplica(NamedTuple):
    """Start a replica of this number."""

    number: int


class DrainReplica(NamedTuple):
    """Give the replica no more jobs; report `drained` when it has none."""

    number: int


class EndReplica(NamedTuple):
    """End the replica; report `ended` when it has."""

    number: int


ReplicaOrder = LaunchReplica | DrainReplica | EndReplica


@dataclass
class _Replica:
    state: ReplicaState
    up_at_s: float | None = None


class _Timer:
    """How long a condition has held without interruption."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def held_for_s(self, now_s: float, *, holds: bool) -> float:
        """Record whether the condition holds now; return for how long it has held, -1 if it does not."""
        if not holds:
            self._since_s = None
            return -1.0
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s

    def restart(self) -> None:
        """Count from the next time on."""
        self._since_s = None


class ReplicaSet:
    """The replicas of one model, by number. `tick` decides; the other methods report events.

    `numbers` yields the numbers of new replicas.
    """

    def __init__(self, rules: ScalingRules, numbers: Iterator[int]) -> None:
        self.rules = rules
        self.wanted = rules.min
        self._numbers = numbers
        self._replicas: dict[int, _Replica] = {}
        self._overloaded = _Timer()
        self._spare = _Timer()
        self._backoff = Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        self._retry_at_s = 0.0

    def __len__(self) -> int:
        """Return the number of replicas in any state."""
        return len(self._replicas)

    def __contains__(self, number: int) -> bool:
        return number in self._replicas

    def state(self, number: int) -> ReplicaState:
        """Return the state of a replica."""
        return self._replicas[number].state

    def numbers(self, *states: ReplicaState) -> list[int]:
        """Return the replicas in these states, the oldest first."""
        return [number for number, replica in self._replicas.items() if replica.state in states]

    # Events ------------------------------------------------------------------------------------------

    def adopt(self, number: int) -> None:
        """Count a replica that was started earlier; it counts as starting until it is reported as up."""
        assert number not in self._replicas
        self._replicas[number] = _Replica("starting")
        self.wanted = self._bounded(max(self.wanted, len(self.numbers("starting", "up"))))

    def came_up(self, number: int, now_s: float) -> None:
        """Record that a replica takes jobs. One that is to be ended stays so."""
        if self._replicas[number].state == "starting":
            self._become(number, "up")
            self._replicas[number].up_at_s = now_s

    def drained(self, number: int) -> list[ReplicaOrder]:
        """Record that a replica gets no jobs any more and has none; return the order to end it."""
        if number not in self._replicas or self.state(number) == "ending":
            return []
        self._become(number, "ending")
        return [EndReplica(number)]

    def ended(self, number: int, now_s: float) -> None:
        """Record that a replica is gone, requested or not. It is replaced if it was not."""
        replica = self._replicas.pop(number)
        if replica.up_at_s is not None and now_s - replica.up_at_s >= STEADY_S:
            self._backoff.reset()
        elif replica.state in ("starting", "up"):
            self._retry_at_s = now_s + self._backoff.take()

    # Decisions ---------------------------------------------------------------------------------------

    def tick(self, now_s: float, load: ModelLoad) -> list[ReplicaOrder]:
        """Return what is to be done now."""
        self.wanted = self._bounded(self.wanted)
        self._scale(now_s, load)
        running = self.numbers("starting", "up")
        surplus = max(len(running) - self.wanted, 0)
        orders: list[ReplicaOrder] = [
            self._retire(number) for number in self._unnecessary(running, load)[:surplus]
        ]
        if now_s >= self._retry_at_s:
            missing = min(self.wanted - len(running), self.rules.max - len(self._replicas))
            orders += [self._launch() for _ in range(missing)]
        return orders

    def retire_all(self) -> list[ReplicaOrder]:
        """Drain or end all replicas: the model is not configured any more, or in another way."""
        return [self._retire(number) for number in self.numbers("starting", "up")]

    def _scale(self, now_s: float, load: ModelLoad) -> None:
        """Change the wanted number by one, if there is reason to."""
        starting, up = self.numbers("starting"), self.numbers("up")
        is_overloaded = load.wait_s > self.rules.target_wait_s if up else load.waiting > 0
        overloaded_s = self._overloaded.held_for_s(now_s, holds=is_overloaded and not starting)
        is_needed = overloaded_s >= self.rules.up_after_s or (overloaded_s >= 0 and not self.wanted)
        has_room = self.wanted < self.rules.max and len(self._replicas) < self.rules.max
        if is_needed and has_room and len(up) >= self.wanted:
            self.wanted += 1
            self._overloaded.restart()
        is_spare = self.wanted > self.rules.min and self._has_spare(starting, up, load)
        spare_s = self._spare.held_for_s(now_s, holds=is_spare and not self.numbers("draining"))
        if spare_s >= self.rules.down_after_s:
            self.wanted -= 1
            self._spare.restart()

    def _has_spare(self, starting: list[int], up: list[int], load: ModelLoad) -> bool:
        """Return whether the jobs would have seats to spare without one replica."""
        if load.waiting:
            return False
        rest = up if starting else self._unnecessary(up, load)[1:]
        busy = sum(load.busy.get(number, 0) for number in up)
        return busy <= FULL_ENOUGH * sum(load.seats.get(number, 0) for number in rest)

    def _unnecessary(self, numbers: list[int], load: ModelLoad) -> list[int]:
        """Return the replicas in the order in which they are given up: starting, idle, new ones first."""
        return sorted(numbers, key=lambda each: (self.state(each) == "up", load.busy.get(each, 0), -each))

    def _launch(self) -> LaunchReplica:
        number = next(self._numbers)
        self._replicas[number] = _Replica("starting")
        return LaunchReplica(number)

    def _retire(self, number: int) -> DrainReplica | EndReplica:
        if self.state(number) == "starting":
            self._become(number, "ending")
            return EndReplica(number)
        self._become(number, "draining")
        return DrainReplica(number)

    def _become(self, number: int, state: ReplicaState) -> None:
        before = self._replicas[number].state
        assert (before, state) in TRANSITIONS, f"a replica cannot go from {before} to {state}"
        self._replicas[number].state = state

    def _bounded(self, wanted: int) -> int:
        return min(max(wanted, self.rules.min), self.rules.max)
