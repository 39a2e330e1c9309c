"""One run of the real server on a simulated system: a scenario, a quiet period, then the checks.

Subclasses of `Run` define the scenario in `run_clients`.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from random import Random
from typing import ClassVar

import trio
from trio.testing import MockClock

from fairlead.base.config import ConfigError
from fairlead.base.errors import LoadFailed
from simulation import entropy, virtual_time
from simulation.boundary import System
from simulation.deployment import NODE_PORT, NODES, Deployment
from simulation.drawer import Drawer
from simulation.engine_child import ChildPlan
from simulation.exchanges import ClientSession, Exchange
from simulation.fault_injector import FaultInjector
from simulation.final_checks import FinalChecks, Idle, Metrics, instances_of_jobs, measured
from simulation.injected_faults import RECOVERY_S, ChildFaults, Stage
from simulation.ledger import Ledger
from simulation.node_server import NodeServer
from simulation.oracle import Oracle
from simulation.parent import Parent, model_folder
from simulation.verdict import Verdict

# From the last fault to the checks: every backoff, probe and timeout is over by then.
QUIET_S = RECOVERY_S + 60.0
START_S = 10.0
# A scenario lasts an hour at most; every wait of its clients should have ended long before this.
LONGEST_S = 3 * 3600.0
# In addition to the drain, for the models' processes to end.
STOP_SLACK_S = 40.0

Broken = Callable[[], AbstractContextManager[None]]


class Run:
    """One run. Equal seeds give equal runs. `broken` replaces parts of the product."""

    name: ClassVar[str]

    def __init__(
        self, seed: int, deployment: Deployment, *, broken: Broken = nullcontext, keeps_trace: bool = False
    ) -> None:
        self.seed = seed
        self.deployment = deployment
        self.problems: list[str] = []
        self.ledger = Ledger()
        self.random = Random(f"{self.name} {seed}")
        self.child_faults = ChildFaults(Random(f"mood {seed}"))
        self.drawer = Drawer(deployment, Random(f"visits {seed}"))
        self._broken = broken
        self._keeps_trace = keeps_trace
        self._hosts = 0
        self.system: System
        self.parent: Parent
        self.stage: Stage
        self.maker: FaultInjector
        self.metrics: Metrics

    def run(self) -> Verdict:
        """Run it in virtual time; return the verdict."""
        idle_server(is_watched=self.deployment.is_watched)
        gc.collect()
        self._kept_before = Counter(instances_of_jobs())
        gc.disable()
        began_s = time.process_time()
        try:
            verdict = virtual_time.run(self._pass, self.seed)
        finally:
            gc.enable()
        verdict.cpu_s = time.process_time() - began_s
        return verdict

    @property
    def replay(self) -> str:
        """The command that repeats this run."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Set up what must exist before the server starts."""

    async def run_clients(self) -> None:
        """Run the clients and faults. Returns when all have ended."""
        raise NotImplementedError

    # For scenarios -----------------------------------------------------------------------------------

    def client_session(self) -> ClientSession:
        """Return a client at a new address."""
        self._hosts += 1
        host = f"10.0.{3 + self._hosts // 250}.{1 + self._hosts % 250}"
        return ClientSession(self.system.network, self.deployment, host, self.random)

    async def make(self, exchange: Exchange) -> None:
        """Make a request from a new address."""
        client_session = self.client_session()
        await client_session.make(exchange)
        client_session.leave()

    # Phases of a run ---------------------------------------------------------------------------------

    async def _pass(self, clock: MockClock) -> Verdict:
        source = entropy.Source(self.seed, clock.current_time, tick_s=self.random.choice((0.0, 0.0001)))
        entropy.use(source)
        self.system = System(self.seed)
        self.system.machine.keeps_trace = self._keeps_trace
        self._prepare_network()
        self.parent = Parent(
            self.system,
            self.deployment.document,
            plan_of=lambda model: self.child_faults.child(self.deployment, model),
            servers=self.deployment.servers,
            broken=self._broken,
            is_watched=self.deployment.is_watched,
        )
        self.stage = Stage(self.parent, self.deployment, self.child_faults, self.random, source, clock)
        self.maker = FaultInjector(self.stage)
        self.metrics = Metrics(self.drawer, self.make)
        self._oracle = Oracle(self.deployment, self.drawer, self.stage.faults, self.ledger)
        with self.system.installed():
            async with trio.open_nursery() as machine:
                await machine.start(self.system.machine.run)
                self.prepare()
                await machine.start(self.parent.run)
                with trio.move_on_after(LONGEST_S) as bound:
                    if await self._has_started():
                        await self.run_clients()
                        await self._finish()
                if bound.cancelled_caught:
                    self.problems.append(f"a client still waits after {LONGEST_S:g} s")
                machine.cancel_scope.cancel()
        return self._verdict()

    def _prepare_network(self) -> None:
        self.deployment.child.on_tokens = self.ledger.add
        for plan in (*self.deployment.nodes.values(), *self.deployment.servers.values()):
            plan.on_answer = self.ledger.add
        for node, plan in self.deployment.nodes.items():
            self.system.network.serve((NODES[node], NODE_PORT), NodeServer(plan).serve)

    async def _has_started(self) -> bool:
        """Wait until the server listens; return whether it does."""
        with trio.move_on_after(START_S):
            while not (self.system.network.is_listening or self.parent.has_ended.is_set()):  # noqa: ASYNC110
                await trio.sleep(0.01)
        if not self.system.network.is_listening and not self._refused_to_start():
            self.problems.append(f"it does not start: {_shown(self.parent.crash)}")
        return self.system.network.is_listening

    def _refused_to_start(self) -> bool:
        """Return whether it did not start because of a fault that it reported, which is correct."""
        is_allowed = self.system.machine.has_failed_call or any(
            "load_failed" in fault.allowed_errors for fault in self.stage.faults
        )
        reasons = (OSError, ConfigError, LoadFailed, MemoryError)
        reported = all(isinstance(error, reasons) for error in _leaves(self.parent.crash))
        return is_allowed and reported and not self.parent.announcer.is_ready

    async def _finish(self) -> None:
        if not self.parent.has_ended.is_set():
            await trio.sleep(QUIET_S)
            self.problems += await self.metrics.read()
            after = FinalChecks(
                self.system,
                self.deployment,
                self.drawer,
                self.make,
                ledger=self.ledger,
                kept_before=self._kept_before,
                left_stopped=self.child_faults.left_stopped,
            )
            idle = idle_server(is_watched=self.deployment.is_watched)
            self.problems += await after.problems(self.metrics, idle)
        if not self.parent.has_ended.is_set():
            await self._stop()
        elif not self._refused_to_start():
            self.problems.append(f"the server has ended: {_shown(self.parent.crash)}")
        self._check_end()

    async def _stop(self) -> None:
        """Stop the server, perhaps while jobs run."""
        longest_s = self.deployment.document["limits"]["drain"] + STOP_SLACK_S
        async with trio.open_nursery() as people:
            for _ in range(self.random.choice((0, 0, 3))):
                people.start_soon(self.make, self.drawer.draw(self.deployment.people[0]))
            await trio.sleep(self.random.uniform(0.0, 1.5))
            self._oracle.stopped_s = trio.current_time()
            if not await self.parent.stop(longest_s):
                self.problems.append(f"the server does not stop within {longest_s:g} s")
                people.cancel_scope.cancel()
        if self.parent.crash is not None:
            self.problems.append(f"the server ends with {_shown(self.parent.crash)}")

    def _check_end(self) -> None:
        """Check that no descriptor or process is left, however the server ended."""
        if self.system.machine.has_failed_call:
            gc.collect()  # after an error at any line, the garbage collector may have to close a socket
        if self.system.machine.descriptors:
            self.problems.append(f"descriptors are left at the end: {self.system.machine.descriptors}")
        if self.system.processes.running:
            self.problems.append(f"processes are left at the end: {self.system.processes.running}")

    def _verdict(self) -> Verdict:
        if self.parent.crash is None:
            self.problems += self._oracle.problems()
            self.problems += self.system.machine.misuses
        unexpected = any(fault.is_unexpected for fault in self.stage.faults)
        if self.system.log.problems and not unexpected:
            self.problems.append(f"a traceback in the log: {self.system.log.problems[0][:3000]}")
        machine = self.system.machine
        return Verdict(
            name=f"{self.name} {self.seed}",
            replay=self.replay,
            problems=self.problems,
            trace=machine.trace,
            outcomes=Counter(map(_outcome, self.drawer.exchanges)),
            calls=machine.calls,
            recent=list(machine.recent),
        )


