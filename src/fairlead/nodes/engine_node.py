"""The built-in engine as a node: one run of one model's child process, from its start to its end."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import trio

from fairlead.answer.sink import Sink
from fairlead.config import HealthConfig, ModelConfig
from fairlead.grant import Grant
from fairlead.job import Job
from fairlead.messages import EngineStatistics, Ready, WorkerSpec
from fairlead.nodes.loaded_engine import LoadedEngine
from fairlead.nodes.node import GpuUse, NodeReport
from fairlead.nodes.status import ProcessStatus
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND, Worker


def worker_spec(model: ModelConfig) -> WorkerSpec:
    """Return the part of a model's configuration that is sent to its process."""
    cache = model.kv_cache
    return WorkerSpec(
        path=str(model.path),
        device=model.device,
        dtype=model.dtype,
        quantization=model.quantization,
        slots=model.slots,
        max_batch=model.max_batch,
        max_batched_tokens=model.max_batched_tokens,
        max_model_len=model.max_model_len,
        max_input_tokens=model.max_input_tokens,
        max_output_tokens=model.max_output_tokens,
        kv_cache_bytes=None if cache.max_memory_mb is None else cache.max_memory_mb * 1024 * 1024,
        kv_cache_entries=cache.max_entries,
        eviction_threshold=cache.eviction_threshold,
        cleanup_interval_s=cache.cleanup_interval_s,
        eviction_policy=cache.eviction_policy,
        gpu_memory=model.gpu_memory,
        watchdog_s=model.watchdog_s,
        threads=model.threads,
        parallel=model.parallel,
    )


class EngineNode:
    """One run of a model's child process. Each restart needs a new `EngineNode`.

    `command` starts the child; tests replace it. `on_line` is called with each line that the child prints.
    """

    def __init__(
        self,
        model: TextModel,
        spec: WorkerSpec,
        report: NodeReport,
        *,
        on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None,
        on_line: Callable[[str], None] = lambda _line: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.id = f"engine:{model.name}"
        self.models = frozenset({model.name})
        self._model = model
        self._spec = spec
        self._engine = LoadedEngine(model, spec, lambda limits: report(self, limits))
        self._on_progress = on_progress
        self._on_line = on_line
        self._command = command
        self._worker: Worker | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded now."""
        return self._engine.ready is not None

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU of its child, and the memory taken there; None on a CPU, or while it is not loaded."""
        return self._engine.gpu

    @property
    def stuck(self) -> str | None:
        """Why the child was given up although it had not ended; None if it was not."""
        return self._worker.stuck if self._worker is not None else None

    @property
    def pid(self) -> int | None:
        """The child's process id, if there is a child."""
        return self._worker.pid if self._worker is not None else None

    def change_health(self, health: HealthConfig) -> None:
        """Do nothing: a child is not probed, but supervised by the configured watchdog."""

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the child, call `started()` when its model is loaded, and run until it ends.

        Raises `LoadFailed` if it does not become ready, and `NodeFailed` if it ends afterwards or is stuck;
        never returns. Cancelling ends the child. Calls `report`; the caller reports a failed
        load. When this is over, the child is gone and every job has failed.
        """
        assert self._worker is None, "an engine node is run once"
        self._worker = Worker(
            self._spec,
            name=self._model.name,
            command=self._command,
            on_progress=self._on_progress,
            on_ready=self._came_up,
            on_stuck=lambda _error: self._engine.went_down(),
            on_line=self._on_line,
        )
        try:
            await self._worker.run(task_status=task_status)
        finally:
            self._engine.went_down()

    def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None
    ) -> AbstractAsyncContextManager[None]:
        """See `Node`, and `LoadedEngine.generate`."""
        return self._engine.generate(job, into, grant=grant)

    async def prepare(self, job: Job) -> None:
        """See `LoadedEngine.prepare`."""
        await self._engine.prepare(job)

    def raise_epoch(self, epoch: int) -> None:
        """Make the child refuse grants of lower epochs from now on; not before `run`."""
        assert self._worker is not None
        self._worker.raise_epoch(epoch)

    def status(self) -> ProcessStatus:
        """Return its status; it has no seats and no `engine` before the model is loaded."""
        return self._engine.status()

    def statistics(self) -> EngineStatistics:
        """Return the child's own counts, as of its last step."""
        return self._engine.statistics()

    def _came_up(self, ready: Ready) -> None:
        assert self._worker is not None
        self._engine.came_up(ready, self._worker.sequences)
