"""One virtual hour of a server, drawn from a seed: phases with clients, with and without faults."""

from contextlib import nullcontext
from functools import partial

import trio

from simulation.deployment import Person, draw_deployment
from simulation.node_server import FALSE_USAGES
from simulation.run import QUIET_S, Broken, Run

HOUR_S = 3600.0
PHASES = 7
TROUBLE_WITHIN_S = 10.0


class Hour(Run):
    """The seed's hour. `kinds`: the kinds of fault that it may have; None: all.

    `false_usage`: whether nodes and commands report absurd usage always (True) or never (False). Unless it is
    None, all texts are streamed, because the server can count the tokens of a stream itself.
    """

    name = "hour"

    def __init__(
        self,
        seed: int,
        *,
        kinds: tuple[str, ...] | None = None,
        false_usage: bool | None = None,
        broken: Broken = nullcontext,
        keeps_trace: bool = False,
    ) -> None:
        super().__init__(seed, draw_deployment(seed), broken=broken, keeps_trace=keeps_trace)
        self._kinds = kinds
        self._false_usage = false_usage
        self.drawer.always_streams = false_usage is not None

    @property
    def replay(self) -> str:
        """The command that repeats this hour."""
        return f"python -m pytest tests/simulation -k replay --simulation-seed {self.seed}"

    def prepare(self) -> None:
        """Make the servers report absurd usage if `false_usage` is True."""
        if self._false_usage is not None:
            self.deployment.ragged = False  # else the reported usage would change how a stream is split
        for plan in (*self.deployment.nodes.values(), *self.deployment.servers.values()):
            if self._false_usage:
                plan.reported_usage = partial(self.child_faults.random.choice, FALSE_USAGES)

    async def run_clients(self) -> None:
        """Run the phases in sequence."""
        for number in range(PHASES):
            # The first phase may begin while models are being preloaded.
            late_s = self.random.uniform(0.0, 2.0 if number == 0 and self.random.random() < 0.5 else 100.0)
            begins_s = number * (HOUR_S - QUIET_S) / PHASES + late_s
            await trio.sleep_until(begins_s)
            await self._run_phase()
            if self.parent.has_ended.is_set():
                return
            if number % 2:
                self.problems += await self.metrics.read()
        await trio.sleep_until(HOUR_S - QUIET_S)

    async def _run_phase(self) -> None:
        """Run clients for a while, with faults or without."""
        random = self.random
        async with trio.open_nursery() as phase:
            stays = (0, 1, 1)
            if random.random() < 0.7 and (kinds := self.maker.kinds(self._kinds)):
                stays = (1, 1, 2, 3)
                for kind in random.sample(kinds, min(len(kinds), random.choice((1, 2, 3)))):
                    phase.start_soon(self._inject_soon, kind)
            for person in self.deployment.people:
                for _ in range(random.choice(stays)):
                    phase.start_soon(self._run_client, person)

    async def _inject_soon(self, kind: str) -> None:
        await trio.sleep(self.random.uniform(0.0, TROUBLE_WITHIN_S))
        await self.maker.make(kind, self.random.choice((0.5, 5.0, 20.0, 60.0)))

    async def _run_client(self, person: Person) -> None:
        """Make some requests of one user from one address."""
        client_session = self.client_session()
        pace_s = self.random.choice((0.05, 1.0, 5.0))
        for _ in range(self.random.randrange(1, 8)):
            await trio.sleep(self.random.expovariate(1 / pace_s))
            await client_session.make(self.drawer.draw(person))
        client_session.leave()
