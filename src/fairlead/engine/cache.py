"""The paged KV cache's memory: one K and one V tensor per layer, in blocks. Independent of sequences.

`engine/memory.py` assigns blocks to sequences; here a block is only an index. Layers with the same window
form a group, and all tensors of a group have the same number of blocks.
"""

import mmap
from collections.abc import Iterator
from collections.abc import Sequence as ReadOnlySequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fairlead.language.checkpoint.shape import ModelShape


def bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the bytes that one token takes over all layers of each group."""
    return tuple(elements * dtype.itemsize for elements in shape.kv_elements_per_token)


class KVCache:
    """Keys and values of all layers: each a tensor [blocks of its group, block_size, kv_heads, head_dim].

    A new cache is all zeros. Slot s is token s % block_size of block s // block_size.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        blocks: ReadOnlySequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert len(blocks) == len(shape.groups)
        self.blocks = tuple(blocks)
        self.block_size = block_size
        self.heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.dtype = dtype
        self.device = device
        sizes = [(blocks[group], block_size, self.heads, self.head_dim) for group in shape.layer_groups]
        self._layer_groups = shape.layer_groups
        self._memory: list[mmap.mmap] = []  # on a CPU: for each layer's keys, then for each layer's values
        self.keys = [self._zeros(size) for size in sizes]
        self.values = [self._zeros(size) for size in sizes]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    def release(self, group: int, blocks: ReadOnlySequence[int]) -> None:
        """Return the memory of these blocks of a group to the system; they read as zero from then on.

        Ids must ascend, so that neighbors are released together: only whole pages can be. GPU memory is kept.
        """
        for layer, memory in enumerate(self._memory):
            if self._layer_groups[layer % len(self._layer_groups)] == group:
                block_bytes = len(memory) // self.blocks[group]
                for first, last in _runs(blocks):
                    _release(memory, first * block_bytes, (last + 1) * block_bytes)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value`, each [T, kv_heads, head_dim], to `slots` [T], int64."""
        self.keys[layer].view(-1, self.heads, self.head_dim).index_copy_(0, slots, key)
        self.values[layer].view(-1, self.heads, self.head_dim).index_copy_(0, slots, value)

    def _zeros(self, size: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        # The system's zeroed pages take no memory until written; torch would write them at once.
        size_bytes = int(np.prod(size)) * self.dtype.itemsize
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.append(memory)
        return torch.frombuffer(memory, dtype=self.dtype).view(size)

    def clear(self, layer: int, blocks: Tensor) -> None:
        """Zero `blocks` [n], int64: a NaN from a previous owner would survive an attention weight of 0."""
        self.keys[layer].index_fill_(0, blocks, 0)
        self.values[layer].index_fill_(0, blocks, 0)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of `blocks` [n], concatenated: keys, values [n · block_size, kv_heads, head_dim]."""
        key = self.keys[layer].index_select(0, blocks)
        value = self.values[layer].index_select(0, blocks)
        return key.flatten(0, 1), value.flatten(0, 1)


def _runs(blocks: ReadOnlySequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last number of each run of consecutive numbers."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        members = [block for _, block in run]
        yield members[0], members[-1]


def _release(memory: mmap.mmap, start: int, end: int) -> None:
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, start, end - start)
