"""What tests of the fleet share: a real fleet under a real desk, models and commands, and their jobs."""

import gc
import itertools
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random, SystemRandom

import trio

from fairlead.api.exchange import unwrap
from fairlead.app import Composition
from fairlead.config import CommandConfig, Config, ModelConfig, QueueConfig, demonstration_model
from fairlead.console.announcer import LogAnnouncer
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import FairleadError
from fairlead.gateway import Gateway
from fairlead.job import Delta, Job, Sampling
from fairlead.nodes.fleet import Fleet
from fairlead.nodes.model_process import ProcessFactory, make_process
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
    """What this process takes for itself: of what it shares, its part grows when another process ends.

    What was written to a disk counts, too: it comes back when it is used.
    """
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon:", "VmSwap:")))


class OpenFiles:
    """What this process has open, to see later whether that has become more.

    It is compared by what it is, a pipe, a socket or which file, so that a failure says what was left open.
    What only waits to be collected is collected first: it would be at any time.
    """

    def __init__(self) -> None:
        self._before = _open_files()

    def more(self) -> Counter[str]:
        """What is open now and was not then. What has gone since was an earlier test's."""
        return _open_files() - self._before

    async def are_no_more(self) -> None:
        """Wait until there is nothing more: a thread may just read a file of /proc."""
        with trio.move_on_after(60):
            while self.more():  # noqa: ASYNC110  # it tells no event
                await trio.sleep(0.01)
        assert not (more := self.more()), f"open besides: {dict(more)}"


def _open_files() -> Counter[str]:
    gc.collect()
    targets: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # that of this very look
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115  # it need not be a path
            targets[re.sub(r":\[\d+\]$", "", target)] += 1  # which pipe or socket it is does not matter
    return targets


def children() -> set[int]:
    """The processes that are ours, the ended ones that nobody has waited for included."""
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it has gone meanwhile
            # By their parent: the lists of our threads change while they are read, when one of them ends.
            if process.name.isdecimal() and _parent(process) == os.getpid():
                found.add(int(process.name))
    return found


def _parent(process: Path) -> int:
    return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])


def free_port(count: int = 1) -> int:
    """A port that nobody has, and so many behind it. It is given once only, as there is time till it is used.

    Below those that the system gives to whoever connects: beside a storm of clients in another test, those
    are gone again at once. Tests that run at the same time have ports of their own.
    """
    while True:
        if _ports.next + count > _ports.stop:
            _ports.next = _ports.start
        port, _ports.next = _ports.next, _ports.next + count
        if all(map(_is_free, range(port, port + count))):
            return port


class _Ports:
    """Those of this process, beginning anywhere: other programs may look for ports here, too."""

    def __init__(self) -> None:
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        share = (32_000 - 10_000) // processes
        self.start = 10_000 + share * (number % processes)  # one that replaces another has a higher number
        self.stop = self.start + share
        self.next = SystemRandom().randrange(self.start, self.stop)


_ports = _Ports()


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

    async def until(self, reached: Callable[[], bool], within_s: float = 60.0) -> None:
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
    make_process: ProcessFactory = make_process,
    **settings: object,
) -> AsyncIterator[Garage]:
    """Run a fleet of these models; `waits` until it is loaded. Afterwards no process of it is left.

    `child` is the command of engine models.
    """
    settings = {"request_timeout_s": 60.0, **settings}
    config = Config(models=models, queue=queue or QueueConfig(), **settings)

    def make_fleet(config: Config, desk: Dispatcher, **_: object) -> Fleet:
        return Fleet(config, desk, read=read_fake, engine_command=child, make_process=make_process)

    composition = Composition(config, LogAnnouncer(key_needed=False), make_fleet=make_fleet, random=Random(0))
    await composition.prepare()
    has_loaded = trio.Event()
    pids: list[int] = []
    async with composition.running(lambda _models: has_loaded.set()), trio.open_nursery() as nursery:
        fleet = composition.fleet
        opened = Garage(fleet, composition.dispatcher, composition.gateway, nursery)
        if waits:
            with trio.fail_after(60):
                await has_loaded.wait()
        yield opened
        pids = [resident.pid for resident in fleet._residents.values() if resident.pid is not None]
        nursery.cancel_scope.cancel()
    assert [] == [pid for pid in pids if Path(f"/proc/{pid}").exists()]
