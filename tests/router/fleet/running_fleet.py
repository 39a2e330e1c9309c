"""Shared by tests of the fleet: a real fleet with a real dispatcher, models, commands, and jobs."""

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

from fairlead.base.config import CommandConfig, Config, LruSwap, ModelConfig, QueueConfig, demonstration_model
from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta, Job, Sampling
from fairlead.base.supervision import unwrap
from fairlead.generation.gateway import Gateway
from fairlead.language.text.model import TextModel
from fairlead.nodes.model_process import ModelProcess, ProcessFactory, ProcessOptions, make_process
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.router.fleet.status import ModelStatus
from fairlead.server.app import Composition
from fairlead.server.console.announcer import LogAnnouncer

FAKE_CHILD = (sys.executable, str(Path(__file__).parents[2] / "engine" / "worker" / "fake_child.py"))
STUB = (sys.executable, str(Path(__file__).parents[2] / "nodes" / "stub_server.py"), "--port")
ONE_AT_A_TIME = LruSwap(max_loaded=1)
_numbers = itertools.count()


@cache
def demonstration_text() -> TextModel:
    return TextModel.load(demonstration_model(), name="demo")


def engine(name: str = "m", behaviour: str = "", **settings: object) -> ModelConfig:
    """Return a model that runs in `fake_child`; the model's path selects its behavior."""
    return ModelConfig(path=Path(f"fake:{behaviour}"), name=name, **settings)


def sleeper(name: str, **settings: object) -> CommandConfig:
    """Return a command that serves nothing and is ready at once."""
    given = {"cmd": ("sleep", "1000"), "check_endpoint": "none", "unload_timeout_s": 5.0}
    return CommandConfig(name=name, **given | {"proxy": "http://localhost:${PORT}", "port": 5800} | settings)


def command(name: str, port: int, *options: str, **settings: object) -> CommandConfig:
    """Return a command that starts a stub server on that port."""
    return CommandConfig(
        name=name,
        cmd=(*STUB, str(port), *options),
        proxy=f"http://127.0.0.1:{port}",
        **{"unload_timeout_s": 5.0, **settings},
    )


def memory_bytes() -> int:
    """Return the private memory of this process: its part of shared pages grows when another process ends.

    Swapped memory counts too, as it returns when it is used.
    """
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon:", "VmSwap:")))


class OpenFiles:
    """The open descriptors of this process, to check later whether there are more.

    They are compared by kind (pipe, socket or path), so that a failure names what was left open.
    Garbage is collected first, as it could be collected at any time.
    """

    def __init__(self) -> None:
        self._before = _open_files()

    def more(self) -> Counter[str]:
        """Return what is open now and was not before. What was closed since belonged to an earlier test."""
        return _open_files() - self._before

    async def are_no_more(self) -> None:
        """Assert that nothing more is open, after a wait: a thread may be reading a file of /proc."""
        with trio.move_on_after(60):
            while self.more():  # noqa: ASYNC110  # there is no event for it
                await trio.sleep(0.01)
        assert not (more := self.more()), f"open besides: {dict(more)}"


def _open_files() -> Counter[str]:
    gc.collect()
    targets: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # the descriptor of this listing itself
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115  # the target need not be a path
            targets[re.sub(r":\[\d+\]$", "", target)] += 1  # the number of a pipe or socket does not matter
    return targets


def children() -> set[int]:
    """Return the ids of our child processes, including zombies."""
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            # By parent id: the lists of our threads' children change while they are read, when one ends.
            if process.name.isdecimal() and _parent(process) == os.getpid():
                found.add(int(process.name))
    return found


def _parent(process: Path) -> int:
    return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])


def free_port(count: int = 1) -> int:
    """Return the first of `count` free consecutive ports. Each is returned only once, as it is used later.

    They are below the system's ephemeral ports, which many clients in another test would take at once.
    Tests that run at the same time have separate ports.
    """
    while True:
        if _ports.next + count > _ports.stop:
            _ports.next = _ports.start
        port, _ports.next = _ports.next, _ports.next + count
        if all(map(_is_free, range(port, port + count))):
            return port


