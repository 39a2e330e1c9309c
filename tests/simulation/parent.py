"""Runs the real server, from its composition root down, on a simulated system."""

import contextlib
import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trio

from fairlead.base.config import Config, demonstration_model
from fairlead.base.telemetry import logs
from fairlead.generation.request_log import open_request_log
from fairlead.language.text.model import TextModel
from fairlead.router.dispatch import dispatcher
from fairlead.router.fleet import local_models
from fairlead.router.fleet.reload import ConfigSource
from fairlead.server import app
from fairlead.server.configfile import read_config
from fairlead.server.routes import history
from simulation.boundary import System
from simulation.disk import ConfigurationFile
from simulation.engine_child import ChildPlan, EngineChild
from simulation.node_server import NodeServer, ServerPlan
from simulation.processes import Process

SERVER_PROGRAM = "far-server"
STOP_PROGRAM = "far-stopper"
GUARD_PROGRAM = "/bin/sh"
# Periodic work of an idle server runs less often, because it would take half of the time.
RARER = (
    (history, "INTERVAL_S", 20.0),
    (dispatcher, "CHARGE_INTERVAL_S", 5.0),
    (local_models, "MEASURE_EVERY_S", 60.0),
)


@cache
def text() -> TextModel:
    """Return the demonstration model's tokenizer and template, which all models use here."""
    return TextModel.load(demonstration_model(), name="demo")


@cache
def model_folder(name: str) -> Path:
    """Return a model's folder: copies of what the parent reads, and a link to weights."""
    folder = Path(_folder().name) / name
    folder.mkdir()
    for file in demonstration_model().glob("*.json"):
        shutil.copy(file, folder)
    (folder / "model.safetensors").symlink_to(demonstration_model() / "model.safetensors")
    return folder


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="simulation-")


class Announcer:
    """Records what a person at the terminal would see."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self.is_ready = False
        self.progress: list[tuple[str, float | None]] = []
        self.failures: list[str] = []

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        self.progress.append((model, fraction))
        self._machine.note("announced", model, fraction, stage)

    def ready(self, url: str, models: Sequence[str]) -> None:
        self.is_ready = True

    def failed(self, model: str, reason: str) -> None:
        self.failures.append(reason)

    def stopping(self) -> None:
        pass


class Parent:
    """One run of the server. `crash` is the error that ended it, if there was one.

    `plan_of` returns how the child of a model behaves; `servers` has the servers of commands by port.
    `broken` replaces parts of the product (see `broken_products`).
    """

    def __init__(
        self,
        system: System,
        document: dict[str, Any],
        *,
        plan_of: Callable[[str], ChildPlan],
        servers: dict[int, ServerPlan],
        broken: Callable[[], AbstractContextManager[None]] = nullcontext,
        is_watched: bool = True,
    ) -> None:
        self.system = system
        self.file = ConfigurationFile.make(system.machine, encoded(document))
        self.announcer = Announcer(system.machine)
        self.servers = servers
        self.crash: BaseException | None = None
        self.has_ended = trio.Event()
        self._plan_of = plan_of
        self._broken = broken
        self._is_watched = is_watched
        system.processes.programs |= {
            "fairlead.engine.worker.main": self._engine,
            GUARD_PROGRAM: _guard,
            SERVER_PROGRAM: self._serve_command,
            STOP_PROGRAM: self._stop_command,
        }

    def rewrite(self, document: dict[str, Any]) -> None:
        """Replace the configuration file."""
        self.file.write(encoded(document))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until SIGTERM."""
        task_status.started()
        try:
            with self._broken(), _collector_alone(), logged(), _rarely():
                config = self._read()
                source = ConfigSource(self.file, self._read, self._is_watched)  # type: ignore[arg-type]
                await self._serve(config, source)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # any error may end a server
            self.crash = error
        self.system.machine.note("server ended", type(self.crash).__name__)
        self.has_ended.set()

    async def _serve(self, config: Config, source: ConfigSource) -> None:
        with open_request_log(config) as request_log:
            await app.serve(config, self.announcer, source=source, request_log=request_log)

    async def stop(self, within_s: float = 60.0) -> bool:
        """Send SIGTERM; return whether it ended in time."""
        self.system.signals.send(signal.SIGTERM)
        with trio.move_on_after(within_s):
            await self.has_ended.wait()
        return self.has_ended.is_set()

    def _read(self, running: Config | None = None) -> Config:
        return read_config(self.file, {}, running=running).config  # type: ignore[arg-type]

    # Programs ----------------------------------------------------------------------------------------

    async def _engine(self, process: Process, _args: Sequence[str]) -> int:
        return await EngineChild(process, self.system.network, text(), self._plan_of).run()

    async def _serve_command(self, process: Process, args: Sequence[str]) -> int:
        """Run the server of a command. Arguments: its port, and how long it loads in seconds."""
        port, load_s = int(args[1]), float(args[2])
        plan = self.servers[port]
        plan.pause = process.pause
        server = NodeServer(plan)
        address = ("127.0.0.1", port)
        process.print(f"loading on port {port}")
        await process.pause(load_s)
        try:
            self.system.network.serve(address, server.serve)
            await trio.sleep_forever()
        finally:
            self.system.network.stop_serving(address)
            server.cut_off()
        return 0

    async def _stop_command(self, process: Process, args: Sequence[str]) -> int:
        await process.pause(0.1)
        for other in self.system.processes.running:
            if str(other.pid) == args[1]:
                other.send_signal(signal.SIGTERM)
        return 0


async def _guard(_process: Process, _args: Sequence[str]) -> int:
    await trio.sleep_forever()
    return 0


def encoded(document: dict[str, Any]) -> bytes:
    """Return a configuration as the content of a file: JSON is valid YAML."""
    return json.dumps(document, indent=1).encode()


@contextlib.contextmanager
def _rarely() -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for module, name, seconds in RARER:
            patches.enter_context(patch.object(module, name, seconds))
        yield


@contextlib.contextmanager
def _collector_alone() -> Iterator[None]:
    """Keep the server from freezing the heap: this process runs many servers in sequence."""
    freeze, app.freeze = app.freeze, lambda: None
    try:
        yield
    finally:
        app.freeze = freeze


@cache
def _configure_logs() -> None:
    logs.configure(json=True)  # once: a logger keeps the configuration of its first use


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Configure the log as `app.run` does."""
    _configure_logs()
    yield
