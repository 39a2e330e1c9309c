"""The built-in engine as a node: one model in a child process, restarted with backoff when it dies."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog
import trio

from fairlead.errors import FairleadError, LoadFailed, NodeFailed
from fairlead.job import Job
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.node import NodeLimits, NodeListener
from fairlead.text.answer import ChoiceText
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND, Worker
from fairlead.worker.wire import Output, Ready, WorkerSpec

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0

logger = structlog.get_logger("fairlead.node")


class EngineStatus(msgspec.Struct, frozen=True):
    """What `GET /running` says of the node. Blocks and sequences are the child's own counts."""

    model: str
    state: str
    seats: int
    sequences: int
    blocks_free: int
    blocks_total: int
    slots_free: int
    load_progress: float
    restarts: int


class EngineNode:
    """Owns the child of one model: starts it, watches it, starts it again.

    `command` starts the child; tests give one of their own.
    """

    def __init__(
        self,
        model: TextModel,
        spec: WorkerSpec,
        listener: NodeListener,
        *,
        on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.id = f"engine:{model.name}"
        self.models = frozenset({model.name})
        self._model = model
        self._spec = spec
        self._listener = listener
        self._on_progress = on_progress
        self._command = command
        self._worker: Worker | None = None
        self._ready: Ready | None = None
        self._load_progress = 0.0
        self._loads = 0

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded now."""
        return self._ready is not None

    @property
    def pid(self) -> int | None:
        """The child's process id, if there is a child."""
        return self._worker.pid if self._worker is not None else None

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the child running until cancelled. Raises `LoadFailed` only when the first load fails."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._load_progress = 0.0
            self._worker = Worker(self._spec, command=self._command, on_progress=self._progress)
            started_at = trio.current_time()
            status = task_status if self._loads == 0 else trio.TASK_STATUS_IGNORED
            try:
                # Not a nursery: this task has nothing to do but to be told when the child is ready.
                await self._worker.run(task_status=_Readiness(self._came_up, status))
            except (LoadFailed, NodeFailed) as error:
                if self._loads == 0:
                    raise
                self._went_down(error)
            if trio.current_time() - started_at > HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    @asynccontextmanager
    async def generate(self, job: Job) -> AsyncIterator[Deltas]:
        """Submit every sequence of the job; abort on exit what has not ended by then."""
        worker = self._worker
        if worker is None or not self.is_ready:
            raise NodeFailed(f"{self._model.name} is not running")
        deltas = Deltas(job.sequences)

        def failed(error: FairleadError) -> None:
            # Before any task learns that its job is over and frees a seat that is not there any more.
            if isinstance(error, NodeFailed):
                self._went_down(error)
            deltas.fail(error)

        sequences = [
            _Sequence(worker, deltas, self._choice(job, index), failed) for index in range(job.sequences)
        ]
        try:
            for index, sequence in enumerate(sequences):
                sequence.submit(job, index)
            yield deltas
        finally:
            for sequence in sequences:
                sequence.abort()

    def status(self) -> EngineStatus:
        """Return the picture `GET /running` shows."""
        ready, worker = self._ready, self._worker
        statistics = worker.statistics if worker is not None and ready is not None else None
        return EngineStatus(
            model=self._model.name,
            state="ready" if ready is not None else "loading",
            seats=ready.slots if ready is not None else 0,
            sequences=statistics.running + statistics.pending if statistics is not None else 0,
            blocks_free=statistics.blocks_free if statistics is not None else 0,
            blocks_total=ready.blocks_total if ready is not None else 0,
            slots_free=statistics.slots_free if statistics is not None else 0,
            load_progress=self._load_progress,
            restarts=max(0, self._loads - 1),
        )

    def _came_up(self, ready: Ready) -> None:
        self._ready = ready
        self._loads += 1
        self._load_progress = 1.0
        logger.info("model loaded", model=self._model.name, **msgspec.structs.asdict(ready))
        limits = NodeLimits(
            seats=ready.slots,
            max_model_len=ready.max_model_len,
            cache_tokens=ready.blocks_total * ready.block_size,
        )
        self._listener.node_up(self, limits)

    def _went_down(self, error: FairleadError) -> None:
        was_up, self._ready = self._ready is not None, None
        if was_up:
            logger.error("model lost", model=self._model.name, reason=error.message)
            self._listener.node_down(self)
        elif isinstance(error, LoadFailed):
            logger.error("model not loaded", model=self._model.name, reason=error.message)
            self._listener.load_failed(self, error)

    def _progress(self, fraction: float, stage: str) -> None:
        self._load_progress = fraction
        self._on_progress(fraction, stage)

    def _choice(self, job: Job, index: int) -> ChoiceText:
        return ChoiceText(
            self._model.tokenizer,
            job.stop,
            index,
            eos_token_ids=self._model.eos_token_ids,
            context=job.prompts[index // job.n],
        )


class _Readiness:
    """A task status that tells the node first, then whoever started it."""

    def __init__(self, came_up: Callable[[Ready], None], outer: trio.TaskStatus[Ready]) -> None:
        self._came_up = came_up
        self._outer = outer

    def started(self, value: Ready | None = None) -> None:
        assert value is not None
        self._came_up(value)
        self._outer.started(value)


class _Sequence:
    """One choice of a job on its way through the worker: outputs in, deltas out."""

    __slots__ = ("_choice", "_deltas", "_failed", "_key", "_worker")

    def __init__(
        self, worker: Worker, deltas: Deltas, choice: ChoiceText, failed: Callable[[FairleadError], None]
    ) -> None:
        self._worker = worker
        self._deltas = deltas
        self._choice = choice
        self._failed = failed
        self._key: int | None = None

    def submit(self, job: Job, index: int) -> None:
        prompt, number = divmod(index, job.n)
        sampling = job.sampling
        if sampling.seed is not None and number:
            # The same seed would give the same choice n times.
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + number)
        self._key = self._worker.submit(job.prompts[prompt], sampling, self._receive, self._failed)

    def abort(self) -> None:
        if self._key is not None:
            self._worker.abort(self._key)

    def _receive(self, output: Output) -> None:
        delta = self._choice.push(output)
        if delta is not None:
            self._deltas.put(delta)
        if self._choice.ended and output.finish_reason is None:
            self.abort()  # a stop string: the engine, which knows no text, would go on
