"""Runs plans over a model and its KV cache, and loads both. The device half's front door.

Owns the model, the cache and the step's inputs. Knows no queue, no wire and no text; which blocks a
sequence has was decided before.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead.engine.attention import PagedAttention
from fairlead.engine.cache import KVCache, bytes_per_token
from fairlead.engine.sampler import PendingPicks, choose
from fairlead.engine.sequence import Chunk, Plan
from fairlead.engine.step import Pick
from fairlead.errors import LoadFailed
from fairlead.models.loader import Loaded, load_model
from fairlead.models.registry import Model
from fairlead.worker.wire import WorkerSpec

_MIB = 1024 * 1024


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is ready to run, and the limits it runs within. Sizes are in tokens, blocks and bytes."""

    runner: "ModelRunner"
    slots: int
    max_batch: int
    max_batched_tokens: int
    max_model_len: int
    vocab_size: int
    blocks_total: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes: int


class ModelRunner:
    """`fairlead.engine.step.Runner` over one model. Its plans' chunks must have their blocks."""

    def __init__(self, model: Model, cache: KVCache, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._cache = cache
        self._eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def launch(self, plan: Plan) -> "LaunchedStep":
        """Run a step: all its tokens through the layers, logits only where a chunk samples."""
        chunks = plan.chunks
        cache, device = self._cache, self._cache.keys[0].device
        token_ids, positions = self._inputs(chunks)
        attend = PagedAttention(chunks, cache, self._model.shape)
        hidden = self._model.hidden(token_ids.to(device), positions.to(device), attend)

        ends = np.cumsum([chunk.count for chunk in chunks])
        sampling = [row for row, chunk in enumerate(chunks) if chunk.samples]
        if not sampling:
            return LaunchedStep(chunks, None, {})
        last = torch.from_numpy(ends[sampling] - 1).to(device)
        logits = self._model.logits(hidden.index_select(0, last))
        picks = choose(logits, [chunks[row].sequence for row in sampling], self._eos_token_ids)
        return LaunchedStep(chunks, picks, self._strangers(chunks))

    def _inputs(self, chunks: tuple[Chunk, ...]) -> tuple[Tensor, Tensor]:
        """Token ids and positions of all chunks, flattened: [T] each, int64.

        An id that the model does not have runs as 0, since an index out of range would end the whole
        step; its sequence is failed when it samples (`_strangers`).
        """
        token_ids: list[int] = []
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count]
        ids = np.array(token_ids, dtype=np.int64)
        ids[(ids < 0) | (ids >= self._model.shape.vocab_size)] = 0
        positions = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        return torch.from_numpy(ids), torch.from_numpy(np.concatenate(positions))

    def _strangers(self, chunks: tuple[Chunk, ...]) -> dict[int, str]:
        """Chunks whose prompt has an id outside the vocabulary, and what to say: a look once a sequence."""
        vocabulary = self._model.shape.vocab_size
        strangers = {}
        for row, chunk in enumerate(chunks):
            if chunk.samples and not chunk.sequence.output_length:
                prompt = chunk.sequence.token_ids
                if min(prompt) < 0 or max(prompt) >= vocabulary:
                    strangers[row] = f"the prompt has token ids outside 0…{vocabulary - 1}"
        return strangers


class LaunchedStep:
    """`fairlead.engine.step.PendingStep` of this runner."""

    def __init__(self, chunks: tuple[Chunk, ...], picks: PendingPicks | None, errors: dict[int, str]) -> None:
        self._chunks = chunks
        self._picks = picks
        self._errors = errors

    def wait(self) -> list[Pick | None]:
        chosen = iter(self._picks.wait() if self._picks else ())
        picks = [next(chosen) if chunk.samples else None for chunk in self._chunks]
        for row, error in self._errors.items():
            picks[row] = Pick(-1, error=error)
        return picks


# The matrices of a model as small as this are done before a second thread has woken: at 5 MB, one thread made
# 452 tokens/s for one stream and 2,876 for 32, two made 191 and 2,266.
ONE_THREAD_BYTES = 64 * _MIB


def load_runner(spec: WorkerSpec, report: Callable[[float, str], None]) -> LoadedModel:
    """Load what `spec` asks for; `report(fraction, stage)` hears how far it is. Raises `LoadFailed`."""
    if spec.threads is not None:
        torch.set_num_threads(max(1, spec.threads))
    device = _device(spec.device)
    try:
        loaded = load_model(
            Path(spec.path),
            device=device,
            dtype=spec.dtype,
            report=lambda fraction: report(fraction, "weights"),
        )
        if spec.threads is None and loaded.weight_bytes < ONE_THREAD_BYTES:
            torch.set_num_threads(1)
        return _with_cache(spec, loaded, device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise LoadFailed(f"{spec.path}: out of memory on {device}: {error}") from error
    except RuntimeError as error:
        # All that torch says when the system or the driver refuses, its CPU allocator for one.
        raise LoadFailed(f"{spec.path}: cannot be loaded on {device}: {error}") from error


def _with_cache(spec: WorkerSpec, loaded: Loaded, device: torch.device) -> LoadedModel:
    """Settle the limits, which depend on one another: slots, context, cache."""
    shape = loaded.model.shape
    token_bytes = bytes_per_token(shape, loaded.dtype)
    block_bytes = token_bytes * spec.block_size
    context = min(shape.max_positions, spec.max_model_len or shape.max_positions)
    on_cpu = device.type == "cpu"

    cache_bytes = spec.kv_cache_bytes
    if cache_bytes is None and on_cpu:
        blocks_wanted = (spec.slots or 8) * -(-context // spec.block_size)
        cache_bytes = min(1024 * _MIB, blocks_wanted * block_bytes)
    elif cache_bytes is None:
        free, _ = torch.cuda.mem_get_info(device)
        cache_bytes = int(free * 0.9)
    blocks = cache_bytes // block_bytes
    if blocks < 1:
        raise LoadFailed(f"{cache_bytes} bytes of KV cache do not hold one block of {block_bytes} bytes")
    cache = KVCache(shape, blocks=blocks, block_size=spec.block_size, dtype=loaded.dtype, device=device)

    slots = spec.slots or (8 if on_cpu else min(256, blocks))
    return LoadedModel(
        runner=ModelRunner(loaded.model, cache, loaded.eos_token_ids),
        slots=slots,
        max_batch=min(spec.max_batch or slots, slots),
        max_batched_tokens=spec.max_batched_tokens or (512 if on_cpu else 2048),
        max_model_len=min(context, blocks * spec.block_size),
        vocab_size=shape.vocab_size,
        blocks_total=blocks,
        block_size=spec.block_size,
        eos_token_ids=loaded.eos_token_ids,
        device=str(device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        weight_bytes=loaded.weight_bytes,
        kv_cache_bytes=cache.nbytes,
    )


def _device(name: str) -> torch.device:
    """Find the device, "auto" being CUDA if there is any; `LoadFailed` if it is not there."""
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
