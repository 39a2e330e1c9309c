"""One local model, an engine or a command, and its instances, one after the other.

Guarantees: an instance starts only when all processes of earlier ones, and of those that make room for it,
are gone; and its end is reported once. The dispatcher decides whether the model is loaded.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
import structlog
import trio

from fairlead.base.config import AnyModelConfig, HealthConfig
from fairlead.base.errors import FairleadError, FaultyModel, LoadFailed, NodeFailed
from fairlead.base.supervision import FailureBoundary, described, log_failure
from fairlead.language.text.model import TextModel
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.model_process import (
    PROCESS_KINDS,
    ModelProcess,
    ProcessFactory,
    ProcessKind,
    ProcessOptions,
    make_process,
)
from fairlead.nodes.node import GpuUse, ModelState, Node
from fairlead.nodes.processes.memory import memory_of
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.router.dispatch.scheduling import JobScheduler
from fairlead.router.fleet.instance import Instance, Restarts
from fairlead.router.fleet.model_history import ModelHistory
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.router.fleet.status import ModelStatus

OnProgress = Callable[[str, float | None, str], None]

# The state is that of the newest instance. A draining model is ready; only the scheduler's state differs.
TRANSITIONS: frozenset[tuple[ModelState, ModelState]] = frozenset(
    {
        ("stopped", "loading"),
        ("failed", "loading"),
        ("stopping", "loading"),  # the new instance waits for the end of the earlier one
        ("loading", "ready"),
        ("loading", "stopping"),
        ("ready", "stopping"),
        ("stopping", "stopped"),
        ("stopping", "failed"),  # the end was not requested
    }
)

logger = structlog.get_logger("fairlead.model")


class ManagedModel:
    """A model and its current instance, if it has one.

    config: its settings, which apply from the next instance on.
    text: its tokenizer and templates; None: it is not an engine's.
    scheduler: what decides when it is loaded; it is told how that went.
    nodes: gets the node of a ready instance.
    on_loaded: called when it is loaded.
    on_died: called when a ready instance has ended by itself, or when its replacement has failed to load.
    on_progress: called with the progress of a load.
    health: when a command is given up.
    make_process: makes what runs it, once per load.

    `output` has the last lines of all instances. `restarts` says whether it is to be started again. With a
    `fault` in its files or settings it is not started.
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
        make_process: ProcessFactory = make_process,
    ) -> None:
        self.config = config
        self.text = text
        self.fault: FaultyModel | None = None
        self.memory_bytes = 0
        self.output = ProcessOutput()
        self.restarts = Restarts()
        self._health = health
        self._scheduler = scheduler
        self._nodes = nodes
        self._on_loaded = on_loaded
        self._on_died = on_died
        self._on_progress = on_progress
        self._make_process = make_process
        self._state: ModelState = "stopped"
        self._instances: list[Instance] = []  # those that have not ended; the last is the current one
        self._history = ModelHistory()

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.config.name

    @property
    def kind(self) -> ProcessKind:
        """What runs it."""
        return PROCESS_KINDS[self.config.kind]

    @property
    def node_id(self) -> str:
        """The id of its node, in every instance."""
        return f"{self.config.kind}:{self.name}"

    @property
    def state(self) -> ModelState:
        """Its state; "ready" also while the dispatcher drains it."""
        return self._state

    @property
    def instance(self) -> Instance | None:
        """Its current instance; None when it is stopped."""
        return self._instances[-1] if self._instances else None

    @property
    def stuck(self) -> str | None:
        """Why this model was given up as stuck; None if it was not, or once it is loaded again."""
        reasons = [instance.stuck for instance in self._instances]
        reason = next(filter(None, reasons), self._history.stuck)
        return f"{reason} and is started again" if reason else None

    @property
    def pid(self) -> int | None:
        """The id of its process; None if there is none."""
        return None if self._process is None else self._process.pid

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU memory that its process takes; None if it is on no GPU."""
        return None if self._process is None else self._process.gpu

    # Life cycle --------------------------------------------------------------------------------------

    def begin(self, spawn: Callable[..., None], after: Sequence[trio.Event] = ()) -> None:
        """Start an instance after the events `after` and its own earlier instances; `spawn` starts a task."""
        self._become("loading")
        earlier = [instance.ended for instance in self._instances]
        instance = Instance()
        self._instances.append(instance)
        progress = 0.0 if self.kind.reports_progress else None
        self._history.load_began(progress, "waiting for room" if after else "")
        spawn(self._run, instance, [*after, *earlier])

    def end(self) -> None:
        """End its instances. Returns at once: `Instance.ended` is set when each has ended."""
        if self._state in ("loading", "ready"):
            self._become("stopping")
        for instance in self._instances:
            instance.scope.cancel()
        self.restarts.cancel()

    def evict(self) -> None:
        """End its instances, because another model needs the room."""
        self._history.counts.evictions += self._state == "ready"
        self.end()

    def give_up(self) -> None:
        """If it has died, stop counting it as missing: its memory is used now. It may still be restarted."""
        if not self._instances:
            self.restarts.give_up()

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on, also in the current instance."""
        self._health = health
        for instance in self._instances:
            if instance.node is not None:
                instance.node.change_health(health)

    async def measure(self) -> None:
        """Measure the memory that its processes take: of the GPU, if the model is on one."""
        if (gpu := self.gpu) is not None:
            self.memory_bytes = gpu.taken_bytes
        elif (pid := self.pid) is not None and self._state == "ready":
            measured = await trio.to_thread.run_sync(partial(memory_of, pid, group=self.kind.has_group))
            if self.pid == pid:
                self.memory_bytes = measured

    def _become(self, state: ModelState) -> None:
        """Change the state. Raises AssertionError for a transition not in the table, which is a bug."""
        if (self._state, state) not in TRANSITIONS:
            raise AssertionError(f"model {self.name} cannot go from {self._state} to {state}")
        self._state = state

    async def _run(self, instance: Instance, after: Sequence[trio.Event]) -> None:
        """Run one instance. Any failure in it is this model's, and does not leave this method."""
        boundary = FailureBoundary()
        try:
            with boundary, instance.scope:
                for event in after:
                    await event.wait()
                instance.began_at = trio.current_time()
                instance.node = self._new_process()
                await instance.node.run()
        finally:
            self._ended(instance, boundary.failure)

    def _ended(self, instance: Instance, failure: BaseException | None) -> None:
        """Account for the end of an instance: first free its room, so that nothing is loaded before."""
        if instance is self.instance and self._state != "stopping":
            self._become("stopping")
        self._instances.remove(instance)
        self.memory_bytes = 0
        was_requested = instance.scope.cancel_called
        if not self._instances:
            has_failed = failure is not None and not was_requested
            self._become("failed" if has_failed or self._history.problem is not None else "stopped")
            self._history.load_progressed(0.0, "")
        instance.settled.set()
        instance.ended.set()
        with ExitStack() as reports:  # called last to first, each even if another raises
            if failure is not None:
                report = self._failed_to_stop if was_requested else self._failed
                reports.callback(report, instance, failure)
            reports.callback(self._scheduler.stopped, frozenset({self.name}))
            if instance.node is not None and self._scheduler.node_counts(self.node_id) is not None:
                reports.callback(self._nodes.remove, self.node_id)  # the node could not report it itself

    def _failed_to_stop(self, _instance: Instance, failure: BaseException) -> None:
        if not isinstance(failure, LoadFailed | NodeFailed):
            log_failure("model did not stop cleanly", failure, model=self.name)

    def _failed(self, instance: Instance, failure: BaseException) -> None:
        """Report that an instance ended without a request."""
        log_failure("model died" if instance.was_ready else "load failed", failure, model=self.name)
        known = isinstance(failure, FairleadError)
        problem = described(failure) if known else f"{self.name} failed: {described(failure)}"
        if instance.was_ready:
            self.restarts.is_due = True
            self.restarts.ran(trio.current_time() - instance.ready_at)
            self._history.died(problem, instance.stuck)
        else:
            self._history.load_failed(problem)
            error = failure if isinstance(failure, LoadFailed) else LoadFailed(problem)
            self._scheduler.load_failed(frozenset({self.name}), error)
        if self.restarts.is_due:
            self._on_died(self)

    # Reports of its nodes ----------------------------------------------------------------------------

    def _on_report(self, node: Node, limits: NodeLimits | None) -> None:
        """Handle a report of an instance's node; see `NodeReport`."""
        instance = next(instance for instance in self._instances if instance.node is node)
        if limits is None:
            self._went_down(instance)
        elif instance.was_ready:
            self._nodes.report(node, limits)
        else:
            self._came_up(instance, node, limits)

    def _came_up(self, instance: Instance, node: Node, limits: NodeLimits) -> None:
        """Record that an instance is loaded. If its end was requested just before, it stays "stopping"."""
        if instance is self.instance and self._state == "loading":
            self._become("ready")
        self._nodes.report(node, limits)
        # Only now, because a failure of the scheduler is one of the load.
        instance.was_ready, instance.ready_at = True, trio.current_time()
        instance.settled.set()
        duration_s = instance.ready_at - instance.began_at
        self._history.loaded(duration_s, is_restart=self.restarts.is_due)
        self.restarts.cancel()
        self._on_loaded(self)

    def _went_down(self, instance: Instance) -> None:
        """Record that an instance takes no more jobs: it has died, unless its end was requested."""
        if not instance.scope.cancel_called:
            self.restarts.is_due = True
        if instance is self.instance and self._state == "ready":
            self._become("stopping")
        self._nodes.remove(self.node_id)

    # Status ------------------------------------------------------------------------------------------

    def status(self) -> ModelStatus:
        """Return its status."""
        now = None if self._process is None else self._process.status()
        ready = now if self._state == "ready" else None
        seats = self._scheduler.node_counts(self.node_id)
        busy = 0 if seats is None else seats.busy
        is_draining = self._state == "ready" and seats is not None and seats.draining
        state = "failed" if self._state == "stopped" and self.fault is not None else self._state
        return ModelStatus(
            model=self.name,
            kind=self.config.kind,
            node=self.node_id,
            state="draining" if is_draining else state,
            seats=0 if ready is None else ready.seats,
            busy=busy,
            sequences=busy if ready is None else ready.sequences,
            waiting=0 if ready is None else ready.waiting,
            memory_bytes=self.memory_bytes,
            ttl_s=self.config.ttl_s,
            problem=self.stuck or self._history.problem or (self.fault.message if self.fault else None),
            aliases=self.config.aliases,
            unlisted=self.config.unlisted,
            output=() if now is None else now.output,
            load=self._history.load,
            counts=msgspec.structs.replace(self._history.counts),
            engine=None if ready is None else ready.engine,
        )

    @property
    def _process(self) -> ModelProcess | None:
        return None if self.instance is None else self.instance.node

    def _new_process(self) -> ModelProcess:
        if self.fault is not None:
            raise FaultyModel.of(self.name, self.fault.reason)

        def progressed(fraction: float | None, stage: str) -> None:
            self._history.load_progressed(fraction, stage)
            self._on_progress(self.name, fraction, stage)

        return self._make_process(
            ProcessOptions(
                config=self.config,
                text=self.text,
                report=self._on_report,
                health=self._health,
                on_progress=progressed,
                on_line=self.output.add,
            )
        )
