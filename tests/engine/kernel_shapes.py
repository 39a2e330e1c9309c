"""Launches every kernel as the engine does, for common model shapes, on tensors without memory."""

from unittest import mock

import msgspec
import numpy as np
import torch

from engine.models.tiny import SHAPE
from fairlead.engine import device_sampling
from fairlead.engine.cache import KVCache
from fairlead.engine.device_inputs import DeviceInputs
from fairlead.engine.device_layers import DeviceLayers
from fairlead.engine.models.layers import HeadRMSNorm, OffsetRMSNorm, RMSNorm
from fairlead.engine.models.quantization import float8_kernels
from fairlead.engine.paged_attention import DeviceAttention, Rows

META = torch.device("meta")
# heads, KV heads, channels, window, cap, dtype
SHAPES = [
    (32, 8, 128, None, None, torch.bfloat16),
    (14, 2, 64, None, None, torch.float16),
    (9, 3, 64, 512, None, torch.bfloat16),
    (32, 32, 80, None, None, torch.bfloat16),
    (32, 8, 96, 2048, None, torch.bfloat16),
    (8, 4, 256, 1024, 50.0, torch.bfloat16),
    (32, 8, 128, None, None, torch.float32),
    (4, 1, 256, 512, None, torch.float32),
]


def launch_everything(shapes=SHAPES):
    for heads, kv_heads, head_dim, window, cap, dtype in shapes:
        shape = msgspec.structs.replace(
            SHAPE,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=1,
            windows=(window,),
            attention_cap=cap,
        )
        launch_attention(shape, dtype)
        launch_layers(shape, dtype)
    for groups in (1, 2):
        launch_unpack(groups)
    float8_kernels.launch_round_rows(torch.empty((5, 14336), dtype=torch.bfloat16, device=META), 448.0, 1e-12)
    with mock.patch.object(
        device_sampling, "upload", lambda array, device: torch.from_numpy(array).to(device)
    ):
        device_sampling.thresholds(
            torch.empty((4, 128_256), device=META), torch.empty(4, device=META), np.ones(4), np.ones(4)
        )
    bits, mask_of = (torch.empty(size, dtype=torch.int32, device=META) for size in ((3, 4008), (4,)))
    device_sampling.without_forbidden(torch.empty((4, 128_256), device=META), bits, mask_of)


def launch_unpack(groups):
    DeviceInputs(
        words=5000, tokens=512, rows=64, slots=64, columns=100, groups=groups, vocab_size=1000, device=META
    ).unpack(48, 48, 48)


def launch_layers(shape, dtype):
    """Launch the kernels between a layer's matrix products, with all norms and with few."""
    heads, kv_heads, head_dim, size = shape.heads, shape.kv_heads, shape.head_dim, 256 * shape.heads

    def floats(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device=META)

    layers = object.__new__(DeviceLayers)
    layers.model = mock.Mock()
    layers.model.embedding.table = floats(100, size)
    layers._ones, layers._head_dim = floats(size), head_dim
    layers._fixed = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "CHANNELS": 1 << (head_dim - 1).bit_length(),
    }
    plain, offset = RMSNorm(floats(size), 1e-5), OffsetRMSNorm(floats(size), 1e-6)
    stream, scales = floats(7, size, dtype=torch.float32), floats(7, size)
    for norms in ((None, None, plain), (scales, None, plain), (scales, offset, offset), (scales, None, None)):
        layers._add(stream, *norms)
    attention = mock.Mock(cache=KVCache(shape, blocks=(9,), block_size=16, dtype=dtype, device=META))
    attention.cache_slots.return_value = torch.empty(7, dtype=torch.int32, device=META)
    angles = floats(7, 1, head_dim), floats(7, 1, head_dim)
    for norm in (None, HeadRMSNorm(floats(heads + kv_heads, head_dim), 1e-6)):
        projections = mock.Mock(head_norm=norm)
        projections.qkv.return_value = floats(7, (heads + 2 * kv_heads) * head_dim)
        layers._query(0, projections, scales, angles, attention)
    for uses_gelu in (False, True):
        mlp = mock.Mock(uses_gelu=uses_gelu)
        mlp.gate_up.return_value = floats(7, 2 * 14336)
        layers._mlp(mlp, scales)


def launch_attention(shape, dtype):
    cache = KVCache(shape, blocks=(64,), block_size=16, dtype=dtype, device=META)
    tokens, rows, decodes = 200, 20, 16

    def ints(*size):
        return torch.empty(size, dtype=torch.int32, device=META)

    step = Rows(
        token_ids=ints(tokens),
        positions=ints(tokens),
        cache_slots=(ints(tokens),),
        starts=ints(rows + 1),
        lengths=ints(rows),
        table_rows=ints(rows),
        tables=(ints(256, 512),),
        decodes=decodes,
    )
    heads = shape.heads + 2 * shape.kv_heads
    qkv = torch.empty((tokens, heads, shape.head_dim), dtype=dtype, device=META)
    parts = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    for longest in (64, 100_000):  # not split, and split
        DeviceAttention(step, cache, shape, longest)(0, *parts)
