"""Attention over the paged cache, in plain torch, for any device. One object per step, shared by all layers.

Decodes run together: their blocks are copied side by side, padded, and the query heads that share a KV head
become rows of one query. Prefill chunks run one by one. Guarantees that a sequence's result does not depend
on the rest of the batch, up to the rounding of torch's own kernels.

T tokens of the step, B decodes, L cached tokens, H query heads, K KV heads, G = H / K, D channels per head.
"""

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fairlead.engine.arrays import upload
from fairlead.engine.cache import KVCache
from fairlead.engine.inputs import Inputs
from fairlead.language.checkpoint.shape import ModelShape


class PagedAttention:
    """`AttentionFunction`: writes a step's keys and values to the cache and attends to the cached tokens."""

    def __init__(self, inputs: Inputs, cache: KVCache, shape: ModelShape) -> None:
        self._cache = cache
        self._layer_groups = shape.layer_groups
        self._groups = [_Group(inputs, group, cache, shape) for group in range(len(shape.groups))]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = self._groups[self._layer_groups[layer]]
        if group.started is not None:
            self._cache.clear(layer, group.started)
        self._cache.write(layer, group.cache_slots, key, value)
        if len(group.reads) == 1:
            return group.reads[0](self._cache, layer, query, key, value)
        result = torch.empty_like(query, memory_format=torch.contiguous_format).flatten(1)  # [T, H·D]
        for read in group.reads:
            rows = read.rows
            result[rows] = read(self._cache, layer, query[rows], key[rows], value[rows])
        return result


