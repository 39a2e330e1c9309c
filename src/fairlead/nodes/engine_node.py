"""The built-in engine as a node: one connection to its process, from attaching to its end."""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog
import trio

from fairlead.base.config import HealthConfig, ModelConfig
from fairlead.base.config.models import SpeculationConfig
from fairlead.base.errors import ContextLengthExceeded, FairleadError, InvalidRequest, NodeFailed, StaleGrant
from fairlead.base.grant import Grant
from fairlead.base.job import AnswerParts, Job, portions_of
from fairlead.base.messages import EngineStatistics, Output, Ready, Speculation, WorkerSpec
from fairlead.base.sequence_seats import SequenceSeats, all_at_once
from fairlead.language.text.answer import ChoiceText
from fairlead.language.text.model import TextModel
from fairlead.nodes.engines.attachment import Attachment
from fairlead.nodes.engines.client import COMMAND
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import GpuUse, NodeReport
from fairlead.nodes.own_engine import OwnEngine
from fairlead.nodes.status import EngineStatus, ProcessStatus
from fairlead.nodes.streams.embedding_job import EmbeddingJob
from fairlead.nodes.streams.generation_job import GenerationJob
from fairlead.nodes.streams.sink import Sink

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
        parallel=model.parallel,
        speculation=_speculation(model.speculation),
        target_step_s=model.target_step_s,
    )


def _speculation(settings: SpeculationConfig | None) -> Speculation | None:
    return None if settings is None else Speculation(settings.ngram, settings.drafts)


class EngineConnection(Protocol):
    """A connection to an engine: an `OwnEngine`, or an `Attachment` to that of another process."""

    @property
    def sequences(self) -> SequenceClient:
        """The sequences over this connection."""

    @property
    def pid(self) -> int | None:
        """The id of the process that this server has started."""

    @property
    def stuck(self) -> str | None:
        """Why that process was given up although it had not ended."""

    async def run(self, *, task_status: trio.TaskStatus[Ready]) -> None:
        """Attach, call `started()`, and end by raising; every open sequence has failed by then."""


class EngineNode:
    """One connection to an engine that runs `model`, as a node. Each new one needs a new `EngineNode`.

    `spec` is the one that the process is started with. `connect` is called with two callbacks, for when the
    engine is attached to and for the end of that, and returns the connection.
    """

    def __init__(
        self,
        model: TextModel,
        spec: WorkerSpec,
        report: NodeReport,
        connect: Callable[[Callable[[Ready], None], Callable[[], None]], EngineConnection],
    ) -> None:
        self.id = f"engine:{model.name}"
        self.models = frozenset({model.name})
        self._ready: Ready | None = None
        self._model = model
        self._spec = spec
        self._report = report
        self._connection = connect(self._came_up, self._went_down)

    @property
    def is_ready(self) -> bool:
        """Whether it is attached."""
        return self._ready is not None

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU of the engine's process, and the memory taken there; None on a CPU, or if not attached."""
        return gpu_use(self._ready)

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, if this server has started it."""
        return self._connection.pid

    @property
    def stuck(self) -> str | None:
        """Why this server has given up the process although it had not ended; None if it has not."""
        return self._connection.stuck

    def change_health(self, health: HealthConfig) -> None:
        """Do nothing: an engine is not probed, but supervised by the configured watchdog."""

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the process if it is this server's, attach, call `started()`, and serve until the end.

        Never returns: raises `LoadFailed` if this server's process does not become ready, and `NodeFailed` if
        the engine cannot be attached to, ends or is stuck. Calls `report`; the caller reports a failed load.
        Cancelling ends it. When this is over, every job has failed, and this server's process is gone.
        """
        await self._connection.run(task_status=task_status)

    @asynccontextmanager
    async def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: SequenceSeats | None = None
    ) -> AsyncIterator[None]:
        """Submit the job's sequences that have seats; abort on exit those that have not ended. See `Node`.

        The engine requires the `grant`, and gets the deadline in force. Raises `NodeFailed` if the engine is
        not up, and `ContextLengthExceeded` for a prompt over the limit.
        """
        assert grant is not None, "the engine runs jobs with the grants of their dispatcher"
        sequences = self._connection.sequences
        if self._ready is None:
            raise NodeFailed(f"{self._model.name} is not running")
        self._model.check_purpose(*(("embed", "score") if job.embed else ("generate",)))
        self._check_input(job)

        def failed(error: FairleadError) -> None:
            # The node goes down before its tasks wake up, which would free seats that no longer exist.
            try:
                if isinstance(error, InvalidRequest) and error.param is None:
                    error.param = job.grammar_field or None  # the process gets the grammar without its field
                elif isinstance(error, NodeFailed) and not isinstance(error, StaleGrant):
                    self._went_down()
            finally:
                into.fail(error)

        if seats is None:
            seats = all_at_once(grant, len(portions_of(job.prompts)) if job.embed else job.sequences)
        deadline_s = trio.current_effective_deadline()
        runner: EmbeddingJob | GenerationJob
        if job.embed:
            runner = EmbeddingJob(
                sequences, into, job, failed, seats.end, deadline_s=deadline_s, salt=_salt(job)
            )
        else:
            runner = GenerationJob(
                sequences,
                into,
                job,
                failed,
                seats.end,
                choice=self._choice,
                max_output_tokens=self._spec.max_output_tokens,
                deadline_s=deadline_s,
                salt=_salt(job),
            )
        try:
            seats.follow(runner)
            yield
        finally:
            seats.close()
            runner.abort()

    async def prepare(self, job: Job) -> None:
        """Have the grammar of the job compiled, if it is not, before the job takes a seat.

        Raises `InvalidRequest` if it is refused, and `NodeFailed` if the engine is not up.
        """
        sequences = self._connection.sequences
        if self._ready is None:
            raise NodeFailed(f"{self._model.name} is not running")
        assert job.sampling.grammar is not None
        preparation = _Preparation()
        key = sequences.prepare(
            job.sampling.grammar,
            preparation,
            salt=_salt(job),
            grammar_bytes=job.sampling.grammar_bytes,
        )
        try:
            await preparation.ended.wait()
        finally:
            sequences.abort(key)
        if preparation.error is not None:
            if isinstance(preparation.error, InvalidRequest):
                preparation.error.param = job.grammar_field or None
            raise preparation.error

    def status(self) -> ProcessStatus:
        """Return the engine's status, for all its clients; it has no seats and no `engine` before `run`."""
        return engine_status(self._ready, self.statistics())

    def statistics(self) -> EngineStatistics:
        """Return the engine's counts, for all its clients, as of its latest frame to this one."""
        if self._ready is None:
            return EngineStatistics()
        return counts_of(self._ready, self._connection.sequences.statistics)

    def _check_input(self, job: Job) -> None:
        limit = self._spec.max_input_tokens
        longest = max(map(len, job.prompts))
        if limit is not None and longest > limit:
            raise ContextLengthExceeded.of_input(limit, f"this one has {longest}", param="prompt")

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

    def _came_up(self, ready: Ready) -> None:
        self._ready = ready
        logger.info("model loaded", model=self._model.name, **msgspec.structs.asdict(ready))
        self._report(self, limits_of(ready))

    def _went_down(self) -> None:
        """Report that the engine takes no more jobs, unless that was reported."""
        was_up, self._ready = self._ready is not None, None
        if was_up:
            self._report(self, None)


