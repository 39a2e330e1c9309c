"""A whole server in virtual time: a supervisor or a lease, dispatchers, fronts and engines, and their faults.

The supervisor starts a dispatcher again when it has ended, and kills one that is stopped for long. With a
lease, there are two addresses; the lease of a dispatcher that is stopped expires, and another one leads.
"""

from functools import partial

import trio

from distributed.frontends.network import Connection
from distributed.frontends.simulated_engine import Engine
from distributed.frontends.simulated_processes import DispatcherProcess, Front
from fairlead.base.grant import FIRST_GRANT, Grant
from fairlead.distributed.frontends.server import AWAY_S, GRACE_S
from fairlead.distributed.ipc.handshake import HandshakeFailed
from fairlead.distributed.lease.term import Term

START_S = 0.7  # of a process
DISPATCHER_START_S = 0.75
LEASE_S = 2.0
DIFFERS_AT_MOST = 4  # times in a row that the two sides are compared, 0.25 s apart
STUCK_S = 5.0  # after which the supervisor kills
HANDSHAKE_S = 5.0


class SimulatedServer:
    """All processes. `problems` collects violations; `on_step` is called at each step of a frame."""

    def __init__(self, nursery, plan, problems, on_step):
        self.nursery = nursery
        self.plan = plan
        self.problems = problems
        self.on_step = partial(self._observe, on_step)
        self.epoch = 0
        self.addresses = [None, None] if plan.has_lease else [None]
        self.fronts = {}
        self.dead_fronts_ended = 0
        # Of fronts that a dispatcher gave up: they may declare the same jobs again when they return.
        self.counted_again = 0
        self.charged_again = 0
        self.grants = {}
        make = partial(Engine, nursery, on_step=self.on_step, problems=problems, is_current=self._is_current)
        self.engines = [make(node_id=name, seats=seats) for name, seats in plan.seats.items()]
        self.by_id = {engine.node_id: engine for engine in self.engines}
        self._numbers = 0

    def _observe(self, on_step, kind, moment):
        on_step(kind, moment)
        for front in self.fronts.values():
            if front.client.epoch < front.epoch:
                self.problems.append(f"{front.name} has followed {front.client.epoch} after {front.epoch}")
            front.epoch = front.client.epoch

    # Dispatchers -------------------------------------------------------------------------------------

    @property
    def leader(self):
        """The dispatcher that leads, if there is one. It may be stopped."""
        alive = [found for found in self.addresses if found is not None and found.process.is_alive]
        leading = [found for found in alive if found.term.is_valid()]
        return max(leading, key=lambda found: found.epoch, default=None)

    def start(self):
        for engine in self.engines:
            engine.start(FIRST_GRANT)
        self.start_dispatcher(())
        for _ in range(self.plan.fronts):
            self.start_front()
        self.nursery.start_soon(self.watch)

    def start_dispatcher(self, expected):
        self.epoch += 1
        for engine in self.engines:
            engine.raise_epoch(self.epoch)
        term = Term(self.epoch, now_s=trio.current_time)
        started = DispatcherProcess(self, self.epoch, expected, term)
        self.addresses[self.epoch % len(self.addresses)] = started
        self.nursery.start_soon(started.run)

    def kill_dispatcher(self, found=None):
        found = found or self.leader
        if found is None:
            return
        is_leader = found is self.leader
        found.process.kill()
        for connection in found.streams.values():
            connection.end_of(connection.theirs)
        if is_leader:
            self.nursery.start_soon(
                self._replace_dispatcher, LEASE_S if self.plan.has_lease else DISPATCHER_START_S
            )

    def stop_dispatcher(self, seconds):
        if (found := self.leader) is None or found.process.is_stopped:
            return
        found.process.stop()
        self.nursery.start_soon(self._resume_dispatcher, found, seconds)
        if self.plan.has_lease and seconds > LEASE_S:
            self.nursery.start_soon(self._expire, found)

    async def _replace_dispatcher(self, after_s):
        await trio.sleep(after_s)
        if self.leader is None:
            names = tuple(front.name for front in self.fronts.values() if front.client.epoch)
            self.start_dispatcher(None if self.plan.has_lease else names)

    async def _expire(self, found):
        await trio.sleep(LEASE_S)
        if found.process.is_alive:
            found.term.end()
            self.start_dispatcher(None)

    async def _resume_dispatcher(self, found, seconds):
        if not self.plan.has_lease and seconds >= STUCK_S:
            await trio.sleep(STUCK_S)
            if found.process.is_alive:
                self.kill_dispatcher(found)
            return
        await trio.sleep(seconds)
        found.process.resume()
        if not found.term.is_valid():  # it notices, and ends
            await trio.sleep(self.plan.notices_after_s)
            if found.process.is_alive:
                self.kill_dispatcher(found)

    def record_grant(self, found, ticket):
        found.grant(ticket)
        grant = found.dispatcher._waiters[ticket].grant
        self.grants[grant] = ticket.node.id, found.runs[ticket.node.id]

    def _is_current(self, engine, grant):
        """Return whether the dispatcher counts the seat: not if it has given up the front meanwhile."""
        node_id, run = self.grants[grant]
        if node_id != engine.node_id:
            self.problems.append(f"wrong node: {grant} of {node_id} at {engine.node_id}")
        if run not in (engine.run, None):
            self.problems.append(f"wrong run: {grant} of run {run} at {engine.process.name}")
        return run == engine.run

    # What a dispatcher may forget --------------------------------------------------------------------

    def gives_up(self, server, name):
        """Check that a dispatcher ends the jobs of a front only after its end or a long absence."""
        front = self.fronts.get(name)
        if front is None:
            return
        connection = server.process.streams.get(name)
        away_s = 0.0 if connection is None else trio.current_time() - connection.theirs.closed_at
        if away_s < AWAY_S - 0.01:
            self.problems.append(f"given up: {name} was away for {away_s:.2f} s only")
        self.counted_again += front.ended
        self.charged_again += len(front.quotas._running) + len(front.quotas._asking)
        self._uncount(front)

    def grace_ends(self, server):
        """Uncount the jobs of fronts that have not declared them within the grace time."""
        if server.process.began_at + GRACE_S - 0.01 > trio.current_time():
            return
        for front in self.fronts.values():
            if server._missing is None or front.name in server._missing:
                self._uncount(front)

    def check_order(self, server):
        """Check that waiting jobs have the order in which they arrived at their fronts."""
        arrived_at = {
            job.spec.request_id: job.arrived_at
            for front in self.fronts.values()
            for job in front.client._jobs.values()
        }
        queue = server._dispatcher.scheduler._queue
        found = [arrived_at.get(ticket.job.request_id) for ticket in queue if not ticket.attempts]
        arrivals = [each for each in found if each is not None]
        if self.plan.keeps_order and arrivals != sorted(arrivals):
            self.problems.append(f"order: waiting jobs arrived at {arrivals}")

    async def watch(self):
        """Check that both sides have the same seats and charges while no connection has a fault."""
        differing = 0
        while True:
            await trio.sleep(0.25)
            leader = self.leader
            differing = 0 if leader is None or not self._is_steady(leader) else differing + 1
            if differing and self._differences(leader) is None:
                differing = 0
            if differing > DIFFERS_AT_MOST:
                self.problems.append(f"differs: {self._differences(leader)}")
                return

    def _is_steady(self, leader):
        return (
            not leader.process.is_stopped
            and leader.server._early is None
            and all(
                front.client.is_connected
                and front.client.epoch == leader.epoch
                and not front.process.is_stopped
                and not front.connection.is_cut
                and not front.connection.is_deaf
                and not front.connection.delay_s
                for front in self.fronts.values()
            )
        )

    def _differences(self, leader):
        for name, front in self.fronts.items():
            at_front = {number: job.seat.grant for number, job in front.client._jobs.items() if job.seat}
            jobs = leader.server._fronts[name].jobs
            at_server = {number: job.grant for number, job in jobs.items() if job.has_seat}
            if at_front != at_server:
                return f"{name} has the seats {at_front}, and the dispatcher {at_server}"
            charges = leader.quotas._charges.get(name, {}).keys()
            if front.quotas._running.keys() != charges:
                return f"{name} has the charges {list(front.quotas._running)}, and the dispatcher {charges}"
        return None

    def _uncount(self, front):
        for connection in front.engines.values():
            for sequence in connection.sequences:
                sequence.is_counted = False
        for job in front.client._jobs.values():
            if job.seat is not None and job.seat.grant is not None:
                self.grants[job.seat.grant] = job.seat.node_id, None

    # Fronts ------------------------------------------------------------------------------------------

    def start_front(self):
        self._numbers += 1
        front = Front(self, f"front {self._numbers}")
        self.fronts[front.name] = front
        self.nursery.start_soon(front.run)
        return front

    def kill_front(self, front, *, is_reported=True):
        if self.fronts.pop(front.name, None) is None:
            return
        self.dead_fronts_ended += front.ended
        front.process.kill()
        if front.connection is not None:
            front.connection.end_of(front.connection.ours)
        for end in front.on_death:
            end()
        for connection in front.engines.values():
            connection.end()
        if is_reported and (leader := self.leader) is not None:
            leader.process.post(partial(leader.server.end_front, front.name))
        self.nursery.start_soon(self._replace_front)

    async def _replace_front(self):
        await trio.sleep(START_S)
        self.start_front()

    async def connect(self, front, address):
        await trio.lowlevel.checkpoint()
        await front.process.running()
        found = self.addresses[address]
        if found is None or not found.process.is_alive or found.nursery is None or front.is_blocked:
            raise OSError("no dispatcher")
        with trio.move_on_after(HANDSHAKE_S):
            await found.process.running()
        if found.process.is_stopped or not found.process.is_alive or not front.process.is_alive:
            raise HandshakeFailed("no answer")
        connection = Connection(self.on_step, front.process, found.process)
        front.connection = found.streams[front.name] = connection
        found.nursery.start_soon(found.server.serve, connection.theirs, front.name)
        return connection.ours

    # Engines -----------------------------------------------------------------------------------------

    def kill_engine(self, engine, reports_after_s):
        if engine.is_up:
            engine.die()
            self.nursery.start_soon(self._replace_engine, engine, reports_after_s)

    async def _replace_engine(self, engine, reports_after_s):
        await trio.sleep(reports_after_s)
        self._tell(lambda found: found.node_down(engine.node_id))
        await trio.sleep(START_S)
        engine.start(self._next_grant())
        self._tell(lambda found: found.node_up(engine.node_id, engine.run, engine.seats))

    def _next_grant(self):
        """Return the next grant of the dispatcher that starts the engine: this one, or the next one."""
        started = [found for found in self.addresses if found is not None and found.epoch == self.epoch]
        if started and started[0].process.is_alive:
            return started[0].dispatcher.next_grant
        return Grant(self.epoch + 1, 0)

    def _tell(self, action):
        for found in self.addresses:
            if found is not None and found.process.is_alive:
                found.process.post(partial(action, found))
