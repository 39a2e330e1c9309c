"""What goes wrong during a soak: kills, stops, reloads, at random moments that a seed determines."""

import random
import signal
from collections.abc import Awaitable, Callable

import trio

from soaking.world import World

# Shorter than the health check and the watchdog take to give a process up, and longer.
PAUSES_S = (1.0, 4.0, 12.0)


class Chaos:
    """Harms a world every `every_s` seconds, on average: in each way once, in random order, and again."""

    def __init__(self, world: World, seed: int, every_s: float) -> None:
        self._world = world
        self._chance = random.Random(f"{seed} chaos")
        self._every_s = every_s

    async def run(self) -> None:
        """Do harm until cancelled."""
        ways: list[Callable[[], Awaitable[None]]] = [
            *(self._kill_victims, self._stop_victims, self._kill_talker, self._pause_talker),
            *(self._kill_node, self._pause_node, self._reload, self._break_configuration),
        ]
        while True:
            for way in self._chance.sample(ways, len(ways)):
                await trio.sleep(self._chance.uniform(0.5, 1.5) * self._every_s)
                await way()

    async def _kill_victims(self) -> None:
        self._world.signal_victims(signal.SIGKILL)

    async def _stop_victims(self) -> None:
        self._world.signal_victims(signal.SIGSTOP)  # for good: only the watchdog ends it

    async def _kill_talker(self) -> None:
        self._world.signal_talker(signal.SIGKILL)

    async def _pause_talker(self) -> None:
        self._world.signal_talker(signal.SIGSTOP)
        await self._pause()
        self._world.signal_talker(signal.SIGCONT)

    async def _kill_node(self) -> None:
        name = self._chance.choice("ab")
        self._world.kill_far(name)
        await self._pause()
        self._world.start_far(name)

    async def _pause_node(self) -> None:
        name = self._chance.choice("ab")
        self._world.pause_far(name, paused=True)
        try:
            await self._pause()
        finally:
            self._world.pause_far(name, paused=False)

    async def _reload(self) -> None:
        self._world.reload()

    async def _break_configuration(self) -> None:
        self._world.reload(broken=True)
        await trio.sleep(1.0)
        self._world.reload()

    async def _pause(self) -> None:
        await trio.sleep(self._chance.choice(PAUSES_S))
