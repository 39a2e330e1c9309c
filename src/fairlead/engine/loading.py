"""Loads a model and its KV cache, and determines its limits: slots, blocks and context."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from fairlead._cext.inputbatch import InputBatch
from fairlead.engine import cpu_step
from fairlead.engine.cache import KVCache, bytes_per_token, split_blocks
from fairlead.engine.cpu_step import BLOCK_SIZE, THREADS_AT_MOST, CpuStep
from fairlead.engine.device_memory import cache_bytes
from fairlead.engine.devices import CudaMemory, find_device, runs_our_kernels
from fairlead.engine.embedder import EmbeddingRunner
from fairlead.engine.forward import Forward, StagedForward, TorchForward
from fairlead.engine.ranks import Follower, LeadingForward, Membership, ReceivedTables
from fairlead.engine.runner import STEPS_AT_ONCE, ModelRunner
from fairlead.errors import LoadFailed
from fairlead.messages import WorkerSpec
from fairlead.models.architecture import ArchitectureSpec
from fairlead.models.loader import WeightSource, read_source
from fairlead.models.parallel import ALONE, Ranks
from fairlead.models.shape import ModelShape

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is ready to run, and its limits. Sizes are in tokens, blocks and bytes.

    `windows` are the KV cache groups' (None: no window), the widest first; `blocks_total` is by group.
    `kernel` names what computes (`Forward.kernel`). `embeds`: it makes vectors, not text. This process uses
    `gpu_bytes` of the GPU's `gpu_total_bytes`; both are 0 on a CPU. `weight_bytes` and `kv_cache_bytes` are
    those of all ranks together.
    """

    runner: ModelRunner | EmbeddingRunner
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


class _LoadedWeights(msgspec.Struct, frozen=True):
    """A model before its KV cache is allocated.

    `block_bytes`: the size of a block, by group. `with_cache` takes the number of blocks of each group, and
    returns what runs the model and the size of its cache in bytes.
    """

    shape: ModelShape
    weight_bytes: int
    block_bytes: Sequence[int]
    with_cache: Callable[[tuple[int, ...]], tuple[Forward, int]]


