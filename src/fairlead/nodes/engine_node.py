"""The built-in engine as a node: one model in a child process, started again when it dies or is stuck."""

import hashlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog
import trio

from fairlead.config import ModelConfig
from fairlead.errors import FairleadError, InvalidRequest, LoadFailed, NodeFailed
from fairlead.job import Job
from fairlead.nodes.engine_statistics import EngineNodeStatistics, EngineStatus, ratio
from fairlead.nodes.node import NodeLimits, NodeListener
from fairlead.nodes.sequence import NodeSequence
from fairlead.nodes.sink import Sink
from fairlead.text.answer import ChoiceText
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND, Worker
from fairlead.worker.wire import EngineStatistics, Ready, WorkerSpec

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0

logger = structlog.get_logger("fairlead.node")


def worker_spec(model: ModelConfig) -> WorkerSpec:
    """Return what the model's process is told of its configuration."""
    cache = model.kv_cache
    return WorkerSpec(
        path=str(model.path),
        device=model.device,
        dtype=model.dtype,
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
        watchdog_s=model.watchdog_s,
        threads=model.threads,
    )


class EngineNode:
    """Owns the child of one model: starts it, watches it, starts it again.

    `isolate_tenants`: no tenant's prompts are answered faster because of another's. `command` starts the
    child; tests give one of their own.
    """

    def __init__(
        self,
        model: TextModel,
        spec: WorkerSpec,
        listener: NodeListener,
        *,
        isolate_tenants: bool = False,
        on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.id = f"engine:{model.name}"
        self.models = frozenset({model.name})
        self._model = model
        self._spec = spec
        self._listener = listener
        self._isolate_tenants = isolate_tenants
        self._on_progress = on_progress
        self._command = command
        self._worker: Worker | None = None
        self._ready: Ready | None = None
        self._load_progress = 0.0
        self._load_s = 0.0
        self._started_at = -math.inf
        self._loads = 0
        self._stuck = 0
        self._problem: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded now."""
        return self._ready is not None

    @property
    def problem(self) -> str | None:
        """Why the server is not well, if it is not: the child was stuck, and is not back yet."""
        return self._problem

    @property
    def pid(self) -> int | None:
        """The child's process id, if there is a child."""
        return self._worker.pid if self._worker is not None else None

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the child running until cancelled. Raises `LoadFailed` only when the first load fails."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._load_progress = 0.0
            self._worker = Worker(
                self._spec, command=self._command, on_progress=self._progress, on_stuck=self._went_down
            )
            self._started_at = trio.current_time()
            status = task_status if self._loads == 0 else trio.TASK_STATUS_IGNORED
            try:
                # Not a nursery: this task has nothing to do but to be told when the child is ready.
                await self._worker.run(task_status=_Readiness(self._came_up, status))
            except (LoadFailed, NodeFailed) as error:
                if self._loads == 0:
                    raise
                self._went_down(error)
            if trio.current_time() - self._started_at > HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    @asynccontextmanager
    async def generate(self, job: Job, into: Sink) -> AsyncIterator[None]:
        """Submit every sequence of the job; abort on exit what has not ended by then.

        The deadline in force is told to the engine too. `InvalidRequest` when a prompt is over the limit.
        """
        worker = self._worker
        if worker is None or not self.is_ready:
            raise NodeFailed(f"{self._model.name} is not running")
        self._check_input(job)

        def failed(error: FairleadError) -> None:
            # Before any task learns that its job is over and frees a seat that is not there any more.
            if isinstance(error, NodeFailed):
                self._went_down(error)
            into.fail(error)

        sequences = [
            NodeSequence(worker, into, self._choice(job, index), failed) for index in range(job.sequences)
        ]
        timeout_s = max(0.0, trio.current_effective_deadline() - trio.current_time())
        try:
            for index, sequence in enumerate(sequences):
                sequence.submit(
                    job,
                    index,
                    max_output_tokens=self._spec.max_output_tokens,
                    timeout_s=timeout_s if timeout_s < math.inf else None,
                    salt=self._salt(job),
                )
            yield
        finally:
            for sequence in sequences:
                sequence.abort()

    def status(self) -> EngineStatus:
        """Return the picture `GET /running` shows."""
        ready, engine = self._ready, self._engine_statistics()
        return EngineStatus(
            model=self._model.name,
            state="ready" if ready is not None else "loading",
            seats=ready.slots if ready is not None else 0,
            sequences=engine.running + engine.pending,
            waiting=engine.pending,
            blocks_free=engine.blocks_free,
            blocks_total=ready.blocks_total if ready is not None else 0,
            slots_free=engine.slots_free,
            cache_usage=round(engine.cache_usage, 4),
            cached_tokens=engine.cached_tokens,
            prefix_hit_rate=ratio(engine.prefix_hits, engine.prefix_queries),
            preemptions=engine.preemptions,
            mean_step_ms=ratio(1000 * engine.step_s, engine.steps),
            mean_step_tokens=ratio(engine.step_tokens, engine.steps),
            load_progress=self._load_progress,
            restarts=self._restarts,
            kernel=ready.kernel if ready is not None else None,
            problem=self._problem,
        )

    def statistics(self) -> EngineNodeStatistics:
        """Return the counts now."""
        ready = self._ready
        return EngineNodeStatistics(
            model=self._model.name,
            ready=ready is not None,
            seats=ready.slots if ready is not None else 0,
            restarts=self._restarts,
            stuck=self._stuck,
            load_progress=self._load_progress,
            load_s=self._load_s,
            weight_bytes=ready.weight_bytes if ready is not None else 0,
            kv_cache_bytes=ready.kv_cache_bytes if ready is not None else 0,
            engine=self._engine_statistics(),
        )

    @property
    def _restarts(self) -> int:
        return max(0, self._loads - 1)

    def _engine_statistics(self) -> EngineStatistics:
        if self._ready is None or self._worker is None:
            return EngineStatistics()
        if not self._worker.statistics.steps:  # it tells with its first step; until then all is free
            return EngineStatistics(slots_free=self._ready.slots, blocks_free=self._ready.blocks_total)
        return self._worker.statistics

    def _came_up(self, ready: Ready) -> None:
        self._ready = ready
        self._loads += 1
        self._load_progress = 1.0
        self._load_s = trio.current_time() - self._started_at
        self._problem = None
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
            assert self._worker is not None
            if self._worker.stuck is not None:
                self._stuck += 1
                self._problem = f"{self._worker.stuck} and is started again"
            logger.error("model lost", model=self._model.name, reason=error.message)
            self._listener.node_down(self)
        elif isinstance(error, LoadFailed):
            logger.error("model not loaded", model=self._model.name, reason=error.message)
            self._listener.load_failed(self, error)

    def _progress(self, fraction: float, stage: str) -> None:
        self._load_progress = fraction
        self._on_progress(fraction, stage)

    def _check_input(self, job: Job) -> None:
        limit = self._spec.max_input_tokens
        longest = max(map(len, job.prompts))
        if limit is not None and longest > limit:
            raise InvalidRequest(
                f"the prompt has {longest} tokens, {limit} are accepted here", param="prompt"
            )

    def _salt(self, job: Job) -> bytes:
        """Whose cached prefixes the job may use: everybody's, or its tenant's own."""
        if not self._isolate_tenants:
            return b""
        # Of one length, however long a name a client gives itself.
        return hashlib.blake2b(job.tenant.encode(errors="surrogatepass"), digest_size=16).digest()

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
