"""An engine with its model loaded, as its node uses it: reports it as up and down, and runs jobs on it.

Independent of who started the engine's process: `EngineNode` has its own, `AttachedEngine` that of another.
"""

import hashlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
import trio

from fairlead.answer.embedding_job import embedding
from fairlead.answer.sequence import NodeSequence
from fairlead.answer.sink import Sink
from fairlead.errors import ContextLengthExceeded, FairleadError, InvalidRequest, NodeFailed, StaleGrant
from fairlead.grant import Grant
from fairlead.job import AnswerParts, Job
from fairlead.messages import EngineStatistics, Output, Ready, WorkerSpec
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import GpuUse
from fairlead.nodes.status import EngineStatus, ProcessStatus
from fairlead.text.answer import ChoiceText
from fairlead.text.model import TextModel
from fairlead.worker.sequence_client import SequenceClient

logger = structlog.get_logger("fairlead.node")


class LoadedEngine:
    """Runs jobs on the engine with `model`, between `came_up` and `went_down`, which call `report`.

    `spec` has the limits.
    """

    def __init__(
        self, model: TextModel, spec: WorkerSpec, report: Callable[[NodeLimits | None], None]
    ) -> None:
        self.ready: Ready | None = None
        self._sequences: SequenceClient | None = None
        self._model = model
        self._spec = spec
        self._report = report

    @property
    def gpu(self) -> GpuUse | None:
        """The GPU of the process, and the memory taken there; None on a CPU, or while it is not loaded."""
        return gpu_use(self.ready)

    def came_up(self, ready: Ready, sequences: SequenceClient) -> None:
        """Report the limits of the engine, which takes `sequences` from now on."""
        self.ready, self._sequences = ready, sequences
        logger.info("model loaded", model=self._model.name, **msgspec.structs.asdict(ready))
        self._report(limits_of(ready))

    def went_down(self) -> None:
        """Report that the engine takes no more jobs, unless that was reported."""
        was_up, self.ready = self.ready is not None, None
        if was_up:
            self._report(None)

    @asynccontextmanager
    async def generate(self, job: Job, into: Sink, *, grant: Grant | None) -> AsyncIterator[None]:
        """Submit every sequence of the job; abort on exit those that have not ended.

        The engine gets the deadline in force. Raises `NodeFailed` if the engine is not up, and
        `ContextLengthExceeded` for a prompt over the limit.
        """
        sequences = self._sequences
        if sequences is None or self.ready is None:
            raise NodeFailed(f"{self._model.name} is not running")
        self._model.check_purpose(*(("embed", "score") if job.embed else ("generate",)))
        self._check_input(job)

        def failed(error: FairleadError) -> None:
            # The node goes down before its tasks wake up, which would free seats that no longer exist.
            try:
                if isinstance(error, InvalidRequest) and error.param is None:
                    error.param = job.grammar_field or None  # the process gets the grammar without its field
                elif isinstance(error, NodeFailed) and not isinstance(error, StaleGrant):
                    self.went_down()
            finally:
                into.fail(error)

        if job.embed:
            with embedding(sequences, into, job, failed, salt=_salt(job), grant=grant):
                yield
            return
        choices = [
            NodeSequence(sequences, into, self._choice(job, index), failed) for index in range(job.sequences)
        ]
        timeout_s = max(0.0, trio.current_effective_deadline() - trio.current_time())
        try:
            for index, choice in enumerate(choices):
                choice.submit(
                    job,
                    index,
                    max_output_tokens=self._spec.max_output_tokens,
                    timeout_s=timeout_s if timeout_s < math.inf else None,
                    salt=_salt(job),
                    grant=grant,
                )
            yield
        finally:
            for choice in choices:
                choice.abort()

    async def prepare(self, job: Job) -> None:
        """Have the grammar of the job compiled, if it is not, before the job takes a seat.

        Raises `InvalidRequest` if it is refused, and `NodeFailed` if the engine is not up.
        """
        if self._sequences is None:
            raise NodeFailed(f"{self._model.name} is not running")
        assert job.sampling.grammar is not None
        preparation = _Preparation()
        key = self._sequences.prepare(
            job.sampling.grammar,
            preparation,
            salt=_salt(job),
            grammar_bytes=job.sampling.grammar_bytes,
        )
        try:
            await preparation.ended.wait()
        finally:
            self._sequences.abort(key)
        if preparation.error is not None:
            if isinstance(preparation.error, InvalidRequest):
                preparation.error.param = job.grammar_field or None
            raise preparation.error

    def status(self) -> ProcessStatus:
        """Return its status; it has no seats and no `engine` before the model is loaded."""
        return engine_status(self.ready, self.statistics())

    def statistics(self) -> EngineStatistics:
        """Return the process's own counts, as of its latest frame here."""
        if self.ready is None or self._sequences is None:
            return EngineStatistics()
        return counts_of(self.ready, self._sequences.statistics)

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


def limits_of(ready: Ready) -> NodeLimits:
    """Return the limits of a loaded engine."""
    return NodeLimits(
        seats=ready.slots,
        max_model_len=ready.max_model_len,
        cache_tokens=ready.blocks_total * ready.block_size,
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


def _salt(job: Job) -> bytes:
    """Return the salt of its cached prefixes: empty if all tenants share them, else one per owner."""
    if not job.cache_owner:
        return b""
    # A hash: its length does not depend on the owner's name.
    return hashlib.blake2b(job.cache_owner.encode(errors="surrogatepass"), digest_size=16).digest()


def _ratio(part: float, total: float) -> float:
    return round(part / total, 4) if total else 0.0
