"""Attention over the paged cache on a GPU: which Triton kernel runs with which tiles. One object per step.

Uses the step only in its form on the device (`Rows`), so that it launches the same for every step of one
size and can be recorded in a CUDA graph. `attention.PagedAttention` computes the same in plain torch, and is
the test oracle.

A step's decodes go through one kernel, all other rows through another. A decode is split over several
programs if there are too few programs to keep a GPU busy, or if one of them would have very much to read.
"""

import math
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from fairlead.engine import paged_attention_kernels as kernels
from fairlead.engine.cache import KVCache
from fairlead.language.checkpoint.shape import ModelShape

PROGRAMS_TARGET = 1024  # for decodes: about eight per multiprocessor of a large GPU
MAX_SPLITS = 32  # as many as one program combines at the end
_SPLIT_TOKENS = 128  # less is not worth a program
_LONGEST_SPLIT_TOKENS = 4096  # of a sequence with the longest possible context


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """A step on the device: R rows with T tokens in all, int32. The first `decodes` rows have one token each.

    `token_ids` [T]; `positions` [T]; `cache_slots` [T] by KV cache group, negative: not written;
    `starts` [R + 1]: where each row's tokens begin; `lengths` [R]: tokens in the cache after this step, 0 for
    a padding row; `table_rows` [R]: its index into each group's table, `tables[group]` [slots, columns].
    """

    token_ids: Tensor
    positions: Tensor
    cache_slots: tuple[Tensor, ...]
    starts: Tensor
    lengths: Tensor
    table_rows: Tensor
    tables: tuple[Tensor, ...]
    decodes: int


class Tiles(NamedTuple):
    """How a kernel tiles its work: `rows` (tokens × query heads) by `tokens` of the cache at a time."""

    rows: int
    tokens: int
    warps: int
    stages: int


