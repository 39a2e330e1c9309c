"""A server of several processes for tests: the supervisor runs in the test, its children are real."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from fairlead.base.config import ApiKey, Config, ModelConfig, demonstration_model
from fairlead.server.processes import supervisor as supervision
from fairlead.server.processes.supervisor import Supervisor, supervise
from router.fleet.running_fleet import children

MODEL = "demo"
SINGLE = "single"  # the same model with one slot, of a shared server
SLOTS = 8
START_S = 120
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


class Announced:
    """A `ServerObserver` that keeps what it gets."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.failures: list[str] = []

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """Do nothing."""

    def ready(self, url: str, models: Any) -> None:
        """Keep the address."""
        self.urls.append(url)

    def failed(self, model: str, reason: str) -> None:
        """Keep the reason."""
        self.failures.append(reason)

    def stopping(self) -> None:
        """Do nothing."""


class RunningServer:
    """A server that accepts requests; each method sends one, to a random front."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    def client(self, key: str = "") -> httpx.AsyncClient:
        """Return a client with connections of its own."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.supervisor.url, headers=headers, timeout=60)

    async def get(self, path: str, key: str = "") -> Any:
        """Return the JSON of a view, over a new connection."""
        async with self.client(key) as client:
            return (await client.get(path)).json()

    async def post(self, path: str, body: Any, key: str = "", **headers: str) -> httpx.Response:
        """Post over a new connection."""
        async with self.client(key) as client:
            return await client.post(path, json=body, headers=headers)

    async def until(self, path: str, **expected: Any) -> dict[str, Any]:
        """Wait until the JSON of a view has these values."""
        with trio.fail_after(20):
            while True:
                found = await self.get(path)
                if expected.items() <= found.items():
                    return dict(found)
                await trio.sleep(0.05)

    def pid_of(self, model: str) -> int | None:
        """Return the id of a model's process, or None while it is not loaded."""
        processes = list(self.supervisor.processes._processes.values())
        ups = [process.up for process in processes if process.order.model == model]
        pids = [up.pid for up in ups if up is not None]
        return pids[0] if pids else None

    async def running(self, model: str) -> dict[str, Any]:
        """Return what `GET /running` says of a loaded model."""
        (found,) = [each for each in await self.get("/running") if each["model"] == model]
        return dict(found)

    @property
    def dispatcher_pid(self) -> int:
        """The id of the dispatcher's process."""
        assert self.supervisor.dispatcher is not None
        assert self.supervisor.dispatcher.pid is not None
        return self.supervisor.dispatcher.pid

    def kill_front(self, number: int) -> None:
        """Kill a front."""
        pid = self.supervisor.fronts[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def completion(max_tokens: int, model: str = MODEL, **options: Any) -> dict[str, Any]:
    """Return the body of a greedy completion of so many tokens."""
    return {
        "model": model,
        "prompt": "Once",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **options,
    }


@asynccontextmanager
async def running(fronts: int = 2, *keys: ApiKey, **options: Any) -> AsyncIterator[RunningServer]:
    """Run a server with the demonstration model until the block ends; check that no process is left."""
    slots = options.pop("slots", {MODEL: SLOTS})
    models = [
        ModelConfig(path=demonstration_model(), name=name, slots=count, threads=1, preload=True)
        for name, count in slots.items()
    ]
    config = Config(models=tuple(models), port=0, fronts=fronts, api_keys=keys, **options)
    before = children()
    async with trio.open_nursery() as nursery:
        with trio.fail_after(START_S):
            supervisor = await nursery.start(partial(supervise, config, Announced()))
        yield RunningServer(supervisor)
        supervisor.drain()
    assert children() <= before
    assert not Path(supervisor.directory).exists()


async def _ignore_signals(*_options: Any) -> None:
    """Do nothing: only the main thread gets signals."""


@contextmanager
def shared_server(**options: Any) -> Iterator[RunningServer]:
    """Run a server with two models in a thread, for several tests.

    Each test must leave it idle. The epoch is higher than at the start if a test ended the dispatcher.
    """
    ready, ended = threading.Event(), trio.Event()
    servers: list[tuple[RunningServer, trio.lowlevel.TrioToken]] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        async with running(2, slots={MODEL: SLOTS, SINGLE: 1}, **options) as server:
            servers.append((server, trio.lowlevel.current_trio_token()))
            ready.set()
            await ended.wait()

    def run() -> None:
        try:
            trio.run(serve)
        except BaseException as error:  # noqa: BLE001  the fixture raises it
            failures.append(error)
        ready.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "watch_signals", _ignore_signals)
        thread = threading.Thread(target=run)
        thread.start()
        ready.wait()
    try:
        if servers:
            yield servers[0][0]
    finally:
        if thread.is_alive():
            servers[0][1].run_sync_soon(ended.set)
        thread.join()
        if failures:
            raise failures[0]
