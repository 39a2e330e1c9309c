"""Token masks and the thresholds of top_k and top_p on a GPU, without a sort or waiting for the device."""

import numpy as np
import torch
from torch import Tensor

from fairlead.engine import device_kernels as kernels
from fairlead.engine.arrays import upload

_TILE = 4096


def thresholds(scores: Tensor, least: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Return `least` [R], raised to the least score that each row of `scores` [R, V] accepts: float32 [R].

    `scores` are float32 and not above 0. `top_k` 0 and `top_p` 1 are off; top_p applies to what top_k and
    `least` leave.
    """
    assert scores.dtype == torch.float32
    scores = scores.contiguous()
    found = torch.empty_like(least)
    kernels.find_thresholds[(len(scores),)](
        scores,
        scores.stride(0),
        least,
        upload(top_k.astype(np.int64), scores.device),
        upload(top_p.astype(np.float64), scores.device),
        found,
        scores.shape[1],
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return found


def without_forbidden(logits: Tensor, bits: Tensor, mask_of: Tensor) -> Tensor:
    """Return `logits` [S, V], float32, with −inf where a row's mask has no bit.

    `bits` [M, ⌈V / 32⌉] and `mask_of` [S], both int32; a negative index: the row has no mask.
    """
    logits = logits.contiguous()
    allowed = torch.empty_like(logits)
    rows, vocabulary = logits.shape
    kernels.apply_token_masks[(rows, -(-vocabulary // _TILE))](
        logits,
        bits,
        bits.stride(0),
        mask_of,
        allowed,
        vocabulary,
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return allowed


def warm(vocabulary: int, device: torch.device) -> None:
    """Compile the kernels of `thresholds` and `without_forbidden`."""
    least = torch.full((1,), float("-inf"), device=device)
    thresholds(torch.zeros((1, vocabulary), device=device), least, np.ones(1), np.full(1, 0.5))
    words = torch.zeros((1, -(-vocabulary // 32)), dtype=torch.int32, device=device)
    without_forbidden(torch.zeros((1, vocabulary), device=device), words, words[0, :1])