@cache
def idle_server(*, is_watched: bool) -> Idle:
    """Return the tasks and descriptors of a server that was never used."""

    async def measure(clock: MockClock) -> Idle:
        entropy.use(entropy.Source(0, clock.current_time))
        system = System(0)
        models = {"alpha": {"path": str(model_folder("alpha"))}}
        document = {"host": "10.0.0.1", "port": 8000, "models": models}
        parent = Parent(system, document, plan_of=lambda _: ChildPlan(), servers={}, is_watched=is_watched)
        with system.installed():
            async with trio.open_nursery() as machine:
                await machine.start(system.machine.run)
                await machine.start(parent.run)
                await trio.sleep(5.0)
                idle = measured(system)
                await parent.stop()
                machine.cancel_scope.cancel()
        return idle

    return virtual_time.run(measure, 0)


def _outcome(exchange: Exchange) -> str:
    if exchange.has_left:
        return "left"
    if exchange.answer is None:
        return "cut"
    return exchange.answer.error or ("ok" if exchange.answer.is_whole else "broken off")


def _leaves(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors of a group except cancellations."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    elif error is not None and not isinstance(error, trio.Cancelled):
        yield error


def _shown(error: BaseException | None) -> str:
    """Return the errors of a group, each with the place in the product where it was raised."""
    return "; ".join(f"{type(leaf).__name__}: {leaf}{_place(leaf)}" for leaf in _leaves(error))


def _place(error: BaseException) -> str:
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/fairlead/" in code.co_filename:
            place = f" in {code.co_filename.rpartition('/fairlead/')[2]}:{trace.tb_lineno} ({code.co_name})"
        trace = trace.tb_next
    return place
