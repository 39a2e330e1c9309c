"""How long steps take, and how much of a prompt a step may compute so that it does not take longer.

Pure: times are passed in. A step's time is a sum of parts: a constant (the weights are read once), one for
each decode, one for each token of a prompt, and one for each of those tokens and each token before it, which
it attends to. Their costs are estimated while the engine runs, because they depend on the machine, its other
load and the model.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

# The parts of a step in units of which each takes milliseconds, so that no part dominates the estimate.
_UNITS = np.array([1.0, 8.0, 128.0, 128.0 * 1024.0])
# How much the past counts: a measurement 100 steps ago has a third of the weight of the latest.
_FORGETTING = 0.99
# Bound on the uncertainty, which would grow without end while all steps are alike.
_MOST_UNCERTAINTY = 100.0
# A step that took longer than so many times what was expected was interrupted, and is counted as that long.
_OUTLIER = 3.0
# So many steps with chunks are measured before a chunk may be longer than this many blocks.
_LEARNING_STEPS, _LEARNING_BLOCKS = 3, 4
# How long a tenant counts as present after its latest sequence was submitted.
_PRESENCE_S = 10.0
# Decodes alone may take longer than the target. Then a chunk may add this part of their time, or prompts
# would get through one block at a time.
_LEAST_PART = 0.5
# Beside other tenants a step takes at most so many times what it costs without prompts: a longer one is
# hardly more efficient. But not less than the least target: costs of quick models are hard to estimate.
_MOST_TIMES, _LEAST_TARGET_S = 10.0, 0.008


class StepWork(NamedTuple):
    """What a step computes.

    decodes: tokens of sequences that decode, drafts included.
    tokens: tokens of prompts.
    context: how many tokens are before these, on average.
    """

    decodes: int
    tokens: int
    context: float


class StepCost:
    """The estimated cost of each part of a step: recursive least squares with exponential forgetting."""

    def __init__(self) -> None:
        self.measured_chunks = 0
        self._costs: Vector = np.zeros(4)
        self._uncertainty = np.eye(4) * _MOST_UNCERTAINTY / 4
        self._measured = 0

    def learn(self, work: StepWork, took_s: float) -> None:
        """Record how long a step took."""
        parts = _parts(work)
        if self._measured >= 2 * _LEARNING_STEPS:
            took_s = min(took_s, _OUTLIER * max(self.of(work), 1e-4))
        self._measured += 1
        self.measured_chunks += work.tokens > 0
        towards = self._uncertainty @ parts
        gain = towards / (_FORGETTING + parts @ towards)
        self._costs += gain * (took_s - self._costs @ parts)
        self._uncertainty = (self._uncertainty - np.outer(gain, towards)) / _FORGETTING
        excess = float(np.trace(self._uncertainty)) / _MOST_UNCERTAINTY
        if excess > 1.0:
            self._uncertainty /= excess

    def of(self, work: StepWork) -> float:
        """Return how long a step is expected to take, in seconds. No part costs less than nothing."""
        return float(np.maximum(self._costs, 0.0) @ _parts(work))

    def tokens_within(self, time_s: float, context: float) -> float:
        """Return how many tokens of a prompt take so long, after `context` tokens."""
        one = self.of(StepWork(0, 1, context)) - self.of(StepWork(0, 0, 0.0))
        return time_s / one if one > 0.0 else float("inf")


class Pace:
    """Chooses the tokens of prompts in a step, so that it takes about `target_s`.

    The order of the calls is `begin`, `tokens`, then `planned`, for each step; or `pause` if there is none.
    The time of a step is that from its `begin` to the next. If another step was under way at its `begin`,
    that time is how long the other one took: the device computes one after another.
    """

    def __init__(self, target_s: float, block_size: int) -> None:
        self.cost = StepCost()
        self._target_s = target_s
        self._block_size = block_size
        self._begun_at_s: float | None = None
        self._measuring: StepWork | None = None  # what is computed from the latest `begin` to the next
        self._latest: StepWork | None = None

    def begin(self, now_s: float) -> None:
        """Begin to plan a step, which ends the measurement of another."""
        if self._begun_at_s is not None and self._measuring is not None:
            self.cost.learn(self._measuring, now_s - self._begun_at_s)
        self._begun_at_s = now_s

    def planned(self, work: StepWork, *, under_way: int) -> None:
        """Record what the step computes; `under_way`: how many others are not committed."""
        self._measuring = self._latest if under_way else work
        self._latest = work

    def pause(self) -> None:
        """Record that no step was planned: the time until the next one is nobody's."""
        self._begun_at_s = self._measuring = None

    def tokens(self, decodes: int, context: float, *, is_shared: bool = False) -> int:
        """Return how many tokens of prompts the step may have beside its decodes: at least a block.

        `is_shared`: another tenant may wait for its end.
        """
        alone_s = self.cost.of(StepWork(decodes, 0, 0.0))
        target_s = self._target_s
        if is_shared:
            target_s = min(target_s, max(_LEAST_TARGET_S, _MOST_TIMES * alone_s))
        time_s = max(target_s - alone_s, _LEAST_PART * alone_s)
        blocks = self.cost.tokens_within(time_s, context) / self._block_size
        if self.cost.measured_chunks < _LEARNING_STEPS:
            blocks = min(blocks, _LEARNING_BLOCKS)
        return self._block_size * int(max(1.0, min(blocks, 1e6)))


