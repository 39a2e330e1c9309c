"""Numbers of a checkpoint are converted without torch as torch converts them."""

import numpy as np
import pytest
import torch

from fairlead.engine.models.numbers import cpu_computes_bfloat16, narrow, rounded, widen

STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_array(tensor):
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_as_torch_rounds_them(stored, dtype):
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(1))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-45])
    numbers = torch.cat([bits.to(torch.int32).view(torch.float32), special]).to(STORED[stored])
    expected = numbers.to(getattr(torch, dtype)).float().numpy()
    actual = widen(narrow(as_array(numbers), stored, dtype)).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


def test_number_is_copied_only_if_it_must_be_converted_or_aligned():
    data = np.arange(9, dtype=np.uint8)
    aligned, shifted = data[:8].view(np.float32), np.frombuffer(data, np.float32, 2, 1)
    assert np.shares_memory(narrow(aligned, "F32", "float32"), aligned)
    copied = narrow(shifted, "F32", "float32")
    assert copied.flags.aligned
    assert copied.tobytes() == shifted.tobytes()


def test_scale_is_rounded_to_the_type_of_the_model():
    assert rounded(33.9411, "bfloat16") == torch.tensor(33.9411, dtype=torch.bfloat16).item()


def test_bfloat16_of_the_processor_is_what_torch_finds():
    found = torch.cpu.get_capabilities()
    names = ("amx_bf16", "avx512_bf16", "bf16", "arm_bf16")
    assert cpu_computes_bfloat16() == any(found.get(name) for name in names)
