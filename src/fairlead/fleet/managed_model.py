"""One local model, an engine or a command, and its instances, one after the other.

    stopped → loading → ready → (draining) → stopping → stopped, or failed

Promises: an instance starts only when all processes of earlier ones, and of those that make room for it, are
gone; and its end is reported once. The dispatcher decides whether the model is loaded.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import structlog
import trio

from fairlead.config import AnyModelConfig, CommandConfig, HealthConfig, ModelConfig
from fairlead.dispatch.scheduling import JobScheduler
from fairlead.errors import FairleadError, LoadFailed, NodeFailed
from fairlead.fleet.node_registry import NodeRegistry
from fairlead.fleet.status import ModelStatus, NodeKind
from fairlead.nodes.model_process import ModelProcess, ProcessFactory, ProcessOptions, make_process
from fairlead.nodes.node import GpuUse, ModelState
from fairlead.process.memory import memory_of
from fairlead.process.output import ProcessOutput
from fairlead.supervision import FailureBoundary, described, log_failure
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0

OnProgress = Callable[[str, float | None, str], None]

logger = structlog.get_logger("fairlead.model")


class Instance:
    """One instance, from the decision to load it until its processes are gone: `ended` is set then."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.node: ModelProcess | None = None
        self.was_ready = False
        self.began_at = 0.0
        self.ready_at = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        return self.node is not None and self.node.is_ready

    @property
    def is_dying(self) -> bool:
        """Whether it was ready and no longer is, although it was not cancelled."""
        return self.was_ready and not self.is_ready and not self.scope.cancel_called


