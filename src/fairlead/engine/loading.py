"""Loads a model and its KV cache, and determines its limits: slots, blocks and context.

Imports no torch for a model that the CPU kernel runs; `torch_loading.py` loads all others.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fairlead._cext.inputbatch import InputBatch
from fairlead.base.errors import LoadFailed
from fairlead.base.messages import WorkerSpec
from fairlead.engine import cpu_step, threads
from fairlead.engine.backend import Forward, StagedForward
from fairlead.engine.cpu_step import BLOCK_SIZE, CpuStep
from fairlead.engine.device_memory import DeviceMemory, cache_bytes, may_have_gpu, split_blocks
from fairlead.engine.models.checkpoint_tensors import CheckpointTensors
from fairlead.engine.models.numbers import choose_cpu_dtype
from fairlead.engine.runner import ModelRunner
from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.checkpoint import Checkpoint
from fairlead.language.checkpoint.folder import read_folder
from fairlead.language.checkpoint.shape import ModelShape

if TYPE_CHECKING:
    from fairlead.engine.embedder import EmbeddingRunner
    from fairlead.engine.ranks import Membership

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is ready to run, and its limits. Sizes are in tokens, blocks and bytes.

    `windows` are the KV cache groups' (None: no window), the widest first; `blocks_total` is by group.
    `kernel` names what computes (`Forward.kernel`). `embeds`: it makes vectors, not text. This process uses
    `gpu_bytes` of the GPU's `gpu_total_bytes`; both are 0 on a CPU. `weight_bytes` and `kv_cache_bytes` are
    those of all ranks together.
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


# Below this size, waking a second thread takes longer than the matrix products. With 5 MB of weights the
# compiled step made 2,700 tokens/s for one stream and 31,000 for 32; on two threads, 1,600 and 25,000.
ONE_THREAD_BYTES = 64 * _MIB


class LoadedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A model before its KV cache is allocated.

    shape: that of the whole network, or of this rank's part.
    device: its name, for display.
    dtype: the name of the type that is computed in.
    weight_bytes: what the weights of this rank take.
    block_bytes: the size of a block, by group.
    with_cache: takes the number of blocks of each group; returns what runs the model and its cache's bytes.
    make_runner: takes what runs the model, the slots and the bytes of an arena; returns the runner.
    embeds: whether it makes vectors, not text.
    memory: that of the device; None on a CPU.
    ranks: how many processes compute the model.
    of_all_ranks: takes a number; returns those of all ranks, in their order.
    """

    shape: ModelShape
    device: str
    dtype: str
    weight_bytes: int
    block_bytes: Sequence[int]
    with_cache: Callable[[tuple[int, ...]], tuple[Forward, int]]
    make_runner: Callable[[Forward, int, int], "ModelRunner | EmbeddingRunner"]
    embeds: bool = False
    memory: DeviceMemory | None = None
    ranks: int = 1
    of_all_ranks: Callable[[int], Sequence[int]] = lambda number: [number]


def load_runner(
    spec: WorkerSpec,
    report: Callable[[float, str], None],
    *,
    compiled: bool = True,
    membership: "Membership | None" = None,
) -> LoadedModel:
    """Load the model of `spec`; `report(fraction, stage)` receives the progress. Raises `LoadFailed`.

    With `compiled`, our compiled step runs the models that it supports on a CPU, and our kernels run all on a
    GPU. Otherwise torch runs them, with the same results. A model made for embeddings makes no text. Torch is
    imported only for what the compiled step does not run.

    With a `membership`, this process loads its rank's part. All ranks must load at the same time. The runner
    of rank 0 runs steps on all of them; those of the others are not to be used, only their `forward`.
    """
    is_alone = membership is None or membership.ranks.size == 1
    if compiled and is_alone and spec.block_size == BLOCK_SIZE and _runs_on_cpu(spec.device):
        folder = read_folder(Path(spec.path), max_model_len=spec.max_model_len)
        dtype = choose_cpu_dtype(folder.config, spec.dtype)
        # The compiled step returns logits only, not the hidden states that embeddings are made from.
        if folder.spec is not None and folder.pooling is None:
            reason = cpu_step.refusal(folder.spec, dtype, spec.quantization)
            if reason is None:
                return _load_compiled(spec, folder.checkpoint, folder.spec, dtype, report)
            logger.warning("%s: torch runs the model, because in the CPU kernel %s", spec.path, reason)
    from fairlead.engine.torch_loading import load_in_torch

    return load_in_torch(spec, report, compiled=compiled, membership=membership)


def _runs_on_cpu(device: str) -> bool:
    """Return whether a model with this `device` runs on the CPU, as far as that is known without torch."""
    return device == "cpu" or (device == "auto" and not may_have_gpu())


def _load_compiled(
    spec: WorkerSpec,
    checkpoint: Checkpoint,
    architecture: ArchitectureSpec,
    dtype: str,
    report: Callable[[float, str], None],
) -> LoadedModel:
    try:
        tensors = CheckpointTensors(
            checkpoint, dtype=dtype, report=lambda fraction: report(fraction, "weights")
        )
        with tensors:
            limit_threads(spec, tensors.bytes_total)
            step = CpuStep.load(
                architecture,
                tensors,
                threads=threads.get_threads(),
                max_batched_tokens=max_batched_tokens(spec, on_cpu=True),
                quantization=spec.quantization,
            )
            tensors.finish()
        weights = LoadedWeights(
            shape=step.shape,
            device="cpu",
            dtype=dtype,
            weight_bytes=step.model.weight_bytes,
            block_bytes=step.block_bytes,
            with_cache=step.with_cache,
            make_runner=lambda forward, _slots, _arena_bytes: ModelRunner(forward, spec.eos_token_ids),
        )
        return finish_loading(spec, weights, lambda fraction: report(fraction, "graphs"))
    except MemoryError as error:
        raise LoadFailed(f"{spec.path}: out of memory on cpu: {error}") from error