def load_runner(
    spec: WorkerSpec,
    report: Callable[[float, str], None],
    *,
    compiled: bool = True,
    membership: Membership | None = None,
) -> LoadedModel:
    """Load the model of `spec`; `report(fraction, stage)` receives the progress. Raises `LoadFailed`.

    With `compiled`, our compiled step runs the models that it supports on a CPU, and our kernels run all on a
    GPU. Otherwise torch runs them, with the same results. A model made for embeddings makes no text.

    With a `membership`, this process loads its rank's part. All ranks must load at the same time. The runner
    of rank 0 runs steps on all of them; those of the others are not to be used, only their `forward`.
    """
    ranks = ALONE if membership is None else membership.ranks
    if spec.threads is not None or ranks.size > 1:
        torch.set_num_threads(max(1, (spec.threads or torch.get_num_threads()) // ranks.size))
    device = find_device(spec.device, ranks)
    try:
        source = read_source(
            Path(spec.path),
            device=device,
            dtype=spec.dtype,
            quantization=spec.quantization,
            needs_head=False,
            max_model_len=spec.max_model_len,
            ranks=ranks,
        )
        loaded = _load(spec, source, device, lambda fraction: report(fraction, "weights"), compiled=compiled)
        if membership is not None:
            membership.join(device)
        return _with_cache(
            spec, source, loaded, device, lambda fraction: report(fraction, "graphs"), membership
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise LoadFailed(f"{spec.path}: out of memory on {device}: {error}") from error
    except RuntimeError as error:
        # torch raises this when the system or the driver refuses, for example its CPU allocator.
        raise LoadFailed(f"{spec.path}: cannot be loaded on {device}: {error}") from error


def follower_of(loaded: LoadedModel, ranks: Ranks) -> Follower:
    """Return what runs rank 0's steps on another rank, which has loaded its part."""
    assert isinstance(loaded.runner, ModelRunner)
    longest = loaded.max_model_len + 1  # the last token may be chosen, if not computed
    columns = -(-longest // loaded.block_size)
    return Follower(loaded.runner.forward, ranks, ReceivedTables(len(loaded.windows), loaded.slots, columns))


def _load(
    spec: WorkerSpec,
    source: WeightSource,
    device: torch.device,
    report: Callable[[float], None],
    *,
    compiled: bool,
) -> _LoadedWeights:
    # The compiled step returns logits only, not the hidden states that embeddings are made from.
    is_alone = source.ranks.size == 1
    may = (
        compiled
        and is_alone
        and device.type == "cpu"
        and spec.block_size == BLOCK_SIZE
        and source.pooling is None
    )
    if may and source.spec is not None and _runs_compiled(source.spec, source):
        with source.weights(device, report) as weights:
            _limit_threads(spec, weights.bytes_total)
            step = CpuStep.load(
                source.spec,
                weights,
                threads=min(torch.get_num_threads(), THREADS_AT_MOST),
                max_batched_tokens=_max_batched_tokens(spec, device),
                quantization=source.quantization.name,
            )
            weights.finish()
        return _LoadedWeights(step.shape, step.model.weight_bytes, step.block_bytes, step.with_cache)
    loaded = source.load(device, report)
    _limit_threads(spec, loaded.weight_bytes)
    shape = loaded.model.shape

    def with_cache(blocks: tuple[int, ...]) -> tuple[Forward, int]:
        cache = KVCache(shape, blocks=blocks, block_size=spec.block_size, dtype=loaded.dtype, device=device)
        if compiled and source.pooling is None and runs_our_kernels(device):
            from fairlead.engine.device_forward import DeviceForward  # which needs Triton

            # A recorded graph would have to contain the exchange between GPUs.
            return DeviceForward.on_cuda(loaded.model, cache, records=is_alone), cache.nbytes
        return TorchForward(loaded.model, cache), cache.nbytes

    block_bytes = [size * spec.block_size for size in bytes_per_token(shape, loaded.dtype)]
    return _LoadedWeights(shape, loaded.weight_bytes, block_bytes, with_cache)


def _runs_compiled(architecture: ArchitectureSpec, source: WeightSource) -> bool:
    """Return whether the compiled step runs the model; log why it does not."""
    reason = cpu_step.refusal(architecture, source.dtype, source.quantization.name)
    if reason is not None:
        logger.warning(
            "%s: torch runs the model, because in the CPU kernel %s", source.checkpoint.path, reason
        )
    return reason is None


def _limit_threads(spec: WorkerSpec, weight_bytes: int) -> None:
    if spec.threads is None and weight_bytes < ONE_THREAD_BYTES:
        torch.set_num_threads(1)


def _max_batched_tokens(spec: WorkerSpec, device: torch.device) -> int:
    return spec.max_batched_tokens or (512 if device.type == "cpu" else 2048)


def _with_cache(
    spec: WorkerSpec,
    source: WeightSource,
    loaded: _LoadedWeights,
    device: torch.device,
    report: Callable[[float], None],
    membership: Membership | None,
) -> LoadedModel:
    """Determine slots, context and cache size, which depend on one another, and allocate the cache.

    All ranks determine the same, as a cache has as many blocks as fit each of them.
    """
    ranks = source.ranks
    shape, block_bytes, on_cpu = loaded.shape, loaded.block_bytes, device.type == "cpu"
    context = min(shape.max_positions, spec.max_model_len or shape.max_positions)
    max_batched_tokens = _max_batched_tokens(spec, device)
    slots = spec.slots or (8 if on_cpu else 256)
    limits = _useful_blocks(shape, slots, max_batched_tokens, spec.block_size)

    memory = None if on_cpu else CudaMemory(device)
    required = slots * -(-context // spec.block_size)
    useful = (required if limit is None else min(limit, required) for limit in limits)
    size_bytes = _cache_size(spec, memory, sum(map(int.__mul__, useful, block_bytes)), ranks.size)
    size_bytes = min(ranks.numbers(size_bytes, device))
    blocks = split_blocks(size_bytes, block_bytes, limits)
    if min(blocks) < 1:
        raise LoadFailed(f"{size_bytes} bytes of KV cache do not hold one block of {sum(block_bytes)} bytes")
    forward, kv_cache_bytes = loaded.with_cache(blocks)
    if membership is not None and ranks.rank == 0:
        forward = LeadingForward(forward, membership)

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
        device if ranks.rank == 0 else torch.device("cpu"),  # others prepare no steps
        InputBatch.arena_size(
            slots=slots,
            max_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            block_size=spec.block_size,
            groups=len(blocks),
        ),
    )
    return LoadedModel(
        runner=_runner(source, forward, arenas, spec.eos_token_ids, slots=slots, overlaps=not on_cpu),
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
        eos_token_ids=spec.eos_token_ids,
        device=str(device),
        dtype=str(source.dtype).removeprefix("torch."),
        weight_bytes=sum(ranks.numbers(loaded.weight_bytes, device)),
        kv_cache_bytes=sum(ranks.numbers(kv_cache_bytes, device)),
        kernel=forward.kernel,
        embeds=source.pooling is not None,
        gpu_bytes=0 if memory is None else memory.taken(),
        gpu_total_bytes=0 if memory is None else memory.free_and_total()[1],
    )


def _runner(
    source: WeightSource,
    forward: Forward,
    arenas: "Sequence[Buffer] | int",
    eos_token_ids: tuple[int, ...],
    *,
    slots: int,
    overlaps: bool,
) -> ModelRunner | EmbeddingRunner:
    if source.pooling is None:
        return ModelRunner(forward, eos_token_ids, overlaps=overlaps, arenas=arenas)
    assert isinstance(forward, TorchForward)
    return EmbeddingRunner(forward, source.pooling, slots=slots, arenas=arenas)


def _cache_size(spec: WorkerSpec, memory: CudaMemory | None, useful: int, ranks: int) -> int:
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


def _arenas(device: torch.device, size_bytes: int) -> "Sequence[Buffer] | int":
    """Make the arenas that steps are prepared in: pinned memory where a device copies from them."""
    if device.type == "cpu":
        return STEPS_AT_ONCE
    pinned = (torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(STEPS_AT_ONCE))
    return [arena.numpy().data for arena in pinned]
