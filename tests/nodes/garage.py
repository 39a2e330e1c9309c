"""What tests of the fleet share: a real fleet under a real desk, models and commands, and their jobs."""

import gc
import itertools
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random, SystemRandom

import trio

from fairlead.api.exchange import unwrap
from fairlead.config import CommandConfig, Config, ModelConfig, QueueConfig, demonstration_model
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import FairleadError
from fairlead.gateway import Gateway
from fairlead.job import Delta, Job, Sampling
from fairlead.nodes.fleet import Fleet
from fairlead.nodes.status import ModelStatus
from fairlead.text.model import TextModel

FAKE_CHILD = (sys.executable, str(Path(__file__).parent.parent / "worker" / "fake_child.py"))
STUB = (sys.executable, str(Path(__file__).with_name("stub_server.py")), "--port")
_numbers = itertools.count()


@cache
def demonstration_text() -> TextModel:
    return TextModel.load(demonstration_model(), name="demo")


def engine(name: str = "m", behaviour: str = "", **settings: object) -> ModelConfig:
    """A model whose process is `fake_child`, which behaves as its path says."""
    return ModelConfig(path=Path(f"fake:{behaviour}"), name=name, **settings)


def sleeper(name: str, **settings: object) -> CommandConfig:
    """A command that serves nothing, and is ready at once."""
    return CommandConfig(
        name=name, **{"cmd": ("sleep", "1000"), "check_endpoint": "none", "unload_timeout_s": 5.0, **settings}
    )


def command(name: str, port: int, *options: str, **settings: object) -> CommandConfig:
    """A stub server on that port."""
    return CommandConfig(
        name=name,
        cmd=(*STUB, str(port), *options),
        proxy=f"http://127.0.0.1:{port}",
        **{"unload_timeout_s": 5.0, **settings},
    )


def memory_bytes() -> int:
    """What this process takes for itself: of what it shares, its part grows when another process ends."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    (anonymous,) = [line for line in status if line.startswith("RssAnon:")]
    return int(anonymous.split()[1]) * 1024


def free_port(count: int = 1) -> int:
    """A port that nobody has, and so many behind it.

    Below those that the system gives to whoever connects: beside a storm of clients in another test, those
    are gone again at once.
    """
    while True:
        port = SystemRandom().randrange(10_000, 32_000)
        if all(map(_is_free, range(port, port + count))):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def read_fake(model: ModelConfig) -> TextModel:
    """The demonstration model's vocabulary, for whatever process."""
    return replace(demonstration_text(), name=model.name, path=model.path)


@dataclass
class Garage:
    """A fleet that runs, and its desk."""

    fleet: Fleet
    desk: Dispatcher
    gateway: Gateway
    nursery: trio.Nursery
    errors: list[FairleadError] = field(default_factory=list)

    def status(self, model: str = "m") -> ModelStatus:
        (found,) = [status for status in self.fleet.models() if status.model == model]
        return found

    def pid(self, model: str = "m") -> int:
        """The model's process now."""
        pid = self.fleet._residents[model].pid
        assert pid is not None
        return pid

    async def until(self, reached: Callable[[], bool], within_s: float = 30.0) -> None:
        """Wait until something has come about."""
        with trio.fail_after(within_s):
            while not reached():  # noqa: ASYNC110  # a process tells no event
                await trio.sleep(0.005)

    async def state(self, model: str, *states: str) -> None:
        """Wait until a model is in one of these states."""
        await self.until(lambda: self.status(model).state in states)

    async def ask(self, job: Job, *, begun: trio.Event | None = None) -> str:
        """Return the text of an answer. Raises what its client would be told."""
        texts: list[str] = []
        try:
            with trio.fail_after(60):
                async with trio.open_nursery() as exchange:
                    answer = await exchange.start(self.gateway.serve, job)
                    if begun is not None:
                        begun.set()
                    while taken := await answer.deltas.take():
                        texts += map(_text, taken)
        except* FairleadError as group:
            raise unwrap(group) from None
        return "".join(texts)

    async def ask_and_keep_error(self, job: Job, begun: trio.Event | None = None) -> None:
        """Ask; what goes wrong is added to `errors`."""
        try:
            await self.ask(job, begun=begun)
        except FairleadError as error:
            self.errors.append(error)


def _text(delta: Delta) -> str:
    return delta.text


def question(model: str = "m", *, tokens: int = 3, **options: object) -> Job:
    """A greedy job that an engine can run."""
    number = next(_numbers)
    return Job(
        id=f"job {number}",
        tenant="A",
        model=model,
        prompts=(list(range(10, 20)),),
        sampling=Sampling(max_tokens=tokens, temperature=0),
        request_id=f"request {number}",
        **options,
    )


@asynccontextmanager
async def garage(
    *models: ModelConfig | CommandConfig,
    queue: QueueConfig | None = None,
    waits: bool = True,
    child: Sequence[str] = FAKE_CHILD,
    **settings: object,
) -> AsyncIterator[Garage]:
    """Run a fleet of these models; `waits` until it is loaded. Afterwards no process of it is left.

    `child` is the command of engine models.
    """
    config = Config(models=models, queue=queue or QueueConfig(), **settings)
    desk = Dispatcher(config.queue, random=Random(0), rejects_loading=config.while_loading == "reject")
    fleet = Fleet(config, desk, read=read_fake, engine_command=child)
    await fleet.prepare()
    pids: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.run)
        opened = Garage(fleet, desk, Gateway(desk, request_timeout_s=60), nursery)
        if waits:
            with trio.fail_after(60):
                await nursery.start(fleet.run)
        else:
            nursery.start_soon(fleet.run)
        yield opened
        pids = [resident.pid for resident in fleet._residents.values() if resident.pid is not None]
        nursery.cancel_scope.cancel()
    assert [] == [pid for pid in pids if Path(f"/proc/{pid}").exists()]
