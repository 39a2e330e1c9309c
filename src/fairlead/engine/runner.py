"""Runs steps over a model and its KV cache, and loads both: the entry point of the device half.

Knows no queue, no wire protocol and no text; blocks are assigned before. Promises that `launch` does not
wait for a CUDA device: `wait` fetches a step's results.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.engine import cpu_step
from fairlead.engine.cache import KVCache, bytes_per_token, split_blocks
from fairlead.engine.cpu_step import BLOCK_SIZE, THREADS_AT_MOST, CpuStep
from fairlead.engine.device_memory import cache_bytes
from fairlead.engine.devices import CudaMemory, runs_our_kernels
from fairlead.engine.embedder import EmbeddingRunner
from fairlead.engine.forward import Forward, StagedForward, TorchForward
from fairlead.engine.inputs import Inputs, out_of_vocabulary_rows, upload
from fairlead.engine.logits import Notes
from fairlead.engine.prompt_scores import PendingScores, PromptRows
from fairlead.engine.sampler import Parameters, PendingPicks, choose
from fairlead.engine.step import SampledTokens
from fairlead.errors import LoadFailed
from fairlead.messages import WorkerSpec
from fairlead.models.architecture import ArchitectureSpec
from fairlead.models.loader import WeightSource, read_source
from fairlead.models.shape import ModelShape

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_STEPS_AT_ONCE = 2  # one runs, one is prepared


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is ready to run, and its limits. Sizes are in tokens, blocks and bytes.

    `windows` are the KV cache groups' (None: no window), the widest first; `blocks_total` is by group.
    `kernel` names what computes (`Forward.kernel`). `embeds`: it makes vectors, not text. This process uses
    `gpu_bytes` of the GPU's `gpu_total_bytes`; both are 0 on a CPU.
    """

    runner: "ModelRunner | EmbeddingRunner"
    slots: int
    max_batch: int
    max_batched_tokens: int
    max_model_len: int
    max_input_tokens: int
    max_output_tokens: int
    vocab_size: int
    windows: tuple[int | None, ...]
    blocks_total: tuple[int, ...]
    block_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes: int
    kernel: str
    embeds: bool = False
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0


