"""One step over a cache with known contents, for the GPU attention and the portable one, on any device."""

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from engine.models.tiny import SHAPE
from fairlead.engine.attention import PagedAttention
from fairlead.engine.cache import KVCache
from fairlead.engine.inputs import Inputs
from fairlead.engine.paged_attention import DeviceAttention, Rows

CPU = torch.device("cpu")
BLOCK_SIZE = 16
SLOTS = 9
LONGEST = 512


class AttentionInputs:
    """A cache of random keys and values, with NaN wherever there is no token, and one step over it."""

    def __init__(
        self,
        spans,
        *,
        heads=6,
        kv_heads=2,
        head_dim=16,
        window=None,
        cap=None,
        dtype=torch.float32,
        device=CPU,
    ):
        generator = torch.Generator().manual_seed(7)
        self.device = device
        self.shape = msgspec.structs.replace(
            SHAPE,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=1,
            windows=(window,),
            attention_cap=cap,
            attention_scale=head_dim**-0.5,
        )
        columns = LONGEST // BLOCK_SIZE
        blocks = sum(-(-(start + count) // BLOCK_SIZE) for start, count in spans) + 1
        free = torch.randperm(blocks, generator=generator).tolist()
        self.table = np.full((SLOTS, columns), -1, np.int32)
        self.cache = KVCache(self.shape, blocks=(blocks,), block_size=BLOCK_SIZE, dtype=dtype, device=device)
        for tensor in (self.cache.keys[0], self.cache.values[0]):
            tensor.fill_(float("nan"))
        slots, positions, places = [], [], []
        for row, (start, count) in enumerate(spans):
            slot = (5 * row + 3) % SLOTS
            slots.append(slot)
            end = start + count
            used = [free.pop() for _ in range(-(-end // BLOCK_SIZE))]
            self.table[slot, : len(used)] = used
            for position in range(start):
                where = used[position // BLOCK_SIZE], position % BLOCK_SIZE
                for tensor in (self.cache.keys[0], self.cache.values[0]):
                    tensor[where] = torch.randn(kv_heads, head_dim, generator=generator).to(device, dtype)
            positions += range(start, end)
            places += [used[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
            if window is not None:
                self.table[slot, : max(0, start - window + 1) // BLOCK_SIZE] = -1
        counts = [count for _, count in spans]
        self.inputs = Inputs(
            token_ids=torch.zeros(len(positions), dtype=torch.int32, device=device),
            positions=torch.tensor(positions, dtype=torch.int32, device=device),
            slot_mapping=(torch.tensor(places, dtype=torch.int32, device=device),),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            sequence_lengths=np.array([start + count for start, count in spans], np.int32),
            slots=np.array(slots, np.int32),
            sample_tokens=(np.cumsum(counts) - 1).astype(np.int32),
            tables=(self.table,),
            decodes=next((row for row, count in enumerate(counts) if count > 1), len(counts)),
        )
        tokens = len(positions)
        # As a model passes them: views of one tensor, with gaps between the tokens.
        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
        qkv = qkv.to(device, dtype)
        self.query, self.key, self.value = qkv.split((heads, kv_heads, kv_heads), 1)

    def rows(self, *, padding=0):
        """Return the step as a GPU receives it, with `padding` empty decode rows added."""
        inputs = self.inputs

        def padded(array, fill):
            whole = np.concatenate((np.asarray(array), np.full(padding, fill, np.int32)))
            return torch.from_numpy(whole).to(self.device)

        return Rows(
            token_ids=padded(inputs.token_ids.cpu(), 0),
            positions=padded(inputs.positions.cpu(), 0),
            cache_slots=tuple(padded(one.cpu(), -1) for one in inputs.slot_mapping),
            starts=padded(inputs.query_starts, inputs.query_starts[-1]),
            lengths=padded(inputs.sequence_lengths, 0),
            table_rows=padded(inputs.slots, 0),
            tables=tuple(torch.from_numpy(table).to(self.device) for table in inputs.tables),
            decodes=inputs.decodes + padding,
        )

    def actual(self, *, longest=LONGEST):
        attention = DeviceAttention(self.rows(), self.cache, self.shape, longest)
        return attention(0, self.query, self.key, self.value)

    def expected(self):
        cache = KVCache(
            self.shape,
            blocks=self.cache.blocks,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            device=self.device,
        )
        for from_cache, actual in ((cache.keys, self.cache.keys), (cache.values, self.cache.values)):
            # It needs blocks zeroed when a step begins them; the GPU kernels never read unwritten tokens.
            from_cache[0].copy_(actual[0].nan_to_num(0))
        return PagedAttention(self.inputs, cache, self.shape)(
            0, *(one.float() for one in (self.query, self.key, self.value))
        )


MIXED = [(0, 1), (15, 1), (140, 1), (0, 5), (3, 20), (30, 2), (64, 1)]
HEADS = [
    (2, 2, 16, None, None),
    (6, 2, 16, 21, None),
    (3, 1, 64, None, 1.5),
    (14, 2, 64, 33, 4.0),
    (5, 1, 96, None, None),
    (2, 1, 80, 130, None),
    (4, 1, 256, 21, 2.0),
]
