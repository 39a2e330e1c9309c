"""Linear layers of 8-bit floats: accuracy, memory, and where they are refused."""

from typing import get_args, get_type_hints

import msgspec
import pytest
import torch
import transformers

from engine.interpreted import interpreted
from engine.models.tiny import SIZES, save
from fairlead.base.config.models import ModelConfig
from fairlead.base.errors import LoadFailed
from fairlead.base.messages import WorkerSpec
from fairlead.engine.loading import load_runner
from fairlead.engine.models.loader import read_source
from fairlead.engine.models.quantization import FORMATS
from fairlead.engine.models.quantization.float8 import Float8, Float8Linear, round_rows_to_float8
from fairlead.engine.models.quantization.float8_kernels import launch_round_rows
from fairlead.engine.models.quantization.none import UnquantizedLinear

CPU = torch.device("cpu")


def linear_of(weight, bias=None):
    return Float8().linear(Float8().pack(weight), weight.shape[1], bias)


def test_product_error_is_below_three_percent_for_rows_of_any_magnitude():
    torch.manual_seed(0)
    weight = (torch.randn(96, 64) * torch.logspace(-4, 3, 96)[:, None]).bfloat16()
    x = (torch.randn(7, 64) * torch.logspace(-3, 3, 7)[:, None]).bfloat16()
    layer = linear_of(weight)
    expected = x.float() @ weight.float().T
    sizes = x.float().norm(dim=1)[:, None] * weight.float().norm(dim=1)
    assert 0 < ((layer(x).float() - expected).abs() / sizes).max() < 0.03
    assert layer.nbytes == 96 * 64 + 96 * 4
    assert layer(x[:0]).shape == (0, 96)


def test_bias_is_added_unrounded():
    torch.manual_seed(0)
    weight, x, bias = (torch.randn(*size).bfloat16() for size in ((32, 64), (3, 64), (32,)))
    assert torch.equal(linear_of(weight)(x) + bias, linear_of(weight, bias)(x))


def test_zeros_and_largest_numbers_stay_finite_and_nan_stays_in_its_row():
    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    x[1] = torch.finfo(torch.bfloat16).max
    x[2] = float("nan")
    x[3, 5] = 1
    rounded, scales = round_rows_to_float8(x)
    found = rounded.float() * scales
    assert not found[0].any()
    assert found[[0, 1, 3]].isfinite().all()
    assert found[2].isnan().all()
    assert pytest.approx(found[3, 5].item(), rel=0.01) == 1


@interpreted
def test_kernel_rounds_like_torch():
    torch.manual_seed(1)
    x = torch.randn(3, 5000) * torch.tensor([[1e-5], [1], [300]])
    x[0] = 0
    expected, expected_scales = round_rows_to_float8(x)
    rounded, scales = launch_round_rows(x, 448.0, 1e-12)
    torch.testing.assert_close(scales, expected_scales)
    # The interpreter truncates instead of rounding and drops a carry into the exponent: a few are far off.
    close = torch.isclose(rounded.float(), expected.float(), rtol=0.13, atol=0.01)
    assert close.float().mean() > 0.97


def test_matrices_of_unsupported_sizes_are_not_quantized():
    assert not Float8().suits(24, 32)
    assert Float8().suits(32, 48)


@pytest.mark.parametrize("kind", [transformers.LlamaConfig, transformers.Qwen3MoeConfig])
def test_quantized_model_takes_less_memory_and_keeps_its_head_and_router_exact(tmp_path, kind):
    torch.manual_seed(0)
    expert_options = {"moe_intermediate_size": 32, "num_experts": 16} if "Moe" in kind.__name__ else {}
    save(kind(**SIZES, **expert_options), tmp_path)
    source = read_source(tmp_path, device=CPU, dtype="bfloat16")
    exact = source.load(CPU, lambda _: None)
    narrowed = msgspec.structs.replace(source, quantization=Float8()).load(CPU, lambda _: None)
    assert narrowed.weight_bytes < 0.8 * exact.weight_bytes
    assert type(exact.model.head) is type(narrowed.model.head) is UnquantizedLinear
    assert type(narrowed.model.layers[0].attention.qkv) is Float8Linear
    if expert_options:
        assert type(narrowed.model.layers[0].mlp.router) is UnquantizedLinear


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [("fp8", "needs a GPU that multiplies 8-bit floats"), ("fp7", "not supported")],
)
def test_unsupported_quantization_is_refused_with_the_reason(tmp_path, quantization, reason):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    spec = WorkerSpec(path=str(tmp_path), device="cpu", quantization=quantization)
    with pytest.raises(LoadFailed, match=reason):
        load_runner(spec, lambda _fraction, _stage: None)


def test_every_quantization_can_be_configured_and_no_other():
    named, no_quantization = get_args(get_type_hints(ModelConfig)["quantization"])
    assert no_quantization is type(None)
    assert {None, *get_args(named)} == set(FORMATS)