class _Group:
    """What the layers with the same window share in this step.

    `cache_slots` [T] of the tokens. `started`: blocks that this step begins and does not fill.
    """

    def __init__(self, inputs: Inputs, group: int, cache: KVCache, shape: ModelShape) -> None:
        window, table = shape.groups[group], inputs.tables[group]
        size, device = cache.block_size, cache.device
        self.cache_slots = inputs.slot_mapping[group].long()
        ends = inputs.sequence_lengths.astype(np.int64)
        starts = ends - np.diff(inputs.query_starts)
        started = np.flatnonzero((ends % size != 0) & (ends - ends % size >= starts))
        blocks = table[inputs.slots[started], ends[started] // size].astype(np.int64)
        self.started = upload(blocks, device) if len(blocks) else None

        B = inputs.decodes  # noqa: N806
        self.reads: list[_Decodes | _Prefill] = []
        if B:
            self.reads += _plan_decodes(table, inputs.slots[:B], starts[:B], window, cache, shape)
        for row in range(B, len(ends)):
            rows = slice(int(inputs.query_starts[row]), int(inputs.query_starts[row + 1]))
            line = table[inputs.slots[row]]
            self.reads.append(_plan_prefill(line, rows, int(starts[row]), window, cache, shape))


class _Decodes(msgspec.Struct):
    """Decodes of similar length: the newest token of each attends to all tokens in its window.

    `rows` [B] of the step; `blocks` [B · n], a short row padded with its own first block; `mask`
    [B, 1, 1, L], 0 or −inf.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor
    scores: "_Scores"

    def __call__(self, cache: KVCache, layer: int, query: Tensor, _key: Tensor, _value: Tensor) -> Tensor:
        B, H, D = query.shape  # noqa: N806
        key, value = cache.read(layer, self.blocks)
        key = key.view(B, -1, cache.heads, D).transpose(1, 2)  # [B, K, L, D]
        value = value.view(B, -1, cache.heads, D).transpose(1, 2)
        query = query.reshape(B, cache.heads, H // cache.heads, D)  # [B, K, G, D]
        return self.scores.weigh(query, key, value, self.mask).reshape(B, H * D)


class _Prefill(msgspec.Struct):
    """T consecutive tokens of one sequence, which attend to themselves and all before them.

    `rows`: their range in the step. `blocks` [n] hold the `length` tokens to attend to; None: these are
    only the chunk itself, so the cache is not read. `mask` [G · T, L], 0 or −inf; None: plainly causal.
    """

    rows: slice
    blocks: Tensor | None
    length: int
    mask: Tensor | None
    scores: "_Scores"

    def __call__(self, cache: KVCache, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        T, H, D = query.shape  # noqa: N806
        if self.blocks is not None:
            key, value = (copied[: self.length] for copied in cache.read(layer, self.blocks))
        key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]  # [1, K, L, D]
        if self.mask is None:
            query = query.transpose(0, 1)[None]  # [1, H, T, D]
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True, scale=self.scores.scale
            )
            return output[0].transpose(0, 1).reshape(T, H * D)
        query = query.reshape(T, cache.heads, -1, D).permute(1, 2, 0, 3).reshape(1, cache.heads, -1, D)
        output = self.scores.weigh(query, key, value, self.mask)  # [1, K, G · T, D]
        return output.view(cache.heads, -1, T, D).permute(2, 0, 1, 3).reshape(T, H * D)


class _Scores(msgspec.Struct, frozen=True):
    """How products of queries and keys become weights: scaled, capped if there is a cap, then softmax."""

    scale: float
    cap: float | None

    def weigh(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attend: query […, Q, D], key and value […, L, D], mask [… Q, L] of 0 or −inf → […, Q, D]."""
        if self.cap is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (self.scale / self.cap)
        weights = scores.tanh_().mul_(self.cap).add(mask).softmax(-1, dtype=torch.float32)
        return torch.matmul(weights.to(value.dtype), value)


def _plan_decodes(
    table: np.ndarray,
    slots: np.ndarray,
    last: np.ndarray,
    window: int | None,
    cache: KVCache,
    shape: ModelShape,
) -> list[_Decodes]:
    """Group decodes at positions `last` so that none is padded to more than about twice its length."""
    size, device = cache.block_size, cache.device
    first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
    begin = first // size
    counts = last // size - begin + 1
    scores = _Scores(shape.attention_scale, shape.attention_cap)
    plans = []
    classes = np.ceil(np.log2(counts)).astype(np.int64)
    for member in np.unique(classes):
        rows = np.flatnonzero(classes == member)
        width = np.arange(counts[rows].max())
        # The mask hides the padding, which is the row's own block, so finite if the row is.
        columns = begin[rows, None] + np.where(width < counts[rows, None], width, 0)
        blocks = table[slots[rows, None], columns].astype(np.int64)
        positions = (begin[rows] * size)[:, None] + np.arange(len(width) * size)
        visible = (positions >= first[rows, None]) & (positions <= last[rows, None])
        plans.append(
            _Decodes(
                rows=upload(rows, device),
                blocks=upload(blocks.reshape(-1), device),
                mask=_additive(visible, cache)[:, None, None],
                scores=scores,
            )
        )
    return plans


def _plan_prefill(
    line: np.ndarray, rows: slice, start: int, window: int | None, cache: KVCache, shape: ModelShape
) -> _Prefill:
    """Plan the step's tokens `rows`, from position `start` on, of the sequence with the blocks `line`."""
    size = cache.block_size
    end = start + rows.stop - rows.start
    slides = window is not None and end > window
    scores = _Scores(shape.attention_scale, shape.attention_cap)
    if start == 0 and not slides and scores.cap is None:
        return _Prefill(rows, None, end, None, scores)
    origin = 0 if window is None else max(0, start - window + 1) // size * size
    queries = np.arange(start, end)[:, None]
    keys = np.arange(origin, end)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    mask = _additive(np.tile(visible, (shape.heads // shape.kv_heads, 1)), cache)
    if start == 0:
        return _Prefill(rows, None, end, mask, scores)
    blocks = line[origin // size : (end - 1) // size + 1].astype(np.int64)
    return _Prefill(rows, upload(blocks, cache.device), end - origin, mask, scores)


def _additive(visible: np.ndarray, cache: KVCache) -> Tensor:
    """Return 0 where `visible`, −inf elsewhere: torch would convert a boolean mask to this at every call."""
    mask = torch.zeros(visible.shape, dtype=cache.dtype, device=cache.device)
    return mask.masked_fill_(upload(~visible, cache.device), float("-inf"))
