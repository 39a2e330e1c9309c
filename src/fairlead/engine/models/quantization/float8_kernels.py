"""Rounding to 8-bit floats row by row, as a Triton kernel: one pass instead of five."""

# ruff: noqa: ANN001, ANN201, N803  a kernel's arguments are pointers and compile-time constants
# mypy: ignore-errors

import torch
import triton
import triton.language as tl


@triton.jit
def round_rows(x, rounded, scales, largest, least, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Program t: scale row t of `x` [T, SIZE] so that its largest magnitude is `largest`, and round it."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([TILE], tl.float32)
    for at in range(0, SIZE, TILE):
        i = at + tl.arange(0, TILE)
        value = tl.load(x + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.maximum(tl.max(peak, 0) / largest, least)
    tl.store(scales + row, scale)
    for at in range(0, SIZE, TILE):
        i = at + tl.arange(0, TILE)
        value = tl.load(x + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32) / scale
        value = tl.clamp(value, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        tl.store(rounded + row * SIZE + i, value.to(rounded.dtype.element_ty), mask=i < SIZE)


def launch_round_rows(x, largest: float, least: float):
    """Round each row of `x` [T, C], contiguous: e4m3 [T, C] and its scales, float32 [T, 1]."""
    rounded = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    size = x.shape[1]
    tile = min(4096, 1 << (size - 1).bit_length())
    round_rows[(len(x),)](
        x, rounded, scales, largest, least, SIZE=size, TILE=tile, num_warps=8, enable_fp_fusion=True
    )
    return rounded, scales