class _Preparation:
    """The `Receiver` of a grammar's compilation."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: FairleadError | None = None

    def receive_token(self, token_id: int) -> None:
        raise AssertionError(f"a preparation has no tokens, and got {token_id}")

    def receive(self, _output: Output) -> None:
        self.ended.set()

    def failed(self, error: FairleadError) -> None:
        self.error = error
        self.ended.set()


def attached_engine(model: TextModel, spec: WorkerSpec, report: NodeReport, *, name: str) -> EngineNode:
    """Return a connection of this process, `name`, to the engine that another has started with `spec`."""

    def connect(on_ready: Callable[[Ready], None], on_end: Callable[[], None]) -> Attachment:
        return Attachment(spec.listen, name=name, on_ready=on_ready, on_end=on_end)

    return EngineNode(model, spec, report, connect)


def own_engine(
    model: TextModel,
    spec: WorkerSpec,
    report: NodeReport,
    *,
    on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None,
    on_line: Callable[[str], None] = lambda _line: None,
    command: Sequence[str] = COMMAND,
) -> EngineNode:
    """Return an engine whose process this server starts; see `Worker` for the last three."""
    start = partial(
        OwnEngine, spec, name=model.name, command=command, on_progress=on_progress, on_line=on_line
    )
    return EngineNode(model, spec, report, lambda on_ready, on_end: start(on_ready=on_ready, on_end=on_end))


def limits_of(ready: Ready) -> NodeLimits:
    """Return the limits of a loaded engine."""
    return NodeLimits(
        seats=ready.slots,
        max_model_len=ready.max_model_len,
        cache_tokens=ready.blocks_total * ready.block_size,
        by_sequence=True,
    )


def gpu_use(ready: Ready | None) -> GpuUse | None:
    """Return the GPU of an engine's process, and the memory taken there; None on a CPU."""
    if ready is None or not ready.gpu_total_bytes:
        return None
    return GpuUse(ready.device, ready.gpu_bytes, ready.gpu_total_bytes)


def counts_of(ready: Ready, counts: EngineStatistics) -> EngineStatistics:
    """Return the counts of a loaded engine; before its first step all is free."""
    if counts.steps:
        return counts
    return EngineStatistics(slots_free=ready.slots, blocks_free=ready.blocks_total)


def engine_status(ready: Ready | None, counts: EngineStatistics) -> ProcessStatus:
    """Return the status of an engine; without `ready` it is not loaded."""
    if ready is None:
        return ProcessStatus(seats=0, sequences=0)
    return ProcessStatus(
        seats=ready.slots,
        sequences=counts.running + counts.pending + counts.suspended,
        waiting=counts.pending,
        engine=EngineStatus(
            kernel=ready.kernel,
            blocks_free=counts.blocks_free,
            blocks_total=ready.blocks_total,
            slots_free=counts.slots_free,
            suspended=counts.suspended,
            cache_usage=round(counts.cache_usage, 4),
            cached_tokens=counts.cached_tokens,
            prefix_hit_rate=_ratio(counts.prefix_hits, counts.prefix_queries),
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            preemptions=counts.preemptions,
            draft_tokens=counts.draft_tokens,
            accepted_tokens=counts.accepted_tokens,
            mean_step_ms=_ratio(1000 * counts.step_s, counts.steps),
            mean_step_tokens=_ratio(counts.step_tokens, counts.steps),
            block_size=ready.block_size,
            cache_dtype=ready.dtype,
            keeps_prefixes=not ready.embeds,
        ),
    )


def _salt(job: Job) -> bytes:
    """Return the salt of its cached prefixes: empty if all tenants share them, else one per owner."""
    if not job.cache_owner:
        return b""
    # A hash: its length does not depend on the owner's name.
    return hashlib.blake2b(job.cache_owner.encode(errors="surrogatepass"), digest_size=16).digest()


def _ratio(part: float, total: float) -> float:
    return round(part / total, 4) if total else 0.0
