"""The faults of a soak: kills, stops and reloads, at random times determined by a seed."""

import random
import signal
from collections.abc import Awaitable, Callable

import trio

from soaking.deployment import Deployment

# Shorter and longer than the time after which health checks and the watchdog give up a process.
PAUSES_S = (1.0, 4.0, 12.0)


class Chaos:
    """Injects a fault every `every_s` seconds on average: each kind once in random order, repeatedly."""

    def __init__(self, deployment: Deployment, seed: int, every_s: float) -> None:
        self._deployment = deployment
        self._rng = random.Random(f"{seed} chaos")
        self._every_s = every_s

    async def run(self) -> None:
        """Inject faults until cancelled."""
        faults: list[Callable[[], Awaitable[None]]] = [
            *(self._kill_victims, self._stop_victims, self._kill_talker, self._pause_talker),
            *(self._kill_node, self._pause_node, self._reload, self._break_configuration),
        ]
        while True:
            for fault in self._rng.sample(faults, len(faults)):
                await trio.sleep(self._rng.uniform(0.5, 1.5) * self._every_s)
                await fault()

    async def _kill_victims(self) -> None:
        self._deployment.signal_victims(signal.SIGKILL)

    async def _stop_victims(self) -> None:
        self._deployment.signal_victims(signal.SIGSTOP)  # without SIGCONT, so that only the watchdog ends it

    async def _kill_talker(self) -> None:
        self._deployment.signal_talker(signal.SIGKILL)

    async def _pause_talker(self) -> None:
        self._deployment.signal_talker(signal.SIGSTOP)
        await self._pause()
        self._deployment.signal_talker(signal.SIGCONT)

    async def _kill_node(self) -> None:
        name = self._rng.choice("ab")
        self._deployment.kill_remote_node(name)
        await self._pause()
        self._deployment.start_remote_node(name)

    async def _pause_node(self) -> None:
        name = self._rng.choice("ab")
        self._deployment.pause_remote_node(name, paused=True)
        try:
            await self._pause()
        finally:
            self._deployment.pause_remote_node(name, paused=False)

    async def _reload(self) -> None:
        self._deployment.reload()

    async def _break_configuration(self) -> None:
        self._deployment.reload(broken=True)
        await trio.sleep(1.0)
        self._deployment.reload()

    async def _pause(self) -> None:
        await trio.sleep(self._rng.choice(PAUSES_S))