class _Ports:
    """The ports of this process. The start is random, as other programs may look for ports here too."""

    def __init__(self) -> None:
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        share = (32_000 - 10_000) // processes
        self.start = 10_000 + share * (number % processes)  # a replacement worker has a higher number
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
    """Return the demonstration model's vocabulary under the name and path of this model."""
    return replace(demonstration_text(), name=model.name, path=model.path)


@dataclass
class RunningFleet:
    """A running fleet and its dispatcher."""

    fleet: Fleet
    dispatcher: Dispatcher
    gateway: Gateway
    nursery: trio.Nursery
    errors: list[FairleadError] = field(default_factory=list)

    def status(self, model: str = "m") -> ModelStatus:
        (found,) = [status for status in self.fleet.models() if status.model == model]
        return found

    def pid(self, model: str = "m") -> int:
        """Return the id of the model's current process."""
        pid = self.fleet._local[model].pid
        assert pid is not None
        return pid

    async def until(self, reached: Callable[[], bool], within_s: float = 60.0) -> None:
        """Wait until the condition holds."""
        with trio.fail_after(within_s):
            while not reached():  # noqa: ASYNC110  # a process sends no event
                await trio.sleep(0.005)

    async def state(self, model: str, *states: str) -> None:
        """Wait until a model is in one of these states."""
        await self.until(lambda: self.status(model).state in states)

    async def run_job(self, job: Job, *, begun: trio.Event | None = None) -> str:
        """Return the text of a response; raise the error that its client would get."""
        texts: list[str] = []
        error: BaseException | None = None
        try:
            with trio.fail_after(60):
                async with trio.open_nursery() as exchange:
                    answer = await exchange.start(self.gateway.serve, job)
                    if begun is not None:
                        begun.set()
                    while taken := await answer.deltas.take():
                        texts += map(_text, taken)
        except* FairleadError as group:
            error = unwrap(group)
        if error is not None:
            raise error  # outside the block, in which Python 3.11.2 would wrap it
        return "".join(texts)

    async def run_job_and_return_error(self, job: Job, begun: trio.Event | None = None) -> None:
        """Run the job; append its error to `errors`."""
        try:
            await self.run_job(job, begun=begun)
        except FairleadError as error:
            self.errors.append(error)


def _text(delta: Delta) -> str:
    return delta.text


def question(model: str = "m", *, tokens: int = 3, **options: object) -> Job:
    """Return a greedy job that an engine can run."""
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
async def running_fleet(
    *models: ModelConfig | CommandConfig,
    queue: QueueConfig | None = None,
    waits: bool = True,
    child: Sequence[str] = FAKE_CHILD,
    make_process: ProcessFactory = make_process,
    **settings: object,
) -> AsyncIterator[RunningFleet]:
    """Run a fleet of these models; with `waits`, wait until it is loaded. Check that no process is left.

    `child` is the command line of engine processes.
    """
    settings = {"request_timeout_s": 60.0, **settings}
    config = Config(models=models, queue=queue or QueueConfig(), **settings)

    def make_fleet(config: Config, dispatcher: Dispatcher, nodes: NodeRegistry, **_: object) -> Fleet:
        return Fleet(config, dispatcher, nodes, read=read_fake, make_process=make_child)

    def make_child(options: ProcessOptions) -> ModelProcess:
        return make_process(replace(options, engine_command=child))

    composition = Composition(config, LogAnnouncer(key_needed=False), make_fleet=make_fleet, random=Random(0))
    await composition.prepare()
    has_loaded = trio.Event()
    pids: list[int] = []
    async with composition.running(lambda _models: has_loaded.set()), trio.open_nursery() as nursery:
        fleet = composition.fleet
        opened = RunningFleet(fleet, composition.dispatcher, composition.gateway, nursery)
        if waits:
            with trio.fail_after(60):
                await has_loaded.wait()
        yield opened
        pids = [managed_model.pid for managed_model in fleet._local.values() if managed_model.pid is not None]
        nursery.cancel_scope.cancel()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
