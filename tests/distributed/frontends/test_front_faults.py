"""Fronts, their connections and the dispatcher fail at random moments: no seat is lost or given twice.

Each test runs a number of seeds. The oracle counts what the fronts' tasks really hold, and at the end nothing
may be left anywhere.
"""

from collections import Counter
from random import Random

import pytest
import trio
import trio._core._run as trio_run

from distributed.frontends.system import System, settle, spec
from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError
from fairlead.distributed.frontends.server import FrontServer
from fairlead.router.dispatch.waiter import SeatLoss

NODES = {"x": 1, "y": 2}
SEEDS = range(40)
SEEDS_OF_A_MUTANT = 200
EVENTS = 25


class Trial:
    """One run from a seed. `results` has how each job ended; jobs of killed fronts have no result."""

    def __init__(self, nursery, seed, make_server=FrontServer):
        self.random = Random(seed)
        self.nursery = nursery
        self.system = System(
            nursery, NODES, queue=QueueConfig(capacity=50, timeout_s=60.0), server=make_server
        )
        self.results = Counter()
        self.submitted = 0
        self.lost = 0
        self.next_front = 3

    async def run(self):
        self.system.start_dispatcher()
        for number in range(3):
            self.system.start_front(number)
        await trio.sleep(1)
        for _ in range(EVENTS):
            self.event()
            for _ in range(self.random.choice([0, 1, 2, 20])):
                await trio.lowlevel.checkpoint()  # somewhere within the steps of the last events
            if self.random.random() < 0.3:
                await trio.sleep(self.random.choice([0.01, 0.2, 2.0]))
            self.check()
        await trio.sleep(80)
        await self.check_end()

    def event(self):
        kind = self.random.choices(
            [self.submit, self.cut, self.replace_dispatcher, self.replace_front], [8, 2, 1, 0.5]
        )[0]
        kind()

    def submit(self):
        number = self.random.choice(list(self.system.fronts))
        front = self.system.fronts[number]
        job = spec(self.random.choice("ABC"), f"r{self.submitted}")
        self.submitted += 1
        plan = (
            self.random.choice([0.0, 0.1, 1.0, 2.0]),
            self.random.choice([None, None, 0.05, 3.0]),
            self.random.random() < 0.2,
        )
        self.system.spawn(front, self.client, front, job, *plan)

    async def client(self, front, job, seconds, leaves_after_s, fails):
        result = "lost"
        try:
            with trio.move_on_after(leaves_after_s if leaves_after_s is not None else 1e9) as leaving:
                async with front.seat(job) as seat:
                    await self.hold(seat, seconds / 2)
                    if fails:
                        await seat.requeue(SeatLoss("full" if self.random.random() < 0.5 else "failed"))
                    seat.begin(lambda: 1)
                    await self.hold(seat, seconds / 2)
                result = "served"
            if leaving.cancelled_caught:
                result = "left"
        except FairleadError as error:
            result = error.code
        finally:
            self.results[result] += 1

    async def hold(self, seat, seconds):
        node = seat.node_id
        self.system.held[node] += 1
        try:
            await trio.sleep(seconds)
        finally:
            self.system.held[node] -= 1

    def cut(self):
        self.system.cut(self.system.fronts[self.random.choice(list(self.system.fronts))])

    def replace_dispatcher(self):
        self.system.kill_dispatcher()
        self.nursery.start_soon(self.start_later, self.random.choice([0.0, 0.3, 2.0]))

    async def start_later(self, seconds):
        await trio.sleep(seconds)
        if not self.system.is_up:
            names = [f"front {number}" for number in self.system.fronts]
            self.system.start_dispatcher(expected=self.random.choice([None, names]))
            await settle()

    def replace_front(self):
        number = self.random.choice(list(self.system.fronts))
        self.system.kill_front(number)
        if self.system.is_up:
            self.system.server.end_front(f"front {number}")
        self.system.start_front(self.next_front)
        self.next_front += 1

    def check(self):
        for node, seats in NODES.items():
            assert self.system.held[node] <= seats, f"{node} has {self.system.held[node]} jobs"

    async def check_end(self):
        assert sum(self.results.values()) == self.submitted
        assert set(self.results) <= {"served", "left", "lost"}
        assert +self.system.held == Counter()
        counts = self.system.dispatcher.statistics()
        assert (counts.waiting, counts.running) == (0, 0)
        assert [len(front) for front in self.system.fronts.values()] == [0] * len(self.system.fronts)
        assert [front.jobs for front in self.system.server.fronts] == [{}] * len(self.system.fronts)


@pytest.fixture(autouse=True)
def ordered(monkeypatch):
    """Let Trio run tasks in an order that the seed of a trial decides."""
    monkeypatch.setattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)


async def run_trial(seed, make_server=FrontServer):
    trio_run._r.seed(seed)
    async with trio.open_nursery() as nursery:
        await Trial(nursery, seed, make_server).run()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_seat_is_lost_or_given_twice(seed, autojump_clock):
    await run_trial(seed)


class GrantsAtOnce(FrontServer):
    """Mutant: does not wait for the other fronts' declarations."""

    async def run(self):
        self._all_declared.set()
        await super().run()


class ForgetsUndeclared(FrontServer):
    """Mutant: keeps jobs that the front does not declare."""

    def _end_declaration(self, front, counters):
        front.undeclared = set()
        super()._end_declaration(front, counters)


class DoesNotReportAgain(FrontServer):
    """Mutant: a grant of the time without a connection is not sent."""

    def _declare(self, front, declared):
        if declared.number in front.jobs:
            front.undeclared.discard(declared.number)
        else:
            super()._declare(front, declared)


class EndsJobsWithTheConnection(FrontServer):
    """Mutant: a front that is away loses its seats at once."""

    async def _wait_for(self, front):
        for job in list(front.jobs.values()):
            self._end(job)


class RestoresNoSeats(FrontServer):
    """Mutant: submits a job that has a seat as if it waited."""

    def _declare(self, front, declared):
        if declared.number in front.jobs:
            super()._declare(front, declared)
        else:
            job = self._new_job(front, declared.number, declared.job)
            self._submit(job, declared.age_s)


MUTANTS = [
    GrantsAtOnce,
    ForgetsUndeclared,
    DoesNotReportAgain,
    EndsJobsWithTheConnection,
    RestoresNoSeats,
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
async def test_mutant_is_caught(mutant, autojump_clock):
    async def run_all():
        for seed in range(SEEDS_OF_A_MUTANT):
            await run_trial(seed, mutant)

    with pytest.raises(BaseExceptionGroup) as caught:
        await run_all()
    assert caught.value.subgroup(AssertionError) is not None
