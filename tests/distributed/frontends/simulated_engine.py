"""An engine in memory that checks grants as the real one does, and fails with all that runs on it."""

from contextlib import contextmanager

import trio

from distributed.frontends.network import Process
from fairlead.base.errors import NodeFailed, NodeFull, StaleGrant
from fairlead.engine.worker.grants import Grants


class Sequence:
    """What a front sees of a job on an engine. `is_counted`: its seat counts for the check of the seats."""

    def __init__(self, connection, grant, job):
        self.connection = connection
        self.grant = grant
        self.job = job
        self.error = None
        self.has_ended = False
        self.is_accepted = False
        self.is_counted = True
        self.scope = trio.CancelScope()
        self.first = trio.Event()
        self.over = trio.Event()

    def fail(self, error):
        if not self.has_ended:
            self.error, self.has_ended = error, True
            self.first.set()
            self.over.set()


class EngineConnection:
    """A front's connection to one run of an engine."""

    def __init__(self, engine, front, number):
        self.engine = engine
        self.front = front
        self.number = number
        self.is_open = True
        self.sequences = {}  # in the order of their submission, so that a run can be repeated

    @contextmanager
    def sequence(self, grant, job):
        """Run a job during the block; abort it if the block ends first."""
        if not self.is_open:
            raise NodeFailed("the engine's connection has ended")
        sequence = Sequence(self, grant, job)
        self.sequences[sequence] = None
        self._send("submit to engine", lambda: self.engine.submit(sequence))
        try:
            yield sequence
        finally:
            if not sequence.has_ended:
                sequence.has_ended = True
                self._send("abort", lambda: self.engine.release(sequence))

    def end(self):
        """End the connection: the engine aborts what runs over it, and the front's jobs fail."""
        if self.is_open:
            self.is_open = False
            for sequence in list(self.sequences):
                sequence.fail(NodeFailed("the engine's connection has ended"))
            self.engine.process.post(lambda: self.engine.forget(self))

    def _send(self, kind, action):
        self.engine.on_step(kind, "sent")
        process = self.engine.process

        def receive():
            action()
            self.engine.on_step(kind, "handled")

        # In the order of all fronts, also while the engine is stopped.
        self.front.process.post(lambda: process.post(receive))


class Engine:
    """A node that dies and is started again. `problems` gets each moment with too many seats taken."""

    def __init__(self, nursery, node_id, seats, on_step, problems, is_current):
        self.node_id = node_id
        self.seats = seats
        self.run = 0
        self.epoch = 0  # the highest that was announced
        self.on_step = on_step
        self._nursery = nursery
        self._problems = problems
        self._is_current = is_current
        self.process = Process(node_id)
        self.process.is_alive = False

    @property
    def is_up(self):
        return self.process.is_alive

    def start(self, first_grant):
        self.run += 1
        self.process = Process(f"{self.node_id}.{self.run}")
        self.grants = Grants(first_grant)
        self._announce(first_grant.epoch)
        self.connections = []
        self.accepted = {}
        self._numbers = 0

    def raise_epoch(self, epoch):
        if self.is_up:
            self.process.post(lambda: self._announce(epoch))

    def _announce(self, epoch):
        self.epoch = epoch
        self.grants.raise_epoch(epoch)

    def die(self):
        self.process.kill()
        for connection in self.connections:
            for sequence in connection.sequences:
                sequence.fail(NodeFailed("the engine has ended"))
            connection.is_open = False
        for sequence in self.accepted:
            sequence.scope.cancel()
        self.accepted = {}

    def attach(self, front):
        """Return a connection. Raises `NodeFull` if the engine is not there."""
        self.on_step("attach", "sent")
        if not self.is_up:
            raise NodeFull(f"{self.node_id} cannot be reached")
        self._numbers += 1
        connection = EngineConnection(self, front, self._numbers)
        self.connections.append(connection)
        self.on_step("attach", "handled")
        return connection

    def submit(self, sequence):
        if sequence.has_ended or not sequence.connection.is_open:
            return
        refusal = self.grants.take(sequence.grant, sequence.connection.number)
        if refusal is not None:
            self.on_step("stale grant", "sent")
            sequence.fail(StaleGrant(refusal))
            return
        if sequence.grant.epoch < self.epoch:
            self._problems.append(f"late grant: {sequence.grant} at an engine that knows epoch {self.epoch}")
        sequence.is_accepted = True
        sequence.is_counted = self._is_current(self, sequence.grant)
        self.accepted[sequence] = None
        counted = [other for other in self.accepted if other.is_counted]
        if sum(other.grant.seats for other in counted) > self.seats:
            grants = [(other.job.name, other.grant) for other in counted]
            self._problems.append(f"seat given twice: {self.process.name} runs {grants}")
        self._nursery.start_soon(self._generate, sequence)

    def release(self, sequence):
        """The job is over, or its front has gone."""
        if sequence in self.accepted:
            del self.accepted[sequence]
            self.grants.release(sequence.grant)
        sequence.scope.cancel()
        sequence.connection.sequences.pop(sequence, None)

    def forget(self, connection):
        for sequence in list(connection.sequences):
            self.release(sequence)

    async def _generate(self, sequence):
        with sequence.scope:
            await trio.sleep(sequence.job.first_s)
            await self.process.running()
            self.on_step("first", "sent")
            sequence.first.set()
            await trio.sleep(sequence.job.rest_s)
            await self.process.running()
            self.on_step("over", "sent")
            if not sequence.has_ended:
                sequence.has_ended = True
                self.release(sequence)
                sequence.over.set()
                self.on_step("over", "handled")
