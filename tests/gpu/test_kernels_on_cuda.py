"""Fairlead's kernels, compiled and run on a GPU, compared with torch on the same GPU."""

import numpy as np
import pytest
import torch

from engine.attention_inputs import HEADS, MIXED, AttentionInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LONG = [(1, 1), (400, 1), (511, 1), (0, 500), (200, 300), (17, 129)]
LARGE = [(32, 8, 128, None, None), (32, 32, 80, 300, None), (16, 8, 256, 250, 30.0), (28, 4, 128, None, None)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("longest", [128, 512, 100_000])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "cap"), HEADS + LARGE)
def test_attention_equals_the_portable_attention(dtype, longest, heads, kv_heads, head_dim, window, cap):
    for spans in (MIXED, LONG):
        inputs = AttentionInputs(
            spans,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
            cap=cap,
            dtype=dtype,
            device=CUDA,
        )
        found, expected = inputs.actual(longest=longest), inputs.expected()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("vocabulary", [5, 5000, 151_936])
def test_thresholds_accept_the_same_tokens_as_sorting(vocabulary):
    from fairlead.engine.device_sampling import thresholds
    from fairlead.engine.sampling import torch_sampler as draws

    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(64, vocabulary, generator=generator) * 3).to(CUDA)
    scores -= scores.max(-1, keepdim=True).values
    rng = np.random.default_rng(0)
    top_k = rng.choice([1, 3, min(40, vocabulary), vocabulary], 64)
    top_p = rng.choice([1.0, 0.9, 0.5, 0.03], 64)
    least = torch.full((64,), -torch.inf, device=CUDA)
    expected = draws._top(scores, least.clone(), top_k, top_p)
    found = thresholds(scores, least, top_k, top_p)
    # `exp` differs in its last bit between the two, which can move the `top_p` cutoff by one token.
    differing = ((scores >= expected[:, None]) != (scores >= found[:, None])).sum(-1)
    assert differing.max() <= 1
    assert (differing > 0).sum() <= 3


@pytest.mark.parametrize("size", [64, 5000, 14336])
def test_rounding_to_8_bits_matches_torch(size):
    from fairlead.engine.models.quantization.float8 import _round, _scales
    from fairlead.engine.models.quantization.float8_kernels import launch_round_rows

    torch.manual_seed(0)
    x = (torch.randn(9, size, device=CUDA) * torch.logspace(-3, 3, 9, device=CUDA)[:, None]).bfloat16()
    x[4] = 0
    rounded, scales = launch_round_rows(x, 448.0, 1e-12)
    torch.testing.assert_close(scales, _scales(x))
    torch.testing.assert_close(rounded.float(), _round(x, scales).float(), rtol=0.13, atol=0)
