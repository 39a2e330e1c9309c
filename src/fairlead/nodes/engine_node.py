"""The built-in engine as a node: one run of one model's child process, from its start to its end."""

import hashlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
import trio

from fairlead.answer.embedding_job import embedding
from fairlead.answer.sequence import NodeSequence
from fairlead.answer.sink import Sink
from fairlead.config import HealthConfig, ModelConfig
from fairlead.errors import ContextLengthExceeded, FairleadError, InvalidRequest, NodeFailed
from fairlead.job import AnswerParts, Job
from fairlead.messages import EngineStatistics, Ready, WorkerSpec
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import GpuUse, NodeReport
from fairlead.nodes.status import EngineStatus, ProcessStatus
from fairlead.text.answer import ChoiceText
from fairlead.text.model import TextModel
from fairlead.worker.client import COMMAND, Worker

logger = structlog.get_logger("fairlead.node")


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
    )


class EngineNode:
    """One run of a model's child process. Each restart needs a new `EngineNode`.

    `isolate_tenants`: tenants share no cached prefixes, so that response times do not reveal prompts.
    `command` starts the child; tests replace it. `on_line` is called with each line that the child prints.
    """

    def __init__(
        self,
        model: TextModel,
        spec: WorkerSpec,
        report: NodeReport,
        *,
        isolate_tenants: bool = False,
        on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None,
        on_line: Callable[[str], None] = lambda _line: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.id = f"engine:{model.name}"
        self.models = frozenset({model.name})
        self._model = model
        self._spec = spec
        self._report = report
        self._isolate_tenants = isolate_tenants
        self._on_progress = on_progress
        self._on_line = on_line
        self._command = command
        self._worker: Worker | None = None
        self._ready: Ready | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded now."""
        return self._ready is not None

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU of its child, and the memory taken there; None on a CPU, or while it is not loaded."""
        if self._ready is None or not self._ready.gpu_total_bytes:
            return None
        return GpuUse(self._ready.device, self._ready.gpu_bytes, self._ready.gpu_total_bytes)

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
            on_stuck=lambda _error: self._went_down(),
            on_line=self._on_line,
        )
        try:
            await self._worker.run(task_status=task_status)
        finally:
            self._went_down()

    @asynccontextmanager
    async def generate(self, job: Job, into: Sink) -> AsyncIterator[None]:
        """Submit every sequence of the job; abort on exit those that have not ended.

        The engine gets the deadline in force. Raises `ContextLengthExceeded` for a prompt over the limit.
        """
        worker = self._worker
        if worker is None or not self.is_ready:
            raise NodeFailed(f"{self._model.name} is not running")
        self._model.check_purpose(*(("embed", "score") if job.embed else ("generate",)))
        self._check_input(job)

        def failed(error: FairleadError) -> None:
            # The node goes down before its tasks wake up, which would free seats that no longer exist.
            try:
                if isinstance(error, InvalidRequest):  # the process gets the grammar without its field
                    error.param = job.grammar_field or None
                elif isinstance(error, NodeFailed):
                    self._went_down()
            finally:
                into.fail(error)

        if job.embed:
            with embedding(worker, into, job, failed, salt=self._salt(job)):
                yield
            return
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

    def status(self) -> ProcessStatus:
        """Return its status; it has no seats and no `engine` before the model is loaded."""
        ready, counts = self._ready, self.statistics()
        if ready is None:
            return ProcessStatus(seats=0, sequences=0)
        return ProcessStatus(
            seats=ready.slots,
            sequences=counts.running + counts.pending,
            waiting=counts.pending,
            engine=EngineStatus(
                kernel=ready.kernel,
                blocks_free=counts.blocks_free,
                blocks_total=ready.blocks_total,
                slots_free=counts.slots_free,
                cache_usage=round(counts.cache_usage, 4),
                cached_tokens=counts.cached_tokens,
                prefix_hit_rate=_ratio(counts.prefix_hits, counts.prefix_queries),
                prefix_queries=counts.prefix_queries,
                prefix_hits=counts.prefix_hits,
                preemptions=counts.preemptions,
                mean_step_ms=_ratio(1000 * counts.step_s, counts.steps),
                mean_step_tokens=_ratio(counts.step_tokens, counts.steps),
                block_size=ready.block_size,
                cache_dtype=ready.dtype,
                keeps_prefixes=not ready.embeds,
            ),
        )

    def statistics(self) -> EngineStatistics:
        """Return the child's own counts, as of its last step."""
        if self._ready is None or self._worker is None:
            return EngineStatistics()
        if not self._worker.statistics.steps:  # reported with each step; before the first all is free
            return EngineStatistics(slots_free=self._ready.slots, blocks_free=self._ready.blocks_total)
        return self._worker.statistics

    def _came_up(self, ready: Ready) -> None:
        self._ready = ready
        logger.info("model loaded", model=self._model.name, **msgspec.structs.asdict(ready))
        limits = NodeLimits(
            seats=ready.slots,
            max_model_len=ready.max_model_len,
            cache_tokens=ready.blocks_total * ready.block_size,
            isolates_tenants=self._isolate_tenants,
        )
        self._report(self, limits)

    def _went_down(self) -> None:
        was_up, self._ready = self._ready is not None, None
        if was_up:
            self._report(self, None)

    def _check_input(self, job: Job) -> None:
        limit = self._spec.max_input_tokens
        longest = max(map(len, job.prompts))
        if limit is not None and longest > limit:
            raise ContextLengthExceeded.of_input(limit, f"this one has {longest}", param="prompt")

    def _salt(self, job: Job) -> bytes:
        """Return the salt of its cached prefixes: empty if all tenants share them, else one per tenant."""
        if not self._isolate_tenants:
            return b""
        # A hash: its length does not depend on the tenant's name.
        return hashlib.blake2b(job.tenant.encode(errors="surrogatepass"), digest_size=16).digest()

    def _parsing(self, parts: AnswerParts | None) -> dict[str, Any]:
        """Return the arguments of `ChoiceText` that divide the text into its parts."""
        if parts is None or (answer_format := self._model.answer_format) is None:
            return {}
        return {
            "parser": answer_format.parser(parts),
            "shown_ids": answer_format.mark_ids,
            "is_named": parts.is_named,
        }

    def _choice(self, job: Job, index: int) -> ChoiceText:
        return ChoiceText(
            self._model.tokenizer,
            job.stop,
            index,
            eos_token_ids=self._model.eos_token_ids,
            context=job.prompts[index // job.n],
            **self._parsing(job.parts),
        )


def _ratio(part: float, total: float) -> float:
    return round(part / total, 4) if total else 0.0
