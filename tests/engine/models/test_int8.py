"""8-bit weights on a CPU: the compiled step matches torch on the same integers, and stays near float32."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.tiny import SIZES, load, save
from engine.test_cpu_step import CONFIGS, Recorder, last_logits, relative_error
from fairlead.base.errors import LoadFailed
from fairlead.engine.cpu_step import CpuStep
from fairlead.engine.forward import TorchForward
from fairlead.engine.models.loader import read_source
from fairlead.engine.models.quantization.int8 import Int8Linear, round_rows
from fairlead.engine.models.quantization.none import UnquantizedLinear


def recorded(directory, **options):
    """Return the logits after each of the prompts, and the forward that computed them."""
    loaded = load(directory, kv_cache_bytes=4 << 20, **options)
    forward = loaded.runner.forward
    loaded.runner.forward = Recorder(forward)
    return last_logits(loaded, loaded.runner.forward), forward


@pytest.fixture(scope="module", params=list(CONFIGS))
def directory(request, tmp_path_factory):
    """A model with its embedding and head rounded in advance, because torch does not round them."""
    path = tmp_path_factory.mktemp("model")
    save(CONFIGS[request.param], path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
        rounded, scales = round_rows(tensors[name])
        tensors[name] = rounded * scales[:, None]
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_logits_match_torch_on_the_same_integers(directory):
    expected, plain = recorded(directory, quantization="int8", compiled=False)
    actual, forward = recorded(directory, quantization="int8")
    assert (TorchForward, CpuStep) == (type(plain), type(forward))
    assert relative_error(actual, expected) <= 1e-4


def relative_errors(directory, *load_options):
    """Return, for each set of load options, the relative error by norm from the logits in float32."""
    exact, _ = recorded(directory)
    return [
        float((recorded(directory, **load_option)[0] - exact).norm() / exact.norm())
        for load_option in load_options
    ]


def test_error_is_at_most_four_times_that_of_bfloat16(directory):
    """Holds although the sharp attention of these models magnifies small differences."""
    plain, *narrow = relative_errors(
        directory,
        {"dtype": "bfloat16"},
        *({"quantization": "int8", "dtype": dtype} for dtype in ("float32", "bfloat16")),
    )
    assert plain < min(narrow)
    assert max(narrow) < 4 * plain


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma3"])  # its attention stays sharp
def test_logits_are_within_five_percent_for_weights_of_usual_size(name, tmp_path):
    config = copy.deepcopy(CONFIGS[name])
    config.initializer_range = 0.05
    save(config, tmp_path)
    load_options = ({"dtype": dtype, "quantization": "int8"} for dtype in ("float32", "bfloat16"))
    assert all(1e-4 < error < 0.05 for error in relative_errors(tmp_path, *load_options))


def test_product_uses_rounded_weights_times_their_scales():
    torch.manual_seed(0)
    weight = torch.randn(96, 64) * torch.logspace(-3, 1, 96)[:, None]
    weight[7] = 0
    x, bias = torch.randn(5, 64), torch.randn(96)
    rounded, scales = round_rows(weight)
    assert 127 == rounded.abs().amax(1)[8:].min() == rounded.abs().max()
    layer = Int8Linear(rounded, scales, bias)
    torch.testing.assert_close(layer(x), x @ (rounded * scales[:, None]).T + bias, rtol=1e-4, atol=1e-4)
    assert (weight - rounded * scales[:, None]).abs().le(scales[:, None] * 0.5001).all()
    assert layer(x[:0]).shape == (0, 96)
    assert torch.bfloat16 == layer(x.bfloat16()).dtype
    assert layer.nbytes == 96 * 64 + 96 * 4


def test_experts_run_in_torch_with_an_unquantized_router(tmp_path):
    expert_options = {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2}
    save(transformers.Qwen3MoeConfig(**SIZES, **expert_options), tmp_path)
    exact, _ = recorded(tmp_path, dtype="bfloat16")
    actual, forward = recorded(tmp_path, dtype="bfloat16", quantization="int8")
    assert type(forward.model.layers[0].attention.qkv) is Int8Linear
    router, head = forward.model.layers[0].mlp.router, forward.model.head
    assert type(router) is type(head) is UnquantizedLinear
    assert 0 < (actual - exact).norm() / exact.norm() < 0.2  # rounding may choose another expert


@pytest.mark.parametrize("compiled", [False, True])
def test_quantized_model_reports_half_the_weight_bytes(tmp_path, compiled):
    sizes = {**SIZES, "hidden_size": 240, "intermediate_size": 512}
    save(transformers.LlamaConfig(**sizes), tmp_path)
    plain, narrow = (
        load(tmp_path, dtype="bfloat16", quantization=quantization, compiled=compiled).weight_bytes
        for quantization in (None, "int8")
    )
    assert 0.5 * plain < narrow < 0.6 * plain


def test_family_without_a_native_implementation_is_refused(tmp_path):
    square = {name: scalar for name, scalar in SIZES.items() if name != "head_dim"}
    save(transformers.Olmo2Config(**square), tmp_path)
    with pytest.raises(LoadFailed, match="quantization int8 needs one of our own model families"):
        load(tmp_path, quantization="int8")


def test_int8_on_a_gpu_is_refused(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    with pytest.raises(LoadFailed, match="quantization int8 needs a CPU, not cuda:1"):
        read_source(tmp_path, device=torch.device("cuda:1"), quantization="int8")
