"""Loads a model that runs in torch: the fallback of a CPU, our kernels of a GPU, embeddings, and ranks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fairlead.base.errors import LoadFailed
from fairlead.base.messages import WorkerSpec
from fairlead.engine import threads
from fairlead.engine.backend import Forward
from fairlead.engine.cache import KVCache, bytes_per_token
from fairlead.engine.devices import CudaMemory, find_device, runs_our_kernels
from fairlead.engine.embedder import EmbeddingRunner
from fairlead.engine.forward import TorchForward
from fairlead.engine.loading import LoadedModel, LoadedWeights, finish_loading, limit_threads
from fairlead.engine.models.loader import WeightSource, read_source
from fairlead.engine.models.parallel import ALONE, Ranks
from fairlead.engine.ranks import Follower, LeadingForward, Membership, ReceivedTables
from fairlead.engine.runner import STEPS_AT_ONCE, ModelRunner

if TYPE_CHECKING:
    from typing_extensions import Buffer


def load_in_torch(
    spec: WorkerSpec,
    report: Callable[[float, str], None],
    *,
    compiled: bool,
    membership: Membership | None,
) -> LoadedModel:
    """Load the model of `spec` as `loading.load_runner` describes."""
    ranks = ALONE if membership is None else membership.ranks
    if spec.threads is not None or ranks.size > 1:
        _set_threads(max(1, (spec.threads or threads.get_threads()) // ranks.size))
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
        loaded = _load(
            spec,
            source,
            device,
            lambda fraction: report(fraction, "weights"),
            compiled=compiled,
            membership=membership,
        )
        if membership is not None:
            membership.join(device)
        return finish_loading(spec, loaded, lambda fraction: report(fraction, "graphs"))
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
    membership: Membership | None,
) -> LoadedWeights:
    loaded, ranks = source.load(device, report), source.ranks
    if ranks.size == 1:
        limit_threads(spec, loaded.weight_bytes)
        torch.set_num_threads(threads.get_threads())
    shape = loaded.model.shape

    def with_cache(blocks: tuple[int, ...]) -> tuple[Forward, int]:
        cache = KVCache(shape, blocks=blocks, block_size=spec.block_size, dtype=loaded.dtype, device=device)
        forward: Forward
        if compiled and source.pooling is None and runs_our_kernels(device):
            from fairlead.engine.device_forward import DeviceForward  # which needs Triton

            # A recorded graph would have to contain the exchange between GPUs.
            forward = DeviceForward.on_cuda(loaded.model, cache, records=ranks.size == 1)
        else:
            exact = spec.speculation is not None and device.type == "cpu"
            forward = TorchForward(loaded.model, cache, exact=exact)
        if membership is not None and ranks.rank == 0:
            forward = LeadingForward(forward, membership)
        return forward, cache.nbytes

    def make_runner(forward: Forward, slots: int, arena_bytes: int) -> ModelRunner | EmbeddingRunner:
        # Ranks other than 0 prepare no steps.
        arenas = _arenas(device if ranks.rank == 0 else torch.device("cpu"), arena_bytes)
        if source.pooling is None:
            # A draft follows a token that is known, so the next step begins after the one before.
            overlaps = device.type != "cpu" and spec.speculation is None
            return ModelRunner(forward, spec.eos_token_ids, overlaps=overlaps, arenas=arenas)
        assert isinstance(forward, TorchForward)
        return EmbeddingRunner(forward, source.pooling, slots=slots, arenas=arenas)

    return LoadedWeights(
        shape=shape,
        device=str(device),
        dtype=str(source.dtype).removeprefix("torch."),
        weight_bytes=loaded.weight_bytes,
        block_bytes=[size * spec.block_size for size in bytes_per_token(shape, loaded.dtype)],
        with_cache=with_cache,
        make_runner=make_runner,
        embeds=source.pooling is not None,
        memory=None if device.type == "cpu" else CudaMemory(device),
        ranks=ranks.size,
        of_all_ranks=lambda number: ranks.numbers(number, device),
    )


def _set_threads(count: int) -> None:
    threads.set_threads(count)
    torch.set_num_threads(count)


def _arenas(device: torch.device, size_bytes: int) -> "Sequence[Buffer] | int":
    """Make the arenas that steps are prepared in: pinned memory where a device copies from them."""
    if device.type == "cpu":
        return STEPS_AT_ONCE
    pinned = (torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(STEPS_AT_ONCE))
    return [arena.numpy().data for arena in pinned]