def decode_tiles(heads_a_group: int, channels: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for decodes. The hardware multiplies 16 rows or more, mostly more than a group has."""
    rows = max(16, power_of_two(heads_a_group))
    if dtype == torch.float32:
        return Tiles(rows, 32 if channels < 128 else 16, 4, 2)
    return Tiles(rows, 32 if channels > 128 else 64, 4, 3)


def prefill_tiles(heads_a_group: int, channels: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for other rows. float32 has no exact matrix unit, so its tiles must fit registers."""
    least = power_of_two(heads_a_group)
    if dtype == torch.float32:
        return Tiles(max(16, least), 32 if channels < 128 else 16, 4, 2)
    if channels > 128:
        return Tiles(max(64, least), 32, 8, 2)
    return Tiles(max(128, least), 64, 8, 3)


def splits(rows: int, kv_heads: int, longest: int) -> int:
    """Return how many programs share a KV head of a decode at most, for sequences up to `longest` tokens."""
    busy = power_of_two(-(-PROGRAMS_TARGET // (rows * kv_heads)))
    bounded = power_of_two(-(-longest // _LONGEST_SPLIT_TOKENS))
    useful = power_of_two(-(-longest // _SPLIT_TOKENS))
    return min(max(busy, bounded), useful, MAX_SPLITS)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


class DeviceAttention:
    """`AttentionFunction`: writes a step's keys and values to the cache and attends to the cached tokens.

    `longest`: the bound of a sequence's length over all steps; it determines the number of splits.
    """

    def __init__(self, rows: Rows, cache: KVCache, shape: ModelShape, longest: int) -> None:
        self.rows = rows
        self.cache = cache
        self._groups = shape.layer_groups
        self._windows = shape.windows
        self._longest = longest
        self._scale = shape.attention_scale
        self._cap = shape.attention_cap
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # buffers for splits, shared by all layers
        self._fixed = {
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "CHANNELS": max(16, power_of_two(shape.head_dim)),
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write `key` and `value` [T, K, D] to the cache; return `query`'s [T, H, D] attention: [T, H·D]."""
        self.write(layer, key, value)
        return self.read(layer, query)

    def cache_slots(self, layer: int) -> Tensor:
        """Return the slots of the step's tokens in this layer's cache: [T]."""
        return self.rows.cache_slots[self._groups[layer]]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` [T, K, D] to the cache."""
        kv_heads, head_dim = self._fixed["KV_HEADS"], self._fixed["HEAD_DIM"]
        if not len(key):
            return
        assert key.stride(-1) == 1 and value.stride(-1) == 1  # noqa: PT018
        kernels.write_cache[(len(key),)](
            key,
            value,
            *key.stride()[:2],
            *value.stride()[:2],
            self.cache_slots(layer),
            self.cache.keys[layer],
            self.cache.values[layer],
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            NUMBERS=power_of_two(kv_heads * head_dim),
            num_warps=4,
            enable_fp_fusion=True,
        )

    def read(self, layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [T, H, D]: [T, H·D]. Its keys and values must be in the cache."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        output = query.new_empty((len(query), self._fixed["HEADS"] * self._fixed["HEAD_DIM"]))
        table = self.rows.tables[self._groups[layer]]
        common = (
            query,
            *query.stride()[:2],
            self.cache.keys[layer],
            self.cache.values[layer],
            table,
            table.stride(0),
            self.rows.table_rows,
            self.rows.lengths,
        )
        if self.rows.decodes:
            self._decode(layer, query, common, output)
        if len(self.rows.table_rows) > self.rows.decodes:
            self._prefill(layer, query, common, output)
        return output

    def _decode(self, layer: int, query: Tensor, common: tuple[object, ...], output: Tensor) -> None:
        fixed, rows, window = self._fixed, self.rows.decodes, self._windows[layer] or 0
        tiles = decode_tiles(fixed["HEADS"] // fixed["KV_HEADS"], fixed["CHANNELS"], query.dtype)
        seen = min(self._longest, window + tiles.tokens) if window else self._longest
        split = splits(rows, fixed["KV_HEADS"], seen)
        constants = {"WINDOW": window, "TILE": tiles.tokens, "SPLITS": split}
        constants["LEAST_TILES"] = max(1, _SPLIT_TOKENS // tiles.tokens)
        parts = self._split_buffers(rows, split, query)
        kernels.decode[(rows, fixed["KV_HEADS"], split)](
            *common,
            output,
            *parts,
            *self._softmax(),
            **fixed,
            **constants,
            **self._options(query),
            ROWS=tiles.rows,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,
        )
        if split > 1:
            kernels.combine[(rows, fixed["HEADS"])](
                self.rows.lengths,
                output,
                *parts,
                HEADS=fixed["HEADS"],
                HEAD_DIM=fixed["HEAD_DIM"],
                CHANNELS=fixed["CHANNELS"],
                **constants,
                num_warps=4,
                enable_fp_fusion=True,
            )

    def _prefill(self, layer: int, query: Tensor, common: tuple[object, ...], output: Tensor) -> None:
        fixed, rows, decodes = self._fixed, len(self.rows.table_rows), self.rows.decodes
        tiles = prefill_tiles(fixed["HEADS"] // fixed["KV_HEADS"], fixed["CHANNELS"], query.dtype)
        tokens_a_tile = tiles.rows // (fixed["HEADS"] // fixed["KV_HEADS"])
        count = (len(query) - decodes) // tokens_a_tile + rows - decodes
        kernels.prefill[(count, fixed["KV_HEADS"])](
            *common,
            self.rows.starts,
            output,
            decodes,
            rows,
            *self._softmax(),
            **fixed,
            **self._options(query),
            WINDOW=self._windows[layer] or 0,
            ROWS=tiles.rows,
            TILE=tiles.tokens,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,
        )

    def _softmax(self) -> tuple[float, float]:
        """Return `scale` and `cap` as the kernels expect them, which take powers of two."""
        if self._cap is None:
            return self._scale * math.log2(math.e), 0.0
        return self._scale / self._cap, self._cap * math.log2(math.e)

    def _options(self, query: Tensor) -> dict[str, object]:
        return {
            "BLOCK_SIZE": self.cache.block_size,
            "CAPPED": self._cap is not None,
            "PRECISION": "ieee",  # for float32: otherwise products are rounded to ten bits
            "WIDE": query.device.type == "cpu",
        }

    def _split_buffers(self, rows: int, split: int, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if split not in self._parts:
            heads = (rows, self._fixed["HEADS"], split) if split > 1 else (1, 1, 1)
            self._parts[split] = (
                query.new_empty((*heads, self._fixed["CHANNELS"]), dtype=torch.float32),
                query.new_empty(heads, dtype=torch.float32),
                query.new_empty(heads, dtype=torch.float32),
            )
        return self._parts[split]
