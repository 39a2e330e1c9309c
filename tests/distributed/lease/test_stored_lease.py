"""Leases over a store whose network loses, delays and repeats, in virtual time."""

from contextlib import asynccontextmanager
from itertools import count
from random import Random

import pytest
import trio

from distributed.lease.election import Election, unwrapped_loss
from fairlead.distributed.lease import LeaseLost, StoredLease
from fairlead.distributed.lease.contender import LeaseRecord
from fairlead.distributed.lease.lease import StoreFailed

DURATION_S = 3.0


class MemoryStore:
    """The record, behind a network with random faults as long as it `is_faulty`."""

    def __init__(self, random, nursery):
        self.record = None
        self.is_faulty = True
        self.writes = []
        self._random = random
        self._nursery = nursery
        self._versions = count(1)

    @asynccontextmanager
    async def connect(self):
        yield self

    async def read(self):
        return await self._exchange(lambda: self.record)

    async def replace(self, write):
        return await self._exchange(lambda: self._replace(write))

    def _replace(self, write):
        if self.record != write.previous:
            return None
        self.writes.append(write)
        self.record = LeaseRecord(write.holder, write.epoch, write.duration_s, str(next(self._versions)))
        return self.record

    async def _exchange(self, execute):
        if not self.is_faulty:
            await trio.sleep(0.001)
            return execute()
        kind = self._random.choice(("fast", "fast", "slow", "lost", "cut", "reply lost", "late"))
        if kind == "cut":
            raise StoreFailed("cut")
        if kind == "late":  # executed when its sender has given it up
            self._nursery.start_soon(self._execute_late, execute, self._random.uniform(0.5, 9))
        if kind in ("lost", "late"):
            await trio.sleep_forever()
        await trio.sleep(self._random.uniform(0, 1) if kind == "slow" else 0.001)
        result = execute()
        if kind == "reply lost":
            raise StoreFailed("reply lost")
        await trio.sleep(self._random.uniform(0, 1) if kind == "slow" else 0.001)
        return result

    async def _execute_late(self, execute, delay_s):
        await trio.sleep(delay_s)
        execute()


def lease_of(store, rate=1.0):
    def now_s():
        return rate * trio.current_time()

    return StoredLease(store.connect, duration_s=DURATION_S, now_s=now_s, waited_s=now_s)


@pytest.mark.parametrize("seed", range(6))
async def test_there_is_one_leader_whatever_the_network_does_and_one_soon_after_it_works(
    seed, autojump_clock
):
    random, election = Random(seed), Election()
    async with trio.open_nursery() as nursery:
        store = MemoryStore(random, nursery)
        for rate in (0.96, 1.0, 1.04):
            nursery.start_soon(election.run, lambda rate=rate: lease_of(store, rate))
        for _ in range(10):
            store.is_faulty = True
            await trio.sleep(random.uniform(0, 10) * DURATION_S)
            election.stop_leader()
            store.is_faulty = False
            await election.wait_for_leader(2.5 * DURATION_S)
        nursery.cancel_scope.cancel()
    assert len(election.terms) >= 5


async def test_leader_renews_four_times_per_duration_and_keeps_its_epoch(autojump_clock):
    async with trio.open_nursery() as nursery:
        store = MemoryStore(Random(0), nursery)
        store.is_faulty = False
        term = await nursery.start(lease_of(store).hold)
        before = len(store.writes)
        await trio.sleep(10 * DURATION_S)
        assert len(store.writes) - before == pytest.approx(40, abs=1)
        assert {write.epoch for write in store.writes[before:]} == {term.epoch}
        nursery.cancel_scope.cancel()
    assert store.record.holder == ""


async def test_lease_whose_record_another_has_written_is_lost_and_not_released(autojump_clock):
    async with trio.open_nursery() as outer:
        store = MemoryStore(Random(0), outer)
        store.is_faulty = False
        anothers = LeaseRecord("another", 99, DURATION_S, "x")
        with pytest.raises(LeaseLost), unwrapped_loss():  # noqa: PT012
            async with trio.open_nursery() as nursery:
                term = await nursery.start(lease_of(store).hold)
                store.record = anothers
        assert not term.is_valid()
        assert store.record == anothers


async def test_term_ends_by_its_clock_before_the_standby_may_lead(autojump_clock):
    jumped_s = 0.0
    async with trio.open_nursery() as outer:
        store = MemoryStore(Random(0), outer)
        store.is_faulty = False
        lease = StoredLease(
            store.connect,
            duration_s=DURATION_S,
            now_s=lambda: trio.current_time() + jumped_s,
            waited_s=trio.current_time,
        )
        with pytest.raises(LeaseLost), unwrapped_loss():  # noqa: PT012
            async with trio.open_nursery() as nursery:
                term = await nursery.start(lease.hold)
                jumped_s = 1000.0
                assert not term.is_valid()
        outer.cancel_scope.cancel()
