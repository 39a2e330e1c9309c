"""The messages between the supervisor and its children, and a child's end of their connection.

A child gets its socket by inheritance, and the configuration in its first message. The end of the connection
means that the other process has ended: a child then ends, too.
"""

from pathlib import Path
from typing import Any

import msgspec

from fairlead.base.config import CommandConfig, Config, HealthConfig
from fairlead.base.grant import FIRST_GRANT
from fairlead.base.messages import EngineStatistics, Ready, WorkerSpec
from fairlead.nodes.limits import NodeLimits

ALIVE_INTERVAL_S = 1.0


def pack(config: Config) -> bytes:
    """Return a configuration as a message's field."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def unpack(packed: bytes) -> Config:
    """Return a configuration that was packed by the supervisor."""
    return _config_decoder.decode(packed)


def _path(kind: type, text: Any) -> Any:
    assert kind is Path
    return Path(text)


_config_decoder = msgspec.msgpack.Decoder(Config, dec_hook=_path)


# Supervisor → child --------------------------------------------------------------------------------


class StartProcess(msgspec.Struct, frozen=True, tag="start"):
    """Run a model's process. Sent by the dispatcher, and in `RunDispatcher` for each one that runs.

    name: unique for each run.
    model: the model.
    spec: what an engine loads; None: it is a command.
    config: the settings of a command; None: it is an engine.
    health: when a command is given up.
    """

    name: str
    model: str
    spec: WorkerSpec | None = None
    config: CommandConfig | None = None
    health: HealthConfig = HealthConfig()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What must be equal for a new dispatcher to keep the process."""
        spec = (
            None
            if self.spec is None
            else msgspec.structs.replace(self.spec, listen="", first_grant=FIRST_GRANT)
        )
        config = None if self.config is None else msgspec.structs.replace(self.config, price=None)
        return (self.model, spec, config)


class ProcessUp(msgspec.Struct, frozen=True, tag="up"):
    """The model of a process is loaded.

    name: the process.
    pid: its process id.
    ready: what an engine has said; None: it is a command.
    limits: those that a command has reported.
    command: a command as it was started: with its port and its key.
    """

    name: str
    pid: int | None
    ready: Ready | None = None
    limits: NodeLimits | None = None
    command: CommandConfig | None = None


class RunningProcess(msgspec.Struct, frozen=True):
    """A process that is up when a dispatcher starts."""

    start: StartProcess
    up: ProcessUp


class RunDispatcher(msgspec.Struct, frozen=True, tag="dispatcher"):
    """Run the dispatcher.

    config: the configuration.
    directory: where it listens for fronts.
    key: which the fronts have, too.
    epoch: the number of this dispatcher, higher than all before.
    expected: the fronts that had a dispatcher before; None if they are not known.
    running: the models' processes.
    """

    config: bytes
    directory: str
    key: bytes
    epoch: int
    expected: tuple[str, ...] | None
    running: tuple[RunningProcess, ...] = ()


class RunFront(msgspec.Struct, frozen=True, tag="front"):
    """Be a front.

    config: the configuration.
    directory: where the dispatcher listens.
    key: which the dispatcher has, too.
    name: its name, which no other has had.
    number: its number.
    descriptors: those of the sockets for HTTP of each front, by number.
    """

    config: bytes
    directory: str
    key: bytes
    name: str
    number: int = 0
    descriptors: tuple[tuple[int, ...], ...] = ()


class StandIn(msgspec.Struct, frozen=True, tag="stand in"):
    """Accept the connections of the fronts with these numbers, and of no others: they are not ready."""

    absent: tuple[int, ...]


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Apply another configuration."""

    config: bytes


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no more jobs; a front finishes those that it has, and ends."""


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """Report that the server is not ready any more; `Drain` follows."""


class FrontEnded(msgspec.Struct, frozen=True, tag="front ended"):
    """The front of this name has ended, and with it its jobs."""

    name: str


class ProcessProgress(msgspec.Struct, frozen=True, tag="progress"):
    """How far a model is loaded: 0 to 1; None: not known."""

    name: str
    fraction: float | None
    stage: str


class ProcessLine(msgspec.Struct, frozen=True, tag="line"):
    """A line that a process has printed."""

    name: str
    line: str


class ProcessCounts(msgspec.Struct, frozen=True, tag="counts"):
    """An engine's counts, about once a second."""

    name: str
    counts: EngineStatistics


class ProcessDown(msgspec.Struct, frozen=True, tag="down"):
    """A process takes no more jobs; `stuck`: why it was given up."""

    name: str
    stuck: str | None = None


class ProcessEnded(msgspec.Struct, frozen=True, tag="ended"):
    """No process of this run is left; `reason`: why it ended without a request."""

    name: str
    reason: str


ToChildRole = (
    RunDispatcher
    | RunFront
    | StandIn
    | Reload
    | Stopping
    | Drain
    | FrontEnded
    | ProcessProgress
    | ProcessLine
    | ProcessUp
    | ProcessCounts
    | ProcessDown
    | ProcessEnded
)

# Child → supervisor --------------------------------------------------------------------------------


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The event loop of the child runs. Sent every `ALIVE_INTERVAL_S`."""


class RoleReady(msgspec.Struct, frozen=True, tag="ready"):
    """A front accepts connections, or the dispatcher those of fronts."""


class LoadShown(msgspec.Struct, frozen=True, tag="loading"):
    """The progress of a load, for the person at the terminal."""

    model: str
    fraction: float | None
    stage: str


class ModelsLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Preloading is over; the names of all models."""

    models: tuple[str, ...]


class CannotStart(msgspec.Struct, frozen=True, tag="failed"):
    """The server cannot start, because of this child."""

    reason: str
    is_bad_config: bool


class EndProcess(msgspec.Struct, frozen=True, tag="end"):
    """End a model's process."""

    name: str


class ChangeHealth(msgspec.Struct, frozen=True, tag="health"):
    """Use another health check for a command."""

    name: str
    health: HealthConfig


ToSupervisor = (
    Alive | RoleReady | LoadShown | ModelsLoaded | CannotStart | StartProcess | EndProcess | ChangeHealth
)

to_role_decoder = msgspec.msgpack.Decoder(ToChildRole)
to_supervisor_decoder = msgspec.msgpack.Decoder(ToSupervisor)