class ManagedModel:
    """A model and its current instance, if it has one. Only engine models have a `text`.

    `on_loaded` is called when it is loaded, `on_died` when a ready instance has ended by itself, or when its
    replacement has failed to load, and `on_progress` with the progress of a load. `health` says when a
    command is given up. `config` applies from the next instance on. `output` has the last lines
    of all instances.
    """

    def __init__(
        self,
        config: AnyModelConfig,
        text: TextModel | None,
        *,
        scheduler: JobScheduler,
        nodes: NodeRegistry,
        on_loaded: Callable[["ManagedModel"], None],
        on_died: Callable[["ManagedModel"], None],
        on_progress: OnProgress,
        health: HealthConfig,
        engine_command: Sequence[str] = COMMAND,
        make_process: ProcessFactory = make_process,
    ) -> None:
        self.config = config
        self.text = text
        self._health = health
        self.memory_bytes = 0
        self.output = ProcessOutput()
        self._scheduler = scheduler
        self._nodes = nodes
        self._on_loaded = on_loaded
        self._on_died = on_died
        self._on_progress = on_progress
        self._engine_command = engine_command
        self._make_process = make_process
        self._lives: list[Instance] = []  # those that have not ended; the last is the current one
        self._backoff_s = FIRST_BACKOFF_S
        self._progress: float | None = 0.0
        self._stage = ""
        self._has_died = False
        self._is_given_up = False
        self._problem: str | None = None
        self._stuck_reason: str | None = None
        self._loads = self._load_failures = self._restarts = self._stuck = self._evictions = 0
        self._load_s = 0.0

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.config.name

    @property
    def kind(self) -> NodeKind:
        """What runs it."""
        return "engine" if isinstance(self.config, ModelConfig) else "command"

    @property
    def node_id(self) -> str:
        """The id of its node, in every instance."""
        return f"{self.kind}:{self.name}"

    @property
    def life(self) -> Instance | None:
        """Its current instance; None when it is stopped."""
        return self._lives[-1] if self._lives else None

    @property
    def is_ready(self) -> bool:
        """Whether it is loaded now."""
        return self.life is not None and self.life.is_ready

    @property
    def has_died(self) -> bool:
        """Whether its last instance died; False again once it is loaded or unloaded."""
        return self._has_died

    @property
    def is_missed(self) -> bool:
        """Whether it has died or is dying, and is to be restarted."""
        dying = any(life.is_dying for life in self._lives)
        return (self._has_died or dying) and not self._is_given_up

    @property
    def pid(self) -> int | None:
        """The id of its process; None if there is none."""
        return None if self.life is None or self.life.node is None else self.life.node.pid

    @property
    def stuck(self) -> str | None:
        """Why this model was given up as stuck; None if it was not, or once it is loaded again."""
        reasons = [life.node.stuck for life in self._lives if life.node is not None]
        reason = next(filter(None, reasons), self._stuck_reason)
        return f"{reason} and is started again" if reason else None

    @property
    def state(self) -> ModelState:
        """The state of the model."""
        life = self.life
        if life is None:
            return "stopped" if self._problem is None else "failed"
        if life.scope.cancel_called or life.is_dying:
            return "stopping"
        if not self.is_ready:
            return "loading"
        counts = self._scheduler.node_counts(self.node_id)
        return "draining" if counts is not None and counts.draining else "ready"

    # Life cycle --------------------------------------------------------------------------------------

    def begin(self, spawn: Callable[..., None], after: Sequence[trio.Event] = ()) -> None:
        """Start an instance after the events `after` and its own earlier instances; `spawn` starts a task."""
        before = [life.ended for life in self._lives]
        life = Instance()
        self._lives.append(life)
        self._progress = 0.0 if self.kind == "engine" else None
        self._stage, self._problem = "waiting for room" if after else "", None
        spawn(self._live, life, [*after, *before])

    def end(self) -> None:
        """End its instances. Returns at once: `Instance.ended` is set when each has ended."""
        for life in self._lives:
            life.scope.cancel()
        self._has_died = False

    def give_up(self) -> None:
        """If it has died, stop counting it as missed: its room is used now. It may still be restarted."""
        self._is_given_up = self.life is None and self._has_died

    def evict(self) -> None:
        """End its instances, because another model needs the room."""
        if self.is_ready:
            self._evictions += 1
        self.end()

    def next_backoff_s(self) -> float:
        """Return the pause before the next restart, and double it, up to `LONGEST_BACKOFF_S`."""
        backoff_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        return backoff_s

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU memory that its process takes; None if it is on no GPU."""
        node = None if self.life is None else self.life.node
        return None if node is None else node.gpu

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on, also in the current instance."""
        self._health = health
        for life in self._lives:
            if life.node is not None:
                life.node.change_health(health)

    async def measure(self) -> None:
        """Measure the memory that its processes take: of the GPU, if the model is on one."""
        if (gpu := self.gpu) is not None:
            self.memory_bytes = gpu.taken_bytes
        elif (pid := self.pid) is not None and self.is_ready:
            of_group = self.kind == "command"
            measured = await trio.to_thread.run_sync(partial(memory_of, pid, group=of_group))
            if self.pid == pid:
                self.memory_bytes = measured

    async def _live(self, life: Instance, after: Sequence[trio.Event]) -> None:
        """Run one instance. Any failure in it is this model's, and does not leave this method."""
        boundary = FailureBoundary()
        try:
            with boundary, life.scope:
                for over in after:
                    await over.wait()
                life.began_at = trio.current_time()
                life.node = self._process()
                await life.node.run(task_status=_Ready(partial(self._came_up, life)))
        finally:
            self._ended(life, boundary.failure)

    def _ended(self, life: Instance, failure: BaseException | None) -> None:
        """Account for the end of an instance: first free its room, so that nothing is loaded before."""
        self._lives.remove(life)
        self.memory_bytes = 0
        life.ended.set()
        with ExitStack() as reports:  # called last to first, each even if another raises
            if failure is not None:
                reports.callback(self._failed, life, failure)
            reports.callback(self._scheduler.stopped, frozenset({self.name}))
            if life.node is not None and self._scheduler.node_counts(self.node_id) is not None:
                reports.callback(self._nodes.remove, self.node_id)  # the node could not report it itself

    def _process(self) -> ModelProcess:
        def progressed(fraction: float | None, stage: str) -> None:
            self._progress, self._stage = fraction, stage
            self._on_progress(self.name, fraction, stage)

        return self._make_process(
            ProcessOptions(
                config=self.config,
                text=self.text,
                report=self._nodes.report,
                health=self._health,
                on_progress=progressed,
                on_line=self.output.add,
                engine_command=self._engine_command,
            )
        )

    def _came_up(self, life: Instance) -> None:
        life.was_ready, life.ready_at = True, trio.current_time()
        self._loads += 1
        self._load_s = round(life.ready_at - life.began_at, 3)
        self._restarts += self._has_died
        self._has_died = self._is_given_up = False
        self._progress, self._problem, self._stuck_reason = 1.0, None, None
        self._on_loaded(self)

    def _failed(self, life: Instance, failure: BaseException) -> None:
        if life.scope.cancel_called:  # this end was requested
            if not isinstance(failure, LoadFailed | NodeFailed):
                log_failure("model ended badly", failure, model=self.name)
            return
        log_failure("model lost" if life.was_ready else "model not loaded", failure, model=self.name)
        known = isinstance(failure, FairleadError)
        self._problem = described(failure) if known else f"{self.name} failed: {described(failure)}"
        if life.was_ready:
            self._has_died = True
            if life.node is not None and life.node.stuck is not None:
                self._stuck += 1
                self._stuck_reason = life.node.stuck
            if trio.current_time() - life.ready_at > HEALTHY_AFTER_S:
                self._backoff_s = FIRST_BACKOFF_S
        else:
            self._load_failures += 1
            error = failure if isinstance(failure, LoadFailed) else LoadFailed(self._problem)
            self._scheduler.load_failed(frozenset({self.name}), error)
        if self._has_died:
            self._on_died(self)

    # Status ------------------------------------------------------------------------------------------

    def status(self) -> ModelStatus:
        """Return its status."""
        node = None if self.life is None else self.life.node
        told: dict[str, Any] = {} if node is None else msgspec.structs.asdict(node.status())
        if not self.is_ready:
            told = {"output": told.get("output", ())}
        counts = self._scheduler.node_counts(self.node_id)
        busy = 0 if counts is None else counts.busy
        return ModelStatus(
            **{"sequences": busy}
            | {name: value for name, value in told.items() if name in ModelStatus.__struct_fields__}
            | {
                "model": self.name,
                "kind": self.kind,
                "node": self.node_id,
                "state": self.state,
                "busy": busy,
                "load_progress": 0.0 if self.life is None else self._progress,
                "load_stage": "" if self.life is None else self._stage,
                "memory_bytes": self.memory_bytes,
                "ttl_s": self.config.ttl_s,
                "problem": self.stuck or self._problem,
                "aliases": self.config.aliases,
                "unlisted": isinstance(self.config, CommandConfig) and self.config.unlisted,
                "restarts": self._restarts,
                "loads": self._loads,
                "load_s": self._load_s,
                "load_failures": self._load_failures,
                "evictions": self._evictions,
                "stuck": self._stuck,
            }
        )


class _Ready:
    """A task status that calls a function."""

    def __init__(self, came_up: Callable[[], None]) -> None:
        self._came_up = came_up

    def started(self, _value: object = None) -> None:
        self._came_up()