class Presence:
    """Which tenants have submitted sequences lately."""

    def __init__(self) -> None:
        self._new: set[Hashable] = set()  # since the latest step
        self._seen_at_s: OrderedDict[Hashable, float] = OrderedDict()  # the latest one is last

    def add(self, tenant: Hashable) -> None:
        """Record that a tenant has submitted a sequence."""
        self._new.add(tenant)

    def is_shared(self, tenants: Collection[Hashable], now_s: float) -> bool:
        """Return whether there are several tenants, together with those of a step."""
        for tenant in self._new:
            self._seen_at_s[tenant] = now_s
            self._seen_at_s.move_to_end(tenant)
        self._new.clear()
        while self._seen_at_s and now_s - next(iter(self._seen_at_s.values())) > _PRESENCE_S:
            self._seen_at_s.popitem(last=False)
        return len({*tenants, *islice(self._seen_at_s, 2)}) > 1


class ChunkTurns:
    """Divides the tokens of prompts in a step among tenants."""

    def __init__(self) -> None:
        self._served: dict[Hashable, int] = {}  # the step in which each tenant was first, among those present
        self._steps = 0

    def divide(self, total: int, wanted: Sequence[tuple[Hashable, int]], least: int) -> list[int]:
        """Return how many tokens each prompt gets, of `total`.

        `wanted` has the tenant and the length of each, in their order. Tenants get equal parts, in portions
        of at least `least` tokens, and what one does not need the others get. Within a tenant the first
        prompt gets all that it needs. When a portion each is too much, tenants take turns between steps.

            A 900, B 40, A 30; total 100, least 16 → A 60, B 40, A 0
        """
        self._steps += 1
        left: dict[Hashable, int] = {}
        for tenant, tokens in wanted:
            left[tenant] = left.get(tenant, 0) + tokens
        self._served = {tenant: self._served.get(tenant, 0) for tenant in left}
        order = sorted(left, key=self._served.__getitem__)  # stable: equals in the order of their prompts
        parts = dict.fromkeys(left, 0)
        while total > 0 and order:
            portion = max(least, total // len(order))
            for tenant in order:
                taken = min(portion, left[tenant], total)
                if taken:
                    self._served[tenant] = self._steps
                left[tenant] -= taken
                parts[tenant] += taken
                total -= taken
            order = [tenant for tenant in order if left[tenant]]
        given = []
        for tenant, tokens in wanted:
            given.append(min(tokens, parts[tenant]))
            parts[tenant] -= given[-1]
        return given


def _parts(work: StepWork) -> Vector:
    parts: Vector = np.array([1.0, work.decodes, work.tokens, work.tokens * work.context]) / _UNITS
    return parts
