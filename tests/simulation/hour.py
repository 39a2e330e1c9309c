"""One virtual hour of a server, drawn from a seed: scenes with clients, with and without faults."""

from contextlib import nullcontext
from functools import partial

import trio

from simulation.node_server import LIES
from simulation.run import QUIET_S, Broken, Run
from simulation.world import Person, draw_world

HOUR_S = 3600.0
SCENES = 7
TROUBLE_WITHIN_S = 10.0


class Hour(Run):
    """The seed's hour. `kinds`: the kinds of fault that it may have; None: all.

    `lies`: whether nodes and commands report absurd usage always (True) or never (False). Unless it is None,
    all texts are streamed, because the server can count the tokens of a stream itself.
    """

    name = "hour"

    def __init__(
        self,
        seed: int,
        *,
        kinds: tuple[str, ...] | None = None,
        lies: bool | None = None,
        broken: Broken = nullcontext,
        keeps_trace: bool = False,
    ) -> None:
        super().__init__(seed, draw_world(seed), broken=broken, keeps_trace=keeps_trace)
        self._kinds = kinds
        self._lies = lies
        self.drawer.always_streams = lies is not None

    @property
    def replay(self) -> str:
        """The command that repeats this hour."""
        return f"python -m pytest tests/simulation -k replay --simulation-seed {self.seed}"

    def prepare(self) -> None:
        """Make the servers report absurd usage if `lies` is set."""
        if self._lies is not None:
            self.world.ragged = False  # else the reported usage would change how a stream is split
        for plan in (*self.world.nodes.values(), *self.world.servers.values()):
            if self._lies:
                plan.lie = partial(self.mood.random.choice, LIES)

    async def story(self) -> None:
        """Run the scenes in sequence."""
        for number in range(SCENES):
            # The first scene may begin while models are being preloaded.
            late_s = self.random.uniform(0.0, 2.0 if number == 0 and self.random.random() < 0.5 else 100.0)
            begins_s = number * (HOUR_S - QUIET_S) / SCENES + late_s
            await trio.sleep_until(begins_s)
            await self._scene()
            if self.parent.has_ended.is_set():
                return
            if number % 2:
                self.problems += await self.metrics.look()
        await trio.sleep_until(HOUR_S - QUIET_S)

    async def _scene(self) -> None:
        """Run clients for a while, with faults or without."""
        random = self.random
        async with trio.open_nursery() as scene:
            stays = (0, 1, 1)
            if random.random() < 0.7 and (kinds := self.maker.kinds(self._kinds)):
                stays = (1, 1, 2, 3)
                for kind in random.sample(kinds, min(len(kinds), random.choice((1, 2, 3)))):
                    scene.start_soon(self._trouble_soon, kind)
            for person in self.world.people:
                for _ in range(random.choice(stays)):
                    scene.start_soon(self._stay, person)

    async def _trouble_soon(self, kind: str) -> None:
        await trio.sleep(self.random.uniform(0.0, TROUBLE_WITHIN_S))
        await self.maker.make(kind, self.random.choice((0.5, 5.0, 20.0, 60.0)))

    async def _stay(self, person: Person) -> None:
        """Make some requests of one user from one address."""
        visitor = self.visitor()
        pace_s = self.random.choice((0.05, 1.0, 5.0))
        for _ in range(self.random.randrange(1, 8)):
            await trio.sleep(self.random.expovariate(1 / pace_s))
            await visitor.make(self.drawer.draw(person))
        visitor.leave()
