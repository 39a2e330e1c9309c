"""A leader and standbys, each with its own network to a real Redis. The networks break and heal."""

import gc
from random import Random
from typing import get_args

import pytest
import trio

pytest.importorskip("coredis")

from distributed.lease.election import Election, until
from distributed.lease.partition import Mode, Partition
from distributed.lease.test_redis import Server
from distributed.lease.test_redis import pytestmark as needs_redis
from fairlead.distributed.lease import StoredLease, redis

DURATION_S = 0.4
MACHINES = 3
# A claim is followed by a wait for one duration, and that by polls; the rest is for a slow machine.
LEADS_WITHIN_S = 2 + 2 * DURATION_S

pytestmark = [pytest.mark.slow, *needs_redis]


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.stop()
    gc.collect()  # while the warnings of coredis are ignored


class Machine:
    """A machine, the network between it and Redis, and its clock, which may jump ahead."""

    def __init__(self, server):
        self.network = Partition(server.port, delay_s=1.5 * DURATION_S)
        self.jumped_s = 0.0

    def lease(self):
        url = f"redis://:se%2Fcret@127.0.0.1:{self.network.port}/2"
        return StoredLease(
            lambda: redis.connect(url, "test:lease"),
            duration_s=DURATION_S,
            least_epoch=redis.least_epoch,
            now_s=lambda: trio.current_time() + self.jumped_s,
            waited_s=trio.current_time,
        )


@pytest.mark.parametrize("mode", [mode for mode in get_args(Mode) if mode != "open"])
async def test_there_is_one_leader_while_networks_break_and_one_soon_after_they_heal(mode, server):
    random, election = Random(mode), Election()
    machines = [Machine(server) for _ in range(MACHINES)]
    async with trio.open_nursery() as nursery:
        for machine in machines:
            await nursery.start(machine.network.run)
            nursery.start_soon(election.run, machine.lease)
        await election.wait_for_leader(LEADS_WITHIN_S)
        for _ in range(4):
            for machine in random.sample(machines, random.randint(1, MACHINES)):
                machine.network.change(mode)
            await trio.sleep(random.uniform(0.2, 3) * DURATION_S)
            if random.random() < 0.3:
                election.stop_leader()
            random.choice(machines).jumped_s += random.uniform(0, 2) * DURATION_S
            for machine in machines:
                machine.network.change("open")
            await election.wait_for_leader(LEADS_WITHIN_S)
        nursery.cancel_scope.cancel()
    assert len(election.terms) >= 2


async def test_leader_that_is_cut_off_ends_its_term_before_the_standby_leads(server):
    election = Election()
    machines = [Machine(server) for _ in range(2)]
    async with trio.open_nursery() as nursery:
        await nursery.start(machines[0].network.run)
        nursery.start_soon(election.run, machines[0].lease)
        await election.wait_for_leader(LEADS_WITHIN_S)
        await nursery.start(machines[1].network.run)
        nursery.start_soon(election.run, machines[1].lease)
        await trio.sleep(DURATION_S)
        (first,) = election.terms
        machines[0].network.change("half-open")
        await until(lambda: not first.is_valid(), LEADS_WITHIN_S)
        await election.wait_for_leader(LEADS_WITHIN_S)
        assert [term.is_valid() for term in election.terms] == [False, True]
        nursery.cancel_scope.cancel()
