"""Checks a server after all faults and clients have ended: it serves, is idle, and retains nothing."""

import gc
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import trio

from fairlead.nodes.engines.client import LOAD_PROGRESS_TIMEOUT_S
from simulation.boundary import System
from simulation.deployment import Deployment, Person
from simulation.drawer import Drawer
from simulation.exchanges import Exchange
from simulation.explanations import streamed_tokens
from simulation.http_client import Answer
from simulation.ledger import Ledger

CANARY_S = 45.0
# The watchdog detects a child that was left stopped, after a request or when its load takes too long.
STOPPED_S = LOAD_PROGRESS_TIMEOUT_S + 150.0
CLEAR_S = 120.0
CHECK_EVERY_S = 5.0
# Types of which an idle server has no instance.
OF_JOBS = frozenset(
    {"Job", "Ticket", "Waiter", "Seat", "Deltas", "Attempt", "Passage", "Charge", "PendingAnswer"}
)

_SAMPLE = re.compile(r"^([a-z_:]+)(\{.*\})? (\S+)$")
# These restart at 0 when reloads remove a model or a node and add it again.
_RESET_BY_RELOADS = ("fairlead_model_", "fairlead_node_", "vllm:")
_COUNTERS = ("_total", "_count", "_sum", "_bucket")

Make = Callable[[Exchange], Awaitable[None]]


class Idle(NamedTuple):
    """The tasks, by name, and the number of descriptors of an idle server."""

    tasks: Counter[str]
    descriptors: int


class Metrics:
    """Reads `/metrics` repeatedly and checks that no counter falls and no value is absurd."""

    def __init__(self, drawer: Drawer, make: Make) -> None:
        self._drawer = drawer
        self._make = make
        self._seen: dict[str, float] = {}

    async def read(self) -> list[str]:
        """Read the metrics once more; return the problems."""
        exchange = self._drawer.read("/metrics")
        await self._make(exchange)
        if exchange.answer is None or exchange.answer.status != 200 or not exchange.answer.is_whole:
            return []  # the oracle reports that
        return list(self._compare(exchange.answer))

    def total(self, name: str) -> float:
        """Return the latest sum of a metric over all labels."""
        return sum(value for sample, value in self._seen.items() if sample.partition("{")[0] == name)

    def _compare(self, answer: Answer) -> Iterator[str]:
        for line in answer.body.decode().splitlines():
            if (sample := _SAMPLE.match(line)) is None:
                continue
            name, labels, value = sample[1], sample[2] or "", float(sample[3])
            if not abs(value) < 1e15:
                yield f"the metric {name}{labels} is {value:g}"
            if name.endswith(_COUNTERS) and not name.startswith(_RESET_BY_RELOADS):
                earlier = self._seen.get(name + labels, 0.0)
                if value < earlier:
                    yield f"the counter {name}{labels} fell from {earlier:g} to {value:g}"
            self._seen[name + labels] = value


