"""A short fixed scenario for sweeps: the server makes system calls of every kind, and one of them fails."""

import errno
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import trio

from simulation.engine_child import ChildPlan
from simulation.machine import os_error
from simulation.node_server import ServerPlan
from simulation.parent import SERVER_PROGRAM, model_folder, text
from simulation.run import Broken, Run
from simulation.troubles import CUT, ENDS_OF_JOBS, GARBLED, Trouble
from simulation.visits import Visit
from simulation.world import COMMANDS, FAR, NODE_PORT, NODES, Person, World

# A node that was never reached has no models yet.
EXCUSES = ENDS_OF_JOBS | {CUT, "model_not_found"}
DESCRIPTORS = ("descriptor", "accept", "socketpair", "epoll", "pipe", "pidfd", "open_file")
ALLOCATING = (*DESCRIPTORS, "spawn", "thread", "recv", "send", "connect", "read_file")
FRAMES = 25  # that the first child sends
REQUESTS = 12  # that nodes and commands get


@dataclass(frozen=True)
class Sweep:
    """The calls of which one fails, and its error. `excuses` are the error codes that this may cause."""

    name: str
    calls: tuple[str, ...]
    error: Callable[[], BaseException]
    excuses: frozenset[str]
    is_unexpected: bool = False


SWEEPS = {
    sweep.name: sweep
    for sweep in (
        Sweep("descriptors", DESCRIPTORS, lambda: os_error(errno.EMFILE), EXCUSES),
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
            EXCUSES | {"internal_error"},
            is_unexpected=True,
        ),
        Sweep(
            "no memory in Python",
            ALLOCATING,
            MemoryError,
            EXCUSES | {"internal_error", "engine_failed"},
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
        super().__init__(0, _world(), broken=broken, keeps_trace=keeps_trace)
        self.name = f"scenario {sweep}:{at}"  # type: ignore[misc]
        self._sweep = sweep
        self._at = at
        self._made = 0

    @property
    def replay(self) -> str:
        """The command that repeats this run."""
        return f"python -m pytest tests/simulation -k replay --simulation-sweep '{self._sweep}:{self._at}'"

    async def story(self) -> None:
        """Use all models, read the state, reload the configuration, unload a model and use it again."""
        await trio.sleep(5.0)
        jobs = [
            self._chat("alpha"),
            self._chat("alpha", stream=True),
            self._chat("cmd"),
            self._chat(FAR, stream=True),
        ]
        async with trio.open_nursery() as people:
            for visit in jobs:
                people.start_soon(self.make, visit)
        for path in ("/metrics", "/version", "/running", "/nodes"):
            await self.make(self.drawer.look(path))
        self.system.signals.send(signal.SIGHUP)
        await self.make(self._chat("alpha", stream=True))
        await self.make(self.drawer.look("/models/unload", method="POST", body={"model": "alpha"}))
        await self.make(self._chat("alpha"))
        await trio.sleep(1.0)
        trouble = self.stage.troubles[0]
        trouble.ended_s = trio.current_time()
        self.system.machine.strikes.clear()
        self.mood.forgive()
        for process in self.system.processes.living:
            process.send_signal(signal.SIGCONT)

    def prepare(self) -> None:
        """Set up the fault."""
        kind, _, fate = self._sweep.partition(" ")
        if kind == "child":
            self.stage.troubles.append(Trouble(self._sweep, 0.0, excuses=EXCUSES | {"engine_failed"}))
            self.mood.appointed = {self._at: fate}
            return
        if kind == "node":
            self.stage.troubles.append(Trouble(self._sweep, 0.0, excuses=EXCUSES | {"refused", GARBLED}))
            for plan in (*self.world.nodes.values(), *self.world.servers.values()):
                plan.fate = self._fate_of_request
            return
        sweep = SWEEPS[self._sweep]
        self.stage.troubles.append(
            Trouble(self._sweep, 0.0, None, sweep.excuses, is_unexpected=sweep.is_unexpected)
        )

        def strike(call: str) -> BaseException | None:
            self._made += call in sweep.calls
            if call in sweep.calls and self._made == self._at:
                self.stage.troubles[0].name += f" {call}"
                return sweep.error()
            return None

        self.system.machine.strikes.append(strike)

    def _fate_of_request(self, _path: str) -> str | None:
        self._made += 1
        return self._sweep.removeprefix("node ") if self._made == self._at else None

    def _chat(self, model: str, *, stream: bool = False) -> Visit:
        visit = self.drawer.canary(self.world.people[0], model)
        visit.stream = visit.body["stream"] = stream
        return visit


def _world() -> World:
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
    return World(
        document=document,
        people=[Person("person-0", None)],
        child=ChildPlan(slots=2, load_s=0.5, step_s=0.05),
        servers={port: server({"cmd": "cmd"})},
        nodes={"node-1": server({FAR: FAR})},
        models=["alpha", "cmd", FAR],
        is_watched=False,
        has_keys=False,
    )
