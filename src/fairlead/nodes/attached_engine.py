"""An engine that another process has started, as a node: one connection to it, from attaching to its end."""

from contextlib import AbstractAsyncContextManager

import trio

from fairlead.answer.sink import Sink
from fairlead.config import HealthConfig
from fairlead.grant import Grant
from fairlead.job import Job
from fairlead.messages import EngineStatistics, Ready, WorkerSpec
from fairlead.nodes.loaded_engine import LoadedEngine
from fairlead.nodes.node import GpuUse, NodeReport
from fairlead.nodes.status import ProcessStatus
from fairlead.text.model import TextModel
from fairlead.worker.attachment import Attachment


class AttachedEngine:
    """One connection of this server, `front`, to the engine at `spec.listen`, which has loaded `model`.

    `spec` is the one that the engine was started with. Each new connection needs a new `AttachedEngine`. Jobs
    need a grant. `stuck` and `pid` are None: whoever started the process supervises it.
    """

    pid: int | None = None
    stuck: str | None = None

    def __init__(
        self,
        model: TextModel,
        spec: WorkerSpec,
        report: NodeReport,
        *,
        front: str,
    ) -> None:
        assert spec.listen is not None, "the engine serves fronts"
        self.id = f"engine:{model.name}"
        self.models = frozenset({model.name})
        self._engine = LoadedEngine(model, spec, lambda limits: report(self, limits))
        self._attachment = Attachment(
            spec.listen, front=front, on_ready=self._came_up, on_end=self._engine.went_down
        )

    @property
    def is_ready(self) -> bool:
        """Whether it is attached."""
        return self._engine.ready is not None

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU of the engine's process; None on a CPU, or while it is not attached."""
        return self._engine.gpu

    def change_health(self, health: HealthConfig) -> None:
        """Do nothing: see `EngineNode`."""

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Attach, call `started()`, and serve until the connection ends.

        Never returns: raises `NodeFailed` if it cannot be attached, or when the connection has ended. Calls
        `report`. When this is over, every job has failed.
        """
        await self._attachment.run(task_status=task_status)

    def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None
    ) -> AbstractAsyncContextManager[None]:
        """See `Node`, and `LoadedEngine.generate`. The engine requires the `grant`."""
        assert grant is not None, "a front runs jobs with the grants of its dispatcher"
        return self._engine.generate(job, into, grant=grant)

    async def prepare(self, job: Job) -> None:
        """See `LoadedEngine.prepare`."""
        await self._engine.prepare(job)

    def status(self) -> ProcessStatus:
        """Return the engine's status, for all fronts together, as of its latest frame to this one."""
        return self._engine.status()

    def statistics(self) -> EngineStatistics:
        """Return the engine's counts, for all fronts together, as of its latest frame to this one."""
        return self._engine.statistics()

    def _came_up(self, ready: Ready) -> None:
        self._engine.came_up(ready, self._attachment.sequences)
