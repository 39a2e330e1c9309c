"""A short fixed scenario for sweeps: the server makes system calls of every kind, and one of them fails."""

import errno
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import trio

from simulation.deployment import COMMANDS, FAR, NODE_PORT, NODES, Deployment, Person
from simulation.engine_child import ChildPlan
from simulation.exchanges import Exchange
from simulation.injected_faults import CUT, ENDS_OF_JOBS, GARBLED, InjectedFault
from simulation.machine import os_error
from simulation.node_server import ServerPlan
from simulation.parent import SERVER_PROGRAM, model_folder, text
from simulation.run import Broken, Run

# A node that was never reached has no models yet.
ALLOWED_ERRORS = ENDS_OF_JOBS | {CUT, "model_not_found"}
DESCRIPTORS = ("descriptor", "accept", "socketpair", "epoll", "pipe", "pidfd", "open_file")
ALLOCATING = (*DESCRIPTORS, "spawn", "thread", "recv", "send", "connect", "read_file")
FRAMES = 25  # that the first child sends
REQUESTS = 12  # that nodes and commands get


@dataclass(frozen=True)
class Sweep:
    """The calls of which one fails, and its error. `allowed_errors`: the error codes that this may cause."""

    name: str
    calls: tuple[str, ...]
    error: Callable[[], BaseException]
    allowed_errors: frozenset[str]
    is_unexpected: bool = False


SWEEPS = {
    sweep.name: sweep
    for sweep in (
        Sweep("descriptors", DESCRIPTORS, lambda: os_error(errno.EMFILE), ALLOWED_ERRORS),
        Sweep("full disk", ("write_log",), lambda: os_error(errno.ENOSPC), frozenset()),
        Sweep(
            "broken disk",
            ("open_file", "read_file", "stat"),
            lambda: os_error(errno.EIO),
            frozenset({"load_failed"}),
        ),
        Sweep(
            "no memory",
            ALLOCATING,
            lambda: os_error(errno.ENOMEM),
            ALLOWED_ERRORS | {"internal_error"},
            is_unexpected=True,
        ),
        Sweep(
            "no memory in Python",
            ALLOCATING,
            MemoryError,
            ALLOWED_ERRORS | {"internal_error", "engine_failed"},
            is_unexpected=True,
        ),
    )
}


class Scenario(Run):
    """The scenario, with a fault at the `at`-th call, frame or request of the sweep."""

    name = "scenario"

    def __init__(
        self,
        sweep: str,
        at: int,
        *,
        broken: Broken = nullcontext,
        keeps_trace: bool = False,
    ) -> None:
        super().__init__(0, _deployment(), broken=broken, keeps_trace=keeps_trace)
        self.name = f"scenario {sweep}:{at}"  # type: ignore[misc]
        self._sweep = sweep
        self._at = at
        self._made = 0

    @property
    def replay(self) -> str:
        """The command that repeats this run."""
        return f"python -m pytest tests/simulation -k replay --simulation-sweep '{self._sweep}:{self._at}'"

    async def run_clients(self) -> None:
        """Use all models, read the state, reload the configuration, unload a model and use it again."""
        await trio.sleep(5.0)
        jobs = [
            self._chat("alpha"),
            self._chat("alpha", stream=True),
            self._chat("cmd"),
            self._chat(FAR, stream=True),
        ]
        async with trio.open_nursery() as people:
            for exchange in jobs:
                people.start_soon(self.make, exchange)
        for path in ("/metrics", "/version", "/running", "/nodes"):
            await self.make(self.drawer.read(path))
        self.system.signals.send(signal.SIGHUP)
        await self.make(self._chat("alpha", stream=True))
        await self.make(self.drawer.read("/models/unload", method="POST", body={"model": "alpha"}))
        await self.make(self._chat("alpha"))
        await trio.sleep(1.0)
        fault = self.stage.faults[0]
        fault.ended_s = trio.current_time()
        self.system.machine.strikes.clear()
        self.child_faults.clear_faults()
        for process in self.system.processes.running:
            process.send_signal(signal.SIGCONT)

    def prepare(self) -> None:
        """Set up the fault."""
        kind, _, fate = self._sweep.partition(" ")
        if kind == "child":
            self.stage.faults.append(
                InjectedFault(self._sweep, 0.0, allowed_errors=ALLOWED_ERRORS | {"engine_failed"})
            )
            self.child_faults.next_fates = {self._at: fate}
            return
        if kind == "node":
            self.stage.faults.append(
                InjectedFault(self._sweep, 0.0, allowed_errors=ALLOWED_ERRORS | {"refused", GARBLED})
            )
            for plan in (*self.deployment.nodes.values(), *self.deployment.servers.values()):
                plan.fate = self._fate_of_request
            return
        sweep = SWEEPS[self._sweep]
        self.stage.faults.append(
            InjectedFault(self._sweep, 0.0, None, sweep.allowed_errors, is_unexpected=sweep.is_unexpected)
        )

        def strike(call: str) -> BaseException | None:
            self._made += call in sweep.calls
            if call in sweep.calls and self._made == self._at:
                self.stage.faults[0].name += f" {call}"
                return sweep.error()
            return None

        self.system.machine.strikes.append(strike)

    def _fate_of_request(self, _path: str) -> str | None:
        self._made += 1
        return self._sweep.removeprefix("node ") if self._made == self._at else None

    def _chat(self, model: str, *, stream: bool = False) -> Exchange:
        exchange = self.drawer.canary(self.deployment.people[0], model)
        exchange.stream = exchange.body["stream"] = stream
        return exchange


def _deployment() -> Deployment:
    def server(names: dict[str, str]) -> ServerPlan:
        return ServerPlan(tokenizer=text().tokenizer, names=names, is_fairlead=True)

    port = COMMANDS["cmd"]
    document: dict[str, Any] = {
        "host": "10.0.0.1",
        "port": 8000,
        "tenantNames": "plain",
        "models": {
            "alpha": {"path": str(model_folder("alpha")), "watchdog": 5},
            "cmd": {
                "cmd": f"{SERVER_PROGRAM} {port} 0.5",
                "proxy": f"http://127.0.0.1:{port}",
                "unloadTimeout": 2,
            },
        },
        "nodes": [{"id": "node-1", "url": f"http://{NODES['node-1']}:{NODE_PORT}"}],
        "queue": {"capacity": 10, "timeout": 20, "maxEstimatedWait": 0},
        "limits": {"drain": 5},
        "requestTimeout": 30,
        "healthCheck": {"interval": 10, "failures": 2, "timeout": 5},
        "whileLoading": "wait",
        "routing": {"router": {"use": "keep"}},
    }
    return Deployment(
        document=document,
        people=[Person("person-0", None)],
        child=ChildPlan(slots=2, load_s=0.5, step_s=0.05),
        servers={port: server({"cmd": "cmd"})},
        nodes={"node-1": server({FAR: FAR})},
        models=["alpha", "cmd", FAR],
        is_watched=False,
        has_keys=False,
    )
