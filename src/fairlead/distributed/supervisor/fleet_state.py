"""What a front gets of the fleet and the queue: one value, made by the dispatcher when a front asks."""

from math import inf, isinf

import msgspec
import trio

from fairlead.base.config import CommandConfig, NodeConfig
from fairlead.base.messages import WorkerSpec
from fairlead.distributed.supervisor.supervised_process import SupervisedProcesses
from fairlead.router.dispatch.dispatcher import Dispatcher, DispatchStatistics
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.status import ModelStatus, NodeStatus
from fairlead.router.quotas.quotas import QuotaUsage


class RemoteState(msgspec.Struct, frozen=True):
    """A remote node: its configuration, its models, and the dialects that it speaks (None: all).

    `is_withdrawn`: it gets no more jobs.
    `may_be_restricted`: as for `Upstream`.
    `is_dead`: its probes get no answer.
    `deaths`: how often they began to get none, the last time `died_s` seconds ago. Jobs of then are lost.
    """

    config: NodeConfig
    models: tuple[str, ...]
    dialects: tuple[str, ...] | None
    is_withdrawn: bool
    may_be_restricted: bool
    is_dead: bool = False
    deaths: int = 0
    died_s: float = inf


class LocalState(msgspec.Struct, frozen=True):
    """What the status of a local model lacks.

    expires_in_s: when it is unloaded if it gets no job; None: never.
    gpu_bytes: the GPU memory that it takes.
    load_began_s: how long ago its load began; None if it is not loaded.
    load_ended_s: how long ago its load ended; None if it is not loaded.
    printed: how many lines its processes have printed.
    """

    expires_in_s: float | None
    gpu_bytes: int
    load_began_s: float | None
    load_ended_s: float | None
    printed: int


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of models, nodes and queue.

    instance: the id of the server.
    knows_nodes: whether a dispatcher that has just started has probed its nodes.
    is_ready: whether no job would wait for a model to be loaded.
    problems: why models are unhealthy, by name.
    models: all models.
    nodes: all nodes.
    queue: the queue's counts.
    local: what the statuses of local models lack.
    remote: what the statuses of remote nodes lack.
    engines: the engines that are up.
    commands: the commands that are up.
    usage: of each key with limits, by owner (see `owner_of`).
    """

    instance: str
    knows_nodes: bool
    is_ready: bool
    problems: dict[str, str]
    models: tuple[ModelStatus, ...]
    nodes: tuple[NodeStatus, ...]
    queue: DispatchStatistics
    local: dict[str, LocalState]
    remote: tuple[RemoteState, ...]
    engines: dict[str, WorkerSpec]
    commands: dict[str, CommandConfig]
    usage: dict[str, QuotaUsage] = {}

    @classmethod
    def empty(cls) -> "FleetState":
        """Return the state before a dispatcher has answered: nothing is there."""
        queue = dict.fromkeys((field.name for field in msgspec.structs.fields(DispatchStatistics)), 0)
        return cls(
            instance="",
            knows_nodes=False,
            is_ready=False,
            problems={},
            models=(),
            nodes=(),
            queue=msgspec.convert(queue, DispatchStatistics),
            local={},
            remote=(),
            engines={},
            commands={},
        )


def state_of(fleet: Fleet, dispatcher: Dispatcher, processes: SupervisedProcesses) -> FleetState:
    """Return the state now."""
    models = tuple(_with_jobs(status) for status in fleet.models())
    return FleetState(
        instance=fleet.instance,
        knows_nodes=fleet.knows_nodes,
        is_ready=fleet.is_ready,
        problems=fleet.problems,
        models=models,
        nodes=tuple(fleet.nodes()),
        queue=dispatcher.statistics(),
        local={status.model: _local(fleet, status.model) for status in models if status.kind != "remote"},
        remote=tuple(
            RemoteState(
                entry.config,
                tuple(sorted(entry.models)),
                None if entry.dialects is None else tuple(entry.dialects),
                entry.is_withdrawn,
                entry.may_be_restricted,
                entry.is_dead,
                entry.deaths,
                entry.died_s,
            )
            for entry in fleet.remote_entries()
        ),
        engines=processes.engines,
        commands=processes.commands,
    )


def encoded(state: FleetState) -> dict[str, object]:
    """Return the state as the value of an answer."""
    fields: dict[str, object] = msgspec.to_builtins(state)
    return fields


def decoded(value: object) -> FleetState:
    """Return the state from the value of an answer."""
    return msgspec.convert(value, FleetState)


def _with_jobs(status: ModelStatus) -> ModelStatus:
    """Return the status of a command with its jobs: its process is not asked for them."""
    if status.kind != "command" or status.state != "ready":
        return status
    return msgspec.structs.replace(status, sequences=status.busy)


def _local(fleet: Fleet, model: str) -> LocalState:
    expires_in_s = fleet.expires_in_s(model)
    now, times = trio.current_time(), fleet.load_times(model)
    began, ended = (None, None) if times is None else (now - times[0], now - times[1])
    return LocalState(
        expires_in_s=None if isinf(expires_in_s) else expires_in_s,
        gpu_bytes=fleet.gpu_bytes(model),
        load_began_s=began,
        load_ended_s=ended,
        printed=fleet.output(model).end,
    )


def seconds(limit_s: float | None) -> float:
    """Return a time of which None means without limit."""
    return inf if limit_s is None else limit_s
