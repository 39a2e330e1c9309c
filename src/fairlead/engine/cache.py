"""The paged KV cache's memory: one K and one V tensor a layer, in blocks. Knows no sequence.

Which block is whose is said by `engine/blocks.py`; here a block is a row number.
"""

import numpy as np
import torch
from torch import Tensor

from fairlead.models.shape import ModelShape


def bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """What one token costs over all layers."""
    return shape.kv_elements_per_token * dtype.itemsize


class KVCache:
    """Keys and values of `blocks` × `block_size` tokens: [blocks, block_size, kv_heads, head_dim] a layer.

    A new cache is all zero. Slot s is token s % block_size of block s // block_size.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.heads = shape.kv_heads
        self.head_dim = shape.head_dim
        size = (blocks, block_size, shape.kv_heads, shape.head_dim)
        self.keys = [_zeros(size, dtype, device) for _ in range(shape.layers)]
        self.values = [_zeros(size, dtype, device) for _ in range(shape.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes in all tensors."""
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put [T, kv_heads, head_dim] of each at `slots` [T]."""
        self.keys[layer].view(-1, self.heads, self.head_dim).index_copy_(0, slots, key)
        self.values[layer].view(-1, self.heads, self.head_dim).index_copy_(0, slots, value)

    def clear(self, layer: int, blocks: Tensor) -> None:
        """Zero whole blocks [n]: a former owner may have left NaN there, which no weight of 0 hides."""
        self.keys[layer].index_fill_(0, blocks, 0)
        self.values[layer].index_fill_(0, blocks, 0)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks [n] out, one after the other: keys and values, [n · block_size, kv_heads, head_dim]."""
        key = self.keys[layer].index_select(0, blocks)
        value = self.values[layer].index_select(0, blocks)
        return key.flatten(0, 1), value.flatten(0, 1)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which cost nothing until they are written; torch fills them.
    count = int(np.prod(size)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(size)