def limit_threads(spec: WorkerSpec, weight_bytes: int) -> None:
    """Set how many threads compute: those that are configured, one for a small model, or all cores."""
    count = 1 if weight_bytes < ONE_THREAD_BYTES else threads.default_threads()
    threads.set_threads(spec.threads or count)


def max_batched_tokens(spec: WorkerSpec, *, on_cpu: bool) -> int:
    """Return the most tokens of a step."""
    return spec.max_batched_tokens or (512 if on_cpu else 2048)


def finish_loading(spec: WorkerSpec, loaded: LoadedWeights, report: Callable[[float], None]) -> LoadedModel:
    """Determine slots, context and cache size, which depend on one another, and allocate the cache.

    All ranks determine the same, as a cache has as many blocks as fit each of them.
    """
    shape, block_bytes, memory = loaded.shape, loaded.block_bytes, loaded.memory
    on_cpu = memory is None
    context = min(shape.max_positions, spec.max_model_len or shape.max_positions)
    batched_tokens = max_batched_tokens(spec, on_cpu=on_cpu)
    slots = spec.slots or (8 if on_cpu else 256)
    limits = _useful_blocks(shape, slots, batched_tokens, spec.block_size)

    required = slots * -(-context // spec.block_size)
    useful = (required if limit is None else min(limit, required) for limit in limits)
    size_bytes = _cache_size(spec, memory, sum(map(int.__mul__, useful, block_bytes)), loaded.ranks)
    size_bytes = min(loaded.of_all_ranks(size_bytes))
    blocks = split_blocks(size_bytes, block_bytes, limits)
    if min(blocks) < 1:
        raise LoadFailed(f"{size_bytes} bytes of KV cache do not hold one block of {sum(block_bytes)} bytes")
    forward, kv_cache_bytes = loaded.with_cache(blocks)

    slots = min(slots, max(blocks)) if spec.slots is None and not on_cpu else slots
    max_model_len = min(context, max(blocks) * spec.block_size, spec.kv_cache_entries or context)
    max_batch = min(spec.max_batch or slots, slots)
    most_drafts = 0 if spec.speculation is None else spec.speculation.drafts
    if isinstance(forward, StagedForward):
        forward.prepare(
            slots=slots,
            max_batch=max_batch,
            max_batched_tokens=batched_tokens,
            max_model_len=max_model_len,
            most_drafts=most_drafts,
            report=report,
        )
    arena_bytes = InputBatch.arena_size(
        slots=slots,
        max_batched_tokens=batched_tokens,
        max_model_len=max_model_len,
        block_size=spec.block_size,
        groups=len(blocks),
        most_drafts=most_drafts,
    )
    return LoadedModel(
        runner=loaded.make_runner(forward, slots, arena_bytes),
        slots=slots,
        max_batch=max_batch,
        max_batched_tokens=batched_tokens,
        max_model_len=max_model_len,
        max_input_tokens=min(spec.max_input_tokens or max_model_len, max_model_len),
        max_output_tokens=min(spec.max_output_tokens or max_model_len, max_model_len),
        vocab_size=shape.vocab_size,
        windows=shape.groups,
        blocks_total=blocks,
        block_size=spec.block_size,
        eos_token_ids=spec.eos_token_ids,
        device=loaded.device,
        dtype=loaded.dtype,
        weight_bytes=sum(loaded.of_all_ranks(loaded.weight_bytes)),
        kv_cache_bytes=sum(loaded.of_all_ranks(kv_cache_bytes)),
        kernel=forward.kernel,
        embeds=loaded.embeds,
        gpu_bytes=0 if memory is None else memory.taken(),
        gpu_total_bytes=0 if memory is None else memory.free_and_total()[1],
    )


def _cache_size(spec: WorkerSpec, memory: DeviceMemory | None, useful: int, ranks: int) -> int:
    """Return the size of a rank's KV cache in bytes: its share of what is configured or of 1 GiB, at most
    `useful`, or what fits its GPU.
    """
    configured = None if spec.kv_cache_bytes is None else spec.kv_cache_bytes // ranks
    if memory is not None and (configured is None or spec.gpu_memory is not None):
        return cache_bytes(memory, spec.gpu_memory, configured)
    return min(1024 * _MIB // ranks, useful) if configured is None else configured


def _useful_blocks(
    shape: ModelShape, slots: int, max_batched_tokens: int, block_size: int
) -> tuple[int | None, ...]:
    """Return how many blocks each group can use at most; None for the widest, which takes what is left.

    Beside a wider group, one with a window needs the windows of its running sequences, and the tokens of
    the steps in flight. The tokens of a step for every slot are more than that: the rest keeps the windows of
    ended sequences, and what slid out of them, without which no prefix could be reused.
    """
    step_blocks = -(-max_batched_tokens // block_size)

    def useful(window: int | None) -> int | None:
        if window is None or window == shape.groups[0]:
            return None
        return slots * (-(-(window + max_batched_tokens) // block_size) + 1) + step_blocks

    return tuple(map(useful, shape.groups))
