"""Real child processes with a fake model, for the worker's tests: alone, or with this process as a client."""

import contextlib
import os
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from engine.worker import fake_child
from fairlead.base import messages
from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling
from fairlead.nodes.engines.client import Worker
from fairlead.nodes.own_engine import OwnEngine

CHILD = str(Path(fake_child.__file__))
COMMAND = [sys.executable, CHILD]
ENDLESS = Sampling(max_tokens=900_000)
TIMEOUT_S = 60
GRANT = Grant(1, 1)


class Stream:
    """Records a worker's callbacks for one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ends: list[str | FairleadError] = []
        self.begun = trio.Event()
        self.ended = trio.Event()

    def receive_token(self, token_id: int) -> None:
        assert not self.ends
        self.token_ids.append(token_id)
        self.begun.set()

    def receive(self, output: messages.Output) -> None:
        assert not self.ends
        self.token_ids += output.token_ids
        self.begun.set()
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)
            self.ended.set()

    def failed(self, error: FairleadError) -> None:
        self.ends.append(error)
        self.ended.set()


class Engine(OwnEngine):
    """An engine of which tests see more. `log` has the lines that its process has printed."""

    def __init__(self, spec: messages.WorkerSpec, command: Sequence[str]) -> None:
        self.log: list[str] = []
        self.on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None

        def progressed(fraction: float, stage: str) -> None:
            self.on_progress(fraction, stage)

        super().__init__(spec, command=command, on_progress=progressed, on_line=self.log.append)

    @property
    def statistics(self) -> messages.EngineStatistics:
        """The engine's counts, as of its latest frame to this client."""
        return self.sequences.statistics


def worker(options: str = "", **limits: Any) -> Engine:
    return Engine(messages.WorkerSpec(path=f"fake:{options}", **limits), command=COMMAND)


def submit(worker: OwnEngine, prompt: list[int], sampling: Sampling) -> tuple[int, Stream]:
    stream = Stream()
    return worker.sequences.submit(prompt, sampling, stream, grant=GRANT), stream


@contextlib.asynccontextmanager
async def running(worker: OwnEngine | Worker) -> AsyncIterator[messages.Ready]:
    """Start a worker and wait until it is ready; leaving the block cancels it. Fails after `TIMEOUT_S`."""
    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            yield await nursery.start(worker.run)
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def running_until_failure(worker: OwnEngine | Worker) -> AsyncIterator[list[FairleadError]]:
    """Run a worker; leaving the block waits for its end. The list has the errors that `run` raised."""
    errors: list[FairleadError] = []

    async def run(*, task_status: trio.TaskStatus[messages.Ready]) -> None:
        try:
            await worker.run(task_status=task_status)
        except FairleadError as error:
            errors.append(error)

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            yield errors


async def failure_of(worker: OwnEngine | Worker) -> FairleadError:
    """Run a worker until it fails; return the error."""
    with trio.fail_after(TIMEOUT_S), pytest.raises(FairleadError) as caught:
        await worker.run()
    return caught.value


def has_ended(pid: int | None) -> bool:
    """Return whether no process has that id, not even a zombie."""
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def is_running(pid: int) -> bool:
    """Return whether this process runs, or is stopped; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def scripted(code: str, **limits: Any) -> Worker:
    """Return a worker with a child that runs this code, which has a `connection`."""
    begin = "import os, signal, socket, sys, time\nconnection = socket.socket(fileno=int(sys.argv[2]))\n"
    command = [sys.executable, "-c", begin + textwrap.dedent(code)]
    return Worker(messages.WorkerSpec(path="fake:", **limits), command=command)


async def wait_for_counts(worker: Engine | Worker, **counts: int) -> None:
    """Wait until the worker's statistics have these values."""
    while counts != {name: getattr(worker.statistics, name) for name in counts}:
        await trio.lowlevel.checkpoint()
