"""Jobs of several tenants for one seat, while the disk is full and the wall clock jumps."""

from collections import Counter
from contextlib import nullcontext

import trio

from simulation.deployment import Deployment, Person
from simulation.engine_child import ChildPlan
from simulation.exchanges import Exchange
from simulation.parent import model_folder
from simulation.run import Broken, Run

APART_S = 0.005
STEP_S = 0.1
HARMLESS = ("clock_jump", "disk_full")


class Turns(Run):
    """One model with one seat. Jobs arrive while another holds it; `served`: tickets in order of service."""

    name = "turns"

    def __init__(self, seed: int, *, broken: Broken = nullcontext, keeps_trace: bool = False) -> None:
        super().__init__(seed, _deployment(), broken=broken, keeps_trace=keeps_trace)
        self.served: list[str] = []

    @property
    def replay(self) -> str:
        """The command that repeats these turns."""
        return f"python -m pytest tests/simulation -k fair --simulation-seed {self.seed}"

    def prepare(self) -> None:
        """Record the order in which jobs get the seat."""
        self.deployment.child.on_submit = lambda _model, ticket: self.served.append(ticket)

    async def run_clients(self) -> None:
        """Let all other jobs arrive while one job holds the seat."""
        await self.make(self.drawer.canary(Person("first", None), "alpha"))
        tenants = [Person(f"tenant-{number}", None) for number in range(self.random.randrange(2, 5))]
        jobs = [tenant for tenant in tenants for _ in range(self.random.randrange(1, 6))]
        self.random.shuffle(jobs)
        exchanges: list[Exchange] = []
        async with trio.open_nursery() as people:
            for kind in HARMLESS:
                people.start_soon(self.maker.make, kind, 60.0)
            people.start_soon(self.make, self.drawer.canary(Person("holder", None), "alpha"))
            for tenant in jobs:
                await trio.sleep(APART_S)
                exchanges.append(self.drawer.canary(tenant, "alpha"))
                people.start_soon(self.make, exchanges[-1])
        self._judge(exchanges)

    def _judge(self, exchanges: list[Exchange]) -> None:
        by_ticket = {exchange.ticket: exchange for exchange in exchanges}
        order = [by_ticket[ticket] for ticket in self.served[2:]]
        waiting = Counter(exchange.person.name for exchange in exchanges)
        had: Counter[str] = Counter(dict.fromkeys(waiting, 0))
        for exchange in order:
            name = exchange.person.name
            least = min(count for other, count in had.items() if waiting[other])
            if had[name] > least:
                self.problems.append(f"{name} gets more turns than others, after {dict(had)}: {exchange}")
            had[name] += 1
            waiting[name] -= 1
        for name in had:
            numbers = [exchange.number for exchange in order if exchange.person.name == name]
            if numbers != sorted(numbers):
                self.problems.append(f"{name} is not served in the order in which it came: {numbers}")
        if waiting.total():
            self.problems.append(f"jobs were not served: {dict(waiting)}")


def _deployment() -> Deployment:
    return Deployment(
        document={
            "host": "10.0.0.1",
            "port": 8000,
            "tenantNames": "plain",
            "models": {"alpha": {"path": str(model_folder("alpha"))}},
            "nodes": [],
            "queue": {"capacity": 100, "timeout": 60, "maxEstimatedWait": 0},
            "requestTimeout": 60,
            "limits": {"drain": 5},
            "whileLoading": "wait",
            "routing": {"router": {"use": "keep"}},
        },
        people=[Person("somebody", None)],
        child=ChildPlan(slots=1, load_s=0.5, step_s=STEP_S),
        servers={},
        nodes={},
        models=["alpha"],
        is_watched=False,
        has_keys=False,
    )