class FinalChecks:
    """Checks one server. `make` sends a request from a new address.

    `kept_before`: instances that earlier servers of this process left behind. `left_stopped`: a child was
    stopped and never continued.
    """

    def __init__(
        self,
        system: System,
        deployment: Deployment,
        drawer: Drawer,
        make: Make,
        *,
        ledger: Ledger,
        kept_before: Counter[str],
        left_stopped: bool,
    ) -> None:
        self._system = system
        self._deployment = deployment
        self._drawer = drawer
        self._make = make
        self._ledger = ledger
        self._kept_before = kept_before
        self._left_stopped = left_stopped

    async def problems(self, metrics: Metrics, idle: Idle) -> list[str]:
        """Return the problems. Unloads models and removes nodes, to compare with an `idle` server."""
        problems = [*await self._check_canaries(), *await self._check_counts(), *await metrics.read()]
        problems += self._check_tokens(metrics)
        problems += await self._clear(idle)
        gc.collect()
        kept = Counter(instances_of_jobs()) - self._kept_before
        return problems + ([f"instances are kept: {dict(kept)}"] if kept else [])

    async def _check_canaries(self) -> list[str]:
        """Send a request to every model, and one from every user."""
        engine = next(name for name, model in self._deployment.document["models"].items() if "path" in model)
        models = [model for model in self._deployment.models if not self._drawer.lacks_node(model)]
        client_sessions = [(self._drawer.operator, model) for model in models]
        client_sessions += [(person, engine) for person in self._deployment.people]
        return [
            problem
            for client_session in client_sessions
            if (problem := await self._canary(*client_session)) is not None
        ]

    async def _canary(self, person: Person, model: str) -> str | None:
        """Repeat a request until it is answered: a server without a queue refuses jobs while it loads."""
        exchange = self._drawer.canary(person, model)
        with trio.move_on_after(STOPPED_S if self._left_stopped else CANARY_S):
            while True:
                await self._make(exchange)
                error = exchange.answer.error if exchange.answer is not None else "cut"
                if error is None:
                    return None
                if error not in ("queue_full", "model_loading") and not self._left_stopped:
                    break
                await trio.sleep(2.0)
                exchange = self._drawer.canary(person, model)
        return f"a canary was not served: {exchange}"

    async def _check_counts(self) -> list[str]:
        queue = await self._get("/queue")
        problems = [f"{name} is {queue[name]}" for name in ("waiting", "running") if queue.get(name) != 0]
        for model in await self._get("/running"):
            busy = {name: model[name] for name in ("busy", "sequences") if model.get(name)}
            problems += [f"the idle model {model['model']} has {busy}"] if busy else []
        for node in await self._get("/nodes"):
            problems += [f"the idle node {node['id']} has busy={node['busy']}"] if node["busy"] else []
        return problems

    def _check_tokens(self, metrics: Metrics) -> list[str]:
        """Compare the tokens that were counted with those that were generated and received."""
        most = self._ledger.total
        least = sum(map(streamed_tokens, self._drawer.exchanges))
        problems = []
        for name in ("fairlead_generated_tokens_total", "fairlead_tenant_generated_tokens_total"):
            counted = metrics.total(name)
            if not least <= counted <= most:
                problems.append(f"{name} is {counted:g}, not between {least} and {most}")
        return problems

    async def _clear(self, idle: Idle) -> list[str]:
        """Unload and remove everything until the server is as idle as a new one; return what is left."""
        problems: list[str] = []
        with trio.move_on_after(CLEAR_S):
            while True:
                for model in self._deployment.document["models"]:
                    await self._do("POST", "/models/unload", {"model": model})
                for node in await self._get("/nodes"):
                    if node["kind"] == "remote":
                        await self._do("DELETE", f"/nodes/{node['id']}")
                await trio.sleep(CHECK_EVERY_S)
                problems = self._left(idle)
                if not problems:
                    break
        return problems

    def _left(self, idle: Idle) -> list[str]:
        problems = []
        tasks = Counter(_task_names())
        descriptors = self._system.machine.descriptors
        if tasks != idle.tasks:
            problems.append(
                f"tasks are left: {dict(tasks - idle.tasks)}, or gone: {dict(idle.tasks - tasks)}"
            )
        if len(descriptors) != idle.descriptors:
            problems.append(f"descriptors are left: {descriptors}")
        if self._system.processes.running:
            problems.append(f"processes are left: {self._system.processes.running}")
        return problems

    async def _get(self, path: str) -> Any:
        return await self._do("GET", path)

    async def _do(self, method: str, path: str, body: object = None) -> Any:
        exchange = self._drawer.read(path, method=method, body=body)
        await self._make(exchange)
        return exchange.answer.document if exchange.answer is not None else {}


def measured(system: System) -> Idle:
    """Return the tasks and descriptors that the server has now."""
    return Idle(Counter(_task_names()), len(system.machine.descriptors))


def _task_names() -> Iterator[str]:
    tasks = [trio.lowlevel.current_root_task()]
    while tasks:
        task = tasks.pop()
        if not task.name.startswith("simulation."):
            yield task.name
        for nursery in task.child_nurseries:
            tasks += nursery.child_tasks


def instances_of_jobs() -> Iterator[str]:
    """Yield the type of each instance that belongs to a job."""
    for instance in gc.get_objects():
        kind = type(instance)
        if kind.__name__ in OF_JOBS and kind.__module__.startswith("fairlead."):
            yield kind.__name__
