"""Attention over the paged cache, in plain torch, for any device. One object a step, shared by all layers.

Decodes are run together: their blocks are copied out side by side, padded, and the query heads that
share a KV head become rows of one query. Prefill chunks are run one by one. Promises that a sequence's
result does not depend on its neighbours, up to the rounding of torch's own kernels.

T tokens of the step, B decodes, L cached tokens, H query heads, K KV heads, G = H / K, D channels a head.
"""

from collections.abc import Sequence as ReadOnlySequence

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fairlead.engine.cache import KVCache
from fairlead.engine.sequence import Chunk
from fairlead.models.shape import ModelShape


class PagedAttention:
    """Writes a step's keys and values to the cache and attends to what is there: `layers.Attend`.

    The chunks of one token that lead the plan are its decodes.
    """

    def __init__(self, chunks: ReadOnlySequence[Chunk], cache: KVCache, shape: ModelShape) -> None:
        self._cache = cache
        self._windows = shape.windows
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        groups = shape.heads // shape.kv_heads
        tables = [np.array(chunk.sequence.block_ids[0], dtype=np.int64) for chunk in chunks]
        self._slots = torch.from_numpy(_slots(chunks, tables, cache.block_size)).to(device)
        entered = _entered(chunks, tables, cache.block_size)
        self._entered = torch.tensor(entered, device=device) if entered else None
        decodes = next((row for row, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))
        self._reads: dict[int | None, list[_Decodes | _Prefill]] = {}
        for window in set(shape.windows):
            reads: list[_Decodes | _Prefill] = []
            reads += _plan_decodes(chunks[:decodes], tables, cache, window, dtype)
            row = decodes
            for chunk, table in zip(chunks[decodes:], tables[decodes:], strict=True):
                reads.append(_plan_prefill(chunk, table, row, cache, window, dtype, groups))
                row += chunk.count
            self._reads[window] = reads

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._entered is not None:
            self._cache.clear(layer, self._entered)
        self._cache.write(layer, self._slots, key, value)
        reads = self._reads[self._windows[layer]]
        if len(reads) == 1:
            return reads[0](self._cache, layer, query, key, value)
        result = torch.empty_like(query, memory_format=torch.contiguous_format).flatten(1)  # [T, H·D]
        for read in reads:
            rows = read.rows
            result[rows] = read(self._cache, layer, query[rows], key[rows], value[rows])
        return result


class _Decodes(msgspec.Struct):
    """Decodes of similar length: the newest token of each against all that it may see.

    `rows` [B] of the step; `blocks` [B · n], a short row filled up with its own first block; `mask`
    [B, 1, 1, L], 0 or −inf.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor

    def __call__(self, cache: KVCache, layer: int, query: Tensor, _key: Tensor, _value: Tensor) -> Tensor:
        B, H, D = query.shape  # noqa: N806
        key, value = cache.read(layer, self.blocks)
        key = key.view(B, -1, cache.heads, D).transpose(1, 2)  # [B, K, L, D]
        value = value.view(B, -1, cache.heads, D).transpose(1, 2)
        query = query.reshape(B, cache.heads, H // cache.heads, D)  # [B, K, G, D]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask).reshape(B, H * D)


class _Prefill(msgspec.Struct):
    """A run of one sequence's T tokens against itself and all before it.

    `rows` of the step. `blocks` [n] hold the `length` tokens to see; None: the chunk is all that there
    is, nothing has to be read back. `mask` [G · T, L], 0 or −inf; None: plainly causal.
    """

    rows: slice
    blocks: Tensor | None
    length: int
    mask: Tensor | None

    def __call__(self, cache: KVCache, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        T, H, D = query.shape  # noqa: N806
        if self.blocks is not None:
            key, value = (copied[: self.length] for copied in cache.read(layer, self.blocks))
        key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]  # [1, K, L, D]
        if self.mask is None:
            query = query.transpose(0, 1)[None]  # [1, H, T, D]
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return found[0].transpose(0, 1).reshape(T, H * D)
        query = query.reshape(T, cache.heads, -1, D).permute(1, 2, 0, 3).reshape(1, cache.heads, -1, D)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)  # [1, K, G · T, D]
        return found.view(cache.heads, -1, T, D).permute(2, 0, 1, 3).reshape(T, H * D)


def _slots(chunks: ReadOnlySequence[Chunk], tables: list[np.ndarray], block_size: int) -> np.ndarray:
    """Where each token of the step goes: [T]."""
    positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks])
    rows = np.repeat(np.arange(len(chunks)), [chunk.count for chunk in chunks])
    offsets = np.cumsum([0] + [len(table) for table in tables[:-1]])
    blocks = np.concatenate(tables)[offsets[rows] + positions // block_size]
    return np.asarray(blocks * block_size + positions % block_size)


def _entered(chunks: ReadOnlySequence[Chunk], tables: list[np.ndarray], block_size: int) -> list[int]:
    """The blocks that this step begins and does not fill."""
    entered = []
    for chunk, table in zip(chunks, tables, strict=True):
        end = chunk.start + chunk.count
        if end % block_size and end - end % block_size >= chunk.start:
            entered.append(int(table[end // block_size]))
    return entered


def _plan_decodes(
    chunks: ReadOnlySequence[Chunk],
    tables: list[np.ndarray],
    cache: KVCache,
    window: int | None,
    dtype: torch.dtype,
) -> list[_Decodes]:
    """Split decodes so that nobody is padded to more than about twice its length."""
    device, size = cache.keys[0].device, cache.block_size
    last = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    counts = last // size - first // size + 1
    plans = []
    classes = np.ceil(np.log2(counts)).astype(np.int64)
    for member in np.unique(classes):
        rows = np.flatnonzero(classes == member)
        width = int(counts[rows].max())
        blocks = np.empty((len(rows), width), dtype=np.int64)
        for line, row in enumerate(rows):
            seen = tables[row][first[row] // size : last[row] // size + 1]
            blocks[line, : len(seen)] = seen
            blocks[line, len(seen) :] = seen[0]  # hidden by the mask; the row's own, so finite if it is
        origin = first[rows] // size * size
        positions = origin[:, None] + np.arange(width * size)
        visible = (positions >= first[rows, None]) & (positions <= last[rows, None])
        plans.append(
            _Decodes(
                rows=torch.from_numpy(rows).to(device),
                blocks=torch.from_numpy(blocks.reshape(-1)).to(device),
                mask=_additive(visible, dtype, device)[:, None, None],
            )
        )
    return plans


def _plan_prefill(
    chunk: Chunk,
    table: np.ndarray,
    row: int,
    cache: KVCache,
    window: int | None,
    dtype: torch.dtype,
    groups: int,
) -> _Prefill:
    device, size = cache.keys[0].device, cache.block_size
    end = chunk.start + chunk.count
    slides = window is not None and end > window
    rows = slice(row, row + chunk.count)
    if chunk.start == 0 and not slides:
        return _Prefill(rows, None, end, None)
    origin = 0 if window is None else max(0, chunk.start - window + 1) // size * size
    queries = np.arange(chunk.start, end)[:, None]
    keys = np.arange(origin, end)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    blocks = torch.from_numpy(table[origin // size : (end - 1) // size + 1]).to(device)
    mask = _additive(np.tile(visible, (groups, 1)), dtype, device)
    return _Prefill(rows, blocks, end - origin, mask)


def _additive(visible: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where `visible`, −inf elsewhere: torch turns a mask of truth values into this at every call."""
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~visible), float("-inf")).to(device)