class ModelRunner:
    """`fairlead.engine.step.Runner` over one model. The rows of its steps must have their blocks.

    With `overlaps`, a step may be launched before the results of the previous one were fetched. A token that
    is still unknown is −1 − (its index among that step's samples), and is replaced on the device.
    """

    def __init__(
        self,
        forward: Forward,
        eos_token_ids: tuple[int, ...],
        *,
        overlaps: bool = False,
        arenas: "Sequence[Buffer] | int" = _STEPS_AT_ONCE,
    ) -> None:
        self.forward = forward
        self.overlaps = overlaps
        self.arenas = arenas
        self._eos_token_ids = eos_token_ids
        self._notes = Notes()
        self._latest: Tensor | None = None  # tokens chosen by the previous step
        self._stage = forward.stage if isinstance(forward, StagedForward) else self._read

    @torch.inference_mode()
    def launch(self, step: Step, batch: InputBatch) -> "LaunchedStep":
        """Run all tokens of a step through the layers; logits are made only for sampled and scored tokens."""
        forward = self.forward
        inputs = self._stage(step, batch, self._latest)
        prompts = PromptRows.of(step, batch, inputs) if step.rows > step.decodes else None
        if prompts is not None:
            inputs = msgspec.structs.replace(inputs, scored_tokens=prompts.tokens)
        logits = forward(inputs)
        scores = prompts.score(logits[step.samples :]) if prompts is not None else None
        logits = logits[: step.samples]
        slots = np.asarray(step.sample_slots)
        positions = inputs.sequence_lengths[inputs.sample_rows]
        parameters = Parameters.gather(
            batch, slots, positions, self._eos_token_ids, forward.vocab_size, self._notes
        )
        last = inputs.token_ids
        if len(slots) < len(last):  # else every token is the last one of its row
            last = last.index_select(0, upload(inputs.sample_tokens, forward.device))
        picks = choose(logits, parameters, last)
        self._latest = picks.tokens
        return LaunchedStep(picks, out_of_vocabulary_rows(batch, slots, forward.vocab_size), scores)

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Return the memory of free blocks, by KV cache group, to the system where the device can."""
        for group, ids in enumerate(blocks):
            self.forward.release(group, ids)

    def _read(self, step: Step, batch: InputBatch, latest: Tensor | None) -> Inputs:
        inputs = Inputs.read(step, batch, self.forward.device)
        return self._resolved(inputs, np.asarray(step.input_ids), latest)

    def _resolved(self, inputs: Inputs, token_ids: np.ndarray, latest: Tensor | None) -> Inputs:
        """Replace unknown tokens by those that the previous step chose, which stay on the device.

        An id outside the vocabulary runs as 0, because an index out of range would fail the whole step; its
        sequence fails when it samples (`out_of_vocabulary_rows`).
        """
        vocabulary = self.forward.vocab_size
        late = np.flatnonzero(token_ids < 0)
        if not len(late) and token_ids.max() < vocabulary:
            return inputs
        ids = inputs.token_ids
        ids = ids.masked_fill((ids < 0) | (ids >= vocabulary), 0)
        if len(late):
            assert latest is not None
            device = self.forward.device
            chosen = latest.index_select(0, upload(-1 - token_ids[late], device))
            ids.index_copy_(0, upload(late, device), chosen.to(ids.dtype))
        return msgspec.structs.replace(inputs, token_ids=ids)


class LaunchedStep:
    """`fairlead.engine.step.PendingStep` of this runner."""

    def __init__(
        self, picks: PendingPicks, errors: dict[int, str], scores: PendingScores | None = None
    ) -> None:
        self._picks = picks
        self._errors = errors
        self._scores = scores

    def wait(self) -> SampledTokens:
        picks = self._picks.wait()
        if self._scores is not None:
            picks = msgspec.structs.replace(picks, prompt_scores=self._scores.wait())
        if not self._errors:
            return picks
        token_ids = np.array(picks.token_ids)
        token_ids[list(self._errors)] = -1
        logprobs = {index: one for index, one in picks.logprobs.items() if index not in self._errors}
        errors = {**picks.errors, **self._errors}
        return SampledTokens(token_ids.data, logprobs, errors, prompt_scores=picks.prompt_scores)


# Below this size, waking a second thread takes longer than the matrix products. With 5 MB of weights the
# compiled step made 2,700 tokens/s for one stream and 31,000 for 32; on two threads, 1,600 and 25,000.
ONE_THREAD_BYTES = 64 * _MIB


class _Weighed(msgspec.Struct, frozen=True):
    """A loaded model, before its KV cache is allocated.

    `block_bytes`: the size of a block, by group. `with_cache` takes the number of blocks of each group, and
    returns what runs the model and the size of its cache in bytes.
    """

    shape: ModelShape
    weight_bytes: int
    block_bytes: Sequence[int]
    with_cache: Callable[[tuple[int, ...]], tuple[Forward, int]]


def load_runner(
    spec: WorkerSpec, report: Callable[[float, str], None], *, compiled: bool = True
) -> LoadedModel:
    """Load the model of `spec`; `report(fraction, stage)` receives the progress. Raises `LoadFailed`.

    With `compiled`, our compiled step runs the models that it supports on a CPU, and our kernels run all on a
    GPU. Otherwise torch runs them, with the same results. A model made for embeddings makes no text.
    """
    if spec.threads is not None:
        torch.set_num_threads(max(1, spec.threads))
    device = _device(spec.device)
    try:
        source = read_source(
            Path(spec.path),
            device=device,
            dtype=spec.dtype,
            quantization=spec.quantization,
            needs_head=False,
        )
        weighed = _load(spec, source, device, lambda fraction: report(fraction, "weights"), compiled=compiled)
        return _with_cache(spec, source, weighed, device, lambda fraction: report(fraction, "graphs"))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise LoadFailed(f"{spec.path}: out of memory on {device}: {error}") from error
    except RuntimeError as error:
        # torch raises this when the system or the driver refuses, for example its CPU allocator.
        raise LoadFailed(f"{spec.path}: cannot be loaded on {device}: {error}") from error


def _load(
    spec: WorkerSpec,
    source: WeightSource,
    device: torch.device,
    report: Callable[[float], None],
    *,
    compiled: bool,
) -> _Weighed:
    # The compiled step returns logits only, not the hidden states that embeddings are made from.
    may = compiled and device.type == "cpu" and spec.block_size == BLOCK_SIZE and source.pooling is None
    if may and source.spec is not None and _runs_compiled(source.spec, source):
        with source.weights(device, report) as weights:
            _settle_threads(spec, weights.bytes_total)
            step = CpuStep.load(
                source.spec,
                weights,
                threads=min(torch.get_num_threads(), THREADS_AT_MOST),
                max_batched_tokens=_max_batched_tokens(spec, device),
                quantization=source.quantization.name,
            )
            weights.finish()
        return _Weighed(step.shape, step.model.weight_bytes, step.block_bytes, step.with_cache)
    loaded = source.load(device, report)
    _settle_threads(spec, loaded.weight_bytes)
    shape = loaded.model.shape

    def with_cache(blocks: tuple[int, ...]) -> tuple[Forward, int]:
        cache = KVCache(shape, blocks=blocks, block_size=spec.block_size, dtype=loaded.dtype, device=device)
        if compiled and source.pooling is None and runs_our_kernels(device):
            from fairlead.engine.device_forward import DeviceForward  # which needs Triton

            return DeviceForward.on_cuda(loaded.model, cache), cache.nbytes
        return TorchForward(loaded.model, cache), cache.nbytes

    block_bytes = [size * spec.block_size for size in bytes_per_token(shape, loaded.dtype)]
    return _Weighed(shape, loaded.weight_bytes, block_bytes, with_cache)


def _runs_compiled(architecture: ArchitectureSpec, source: WeightSource) -> bool:
    """Return whether the compiled step runs the model; log why it does not."""
    reason = cpu_step.refusal(architecture, source.dtype, source.quantization.name)
    if reason is not None:
        logger.warning("%s: torch runs the model, because in the CPU kernel %s", source.directory, reason)
    return reason is None


def _settle_threads(spec: WorkerSpec, weight_bytes: int) -> None:
    if spec.threads is None and weight_bytes < ONE_THREAD_BYTES:
        torch.set_num_threads(1)


def _max_batched_tokens(spec: WorkerSpec, device: torch.device) -> int:
    return spec.max_batched_tokens or (512 if device.type == "cpu" else 2048)


def _with_cache(
    spec: WorkerSpec,
    source: WeightSource,
    weighed: _Weighed,
    device: torch.device,
    report: Callable[[float], None],
) -> LoadedModel:
    """Determine slots, context and cache size, which depend on one another, and allocate the cache."""
    shape, block_bytes, on_cpu = weighed.shape, weighed.block_bytes, device.type == "cpu"
    context = min(shape.max_positions, spec.max_model_len or shape.max_positions)
    max_batched_tokens = _max_batched_tokens(spec, device)
    slots = spec.slots or (8 if on_cpu else 256)
    limits = _useful_blocks(shape, slots, max_batched_tokens, spec.block_size)

    memory = None if on_cpu else CudaMemory(device)
    if memory is not None and (spec.kv_cache_bytes is None or spec.gpu_memory is not None):
        size_bytes = cache_bytes(memory, spec.gpu_memory, spec.kv_cache_bytes)
    elif spec.kv_cache_bytes is not None:
        size_bytes = spec.kv_cache_bytes
    else:
        wanted = slots * -(-context // spec.block_size)
        most = [wanted if limit is None else min(limit, wanted) for limit in limits]
        size_bytes = min(1024 * _MIB, sum(map(int.__mul__, most, block_bytes)))
    blocks = split_blocks(size_bytes, block_bytes, limits)
    if min(blocks) < 1:
        raise LoadFailed(f"{size_bytes} bytes of KV cache do not hold one block of {sum(block_bytes)} bytes")
    forward, kv_cache_bytes = weighed.with_cache(blocks)

    slots = min(slots, max(blocks)) if spec.slots is None and not on_cpu else slots
    max_model_len = min(context, max(blocks) * spec.block_size, spec.kv_cache_entries or context)
    max_batch = min(spec.max_batch or slots, slots)
    if isinstance(forward, StagedForward):
        forward.prepare(
            slots=slots,
            max_batch=max_batch,
            max_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            report=report,
        )
    arenas = _arenas(
        device,
        InputBatch.arena_size(
            slots=slots,
            max_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            block_size=spec.block_size,
            groups=len(blocks),
        ),
    )
    runner: ModelRunner | EmbeddingRunner
    if source.pooling is None:
        runner = ModelRunner(forward, source.eos_token_ids, overlaps=not on_cpu, arenas=arenas)
    else:
        assert isinstance(forward, TorchForward)
        runner = EmbeddingRunner(forward, source.pooling, slots=slots, arenas=arenas)
    return LoadedModel(
        runner=runner,
        slots=slots,
        max_batch=max_batch,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        max_input_tokens=min(spec.max_input_tokens or max_model_len, max_model_len),
        max_output_tokens=min(spec.max_output_tokens or max_model_len, max_model_len),
        vocab_size=shape.vocab_size,
        windows=shape.groups,
        blocks_total=blocks,
        block_size=spec.block_size,
        eos_token_ids=source.eos_token_ids,
        device=str(device),
        dtype=str(source.dtype).removeprefix("torch."),
        weight_bytes=weighed.weight_bytes,
        kv_cache_bytes=kv_cache_bytes,
        kernel=forward.kernel,
        embeds=source.pooling is not None,
        gpu_bytes=0 if memory is None else memory.taken(),
        gpu_total_bytes=0 if memory is None else memory.free_and_total()[1],
    )


def _useful_blocks(
    shape: ModelShape, slots: int, max_batched_tokens: int, block_size: int
) -> tuple[int | None, ...]:
    """Return how many blocks each group can use at most; None for the widest, which takes what is left.

    Beside a wider group, one with a window needs what its running sequences see, and the tokens of the
    steps in flight. The tokens of a step for every slot are more than that: the rest keeps the windows of
    ended sequences, without which no prefix could be reused.
    """
    step_blocks = -(-max_batched_tokens // block_size)

    def useful(window: int | None) -> int | None:
        if window is None or window == shape.groups[0]:
            return None
        return slots * (-(-(window + max_batched_tokens) // block_size) + 1) + step_blocks

    return tuple(map(useful, shape.groups))


def _arenas(device: torch.device, size_bytes: int) -> "Sequence[Buffer] | int":
    """Make the arenas that steps are prepared in: pinned memory where a device copies from them."""
    if device.type == "cpu":
        return _STEPS_AT_ONCE
    pinned = (torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_STEPS_AT_ONCE))
    return [arena.numpy().data for arena in pinned]


def _device(name: str) -> torch.device:
    """Return the device; "auto" is CUDA if there is any. `LoadFailed` if the device does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LoadFailed(f"device {name!r} is not known") from error
    if device.type not in {"cpu", "cuda"}:
        raise LoadFailed(f"device {name!r} is not supported (auto, cpu, cuda, cuda:N are)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadFailed(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device
