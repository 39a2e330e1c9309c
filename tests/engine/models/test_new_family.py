"""A new family like Llama is one declaration and one entry in the registry: every backend then runs it.

The family here has Llama's layers with normalized queries and keys, GELU, and fused matrices. Its oracle is
written out in plain torch, without any of our layers.
"""

import json
from functools import partial

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from engine.interpreted import interpreted, note_launches
from engine.models.rank_threads import on_ranks
from engine.models.test_agreement import record_logits
from engine.models.tiny import SIZES, generate, load, prompt_of
from engine.test_cpu_step import relative_error
from engine.test_device_forward import CPU, loaded_of, texts_of
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.engine import device_layers
from fairlead.engine.cpu_step import CpuStep, refusal
from fairlead.engine.device_forward import DeviceForward
from fairlead.engine.forward import TorchForward
from fairlead.engine.models.loader import load_model, read_source
from fairlead.engine.models.network import Network
from fairlead.engine.models.weights import Weights
from fairlead.language.checkpoint.architecture import ArchitectureSpec, TensorNames, read_architecture
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.checkpoint.registry import ARCHITECTURES
from fairlead.language.checkpoint.rope import Rope

HEADS, KV_HEADS, D = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["head_dim"]
C, INNER = SIZES["hidden_size"], SIZES["intermediate_size"]
QKV = [HEADS * D, KV_HEADS * D, KV_HEADS * D]


def read_new(config):
    return read_architecture(
        config,
        query_key_norm="head",
        activation="gelu_tanh",
        names=TensorNames(
            prefixes=(("transformer.", "model."),),
            **dict.fromkeys(("query", "key", "value"), "attention.qkv"),
            **dict.fromkeys(("gate", "up"), "mlp.gate_up"),
        ),
    )


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(3)

    def normal(*size, scale=0.2, mean=0.0):
        return torch.randn(size, generator=generator) * scale + mean

    made = {
        "transformer.embed_tokens.weight": normal(SIZES["vocab_size"], C),
        "transformer.norm.weight": normal(C, mean=1),
        "lm_head.weight": normal(SIZES["vocab_size"], C),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        field_names = {
            "input_layernorm": normal(C, mean=1),
            "post_attention_layernorm": normal(C, mean=1),
            "attention.qkv": normal(sum(QKV), C),
            "self_attn.q_norm": normal(D, mean=1),
            "self_attn.k_norm": normal(D, mean=1),
            "self_attn.o_proj": normal(C, HEADS * D),
            "mlp.gate_up": normal(2 * INNER, C),
            "mlp.down_proj": normal(C, INNER),
        }
        made |= {f"transformer.layers.{layer}.{name}.weight": value for name, value in field_names.items()}
    return made


@pytest.fixture
def directory(tmp_path, tensors, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "NewForCausalLM", read_new)
    config = {**SIZES, "architectures": ["NewForCausalLM"], "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def oracle_logits(tensors, token_ids):
    """Return the logits after each of `token_ids`, in float64."""
    weights = {name.removesuffix(".weight"): value.double() for name, value in tensors.items()}
    length = len(token_ids)

    def normalized(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    exponents = torch.arange(0, D, 2, dtype=torch.float64) / D
    angles = torch.arange(length)[:, None] / 10_000.0**exponents

    def rotated(heads):
        first, second = heads[..., : D // 2], heads[..., D // 2 :]
        cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    x = weights["transformer.embed_tokens"][token_ids]
    future = torch.ones(length, length).triu(1).bool()
    for layer in range(SIZES["num_hidden_layers"]):

        def weight(name, layer=layer):
            return weights[f"transformer.layers.{layer}.{name}"]

        qkv = normalized(x, weight("input_layernorm")) @ weight("attention.qkv").T
        query, key, value = (field_name.view(length, -1, D) for field_name in qkv.split(QKV, -1))
        query = rotated(normalized(query, weight("self_attn.q_norm")))
        key = rotated(normalized(key, weight("self_attn.k_norm"))).repeat_interleave(HEADS // KV_HEADS, 1)
        value = value.repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / D**0.5
        shares = scores.masked_fill(future, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, value).reshape(length, -1)
        x = x + attended @ weight("self_attn.o_proj").T
        gate, up = (normalized(x, weight("post_attention_layernorm")) @ weight("mlp.gate_up").T).chunk(2, -1)
        x = x + (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ weight("mlp.down_proj").T
    return normalized(x, weights["transformer.norm"]) @ weights["lm_head"].T


@pytest.mark.parametrize(("compiled", "forward"), [(True, CpuStep), (False, TorchForward)])
def test_declared_family_matches_an_oracle_in_torch_and_in_the_cpu_kernel(
    directory, tensors, monkeypatch, compiled, forward
):
    loaded = load(directory, compiled=compiled, kv_cache_bytes=1 << 20)
    assert type(loaded.runner.forward) is forward
    recorded = record_logits(loaded, monkeypatch)
    prompt = prompt_of(40)
    [output] = generate(loaded, [prompt], Sampling(max_tokens=20, temperature=0))
    assert len(set(output)) > 5
    expected = oracle_logits(tensors, prompt + output)[len(prompt) - 1 : -1]
    assert (torch.cat(recorded) - expected).abs().max() / expected.abs().max() <= 1e-4


def test_fused_matrices_of_a_declared_family_are_divided_part_by_part(directory, monkeypatch):
    sampling = Sampling(max_tokens=20, temperature=0)
    one = load(directory, compiled=False, kv_cache_bytes=1 << 20)
    expected = record_logits(one, monkeypatch)
    texts = generate(one, [prompt_of(40)], sampling)
    with on_ranks(directory, kv_cache_bytes=1 << 20) as ranks:
        actual = record_logits(ranks.loaded[0], monkeypatch)
        assert texts == generate(ranks.loaded[0], [prompt_of(40)], sampling)
    assert relative_error(torch.cat(actual), torch.cat(expected)) <= 1e-4


@interpreted
def test_declared_family_runs_in_the_gpu_layers(directory, monkeypatch):
    launches = note_launches(monkeypatch)
    model = load_model(directory, device=CPU, dtype="float32").model
    expected = texts_of(loaded_of(model, TorchForward))
    assert expected == texts_of(loaded_of(model, DeviceForward))
    assert {"rotate_and_store", "activate_gate"} <= {name for name, *_ in launches}


class FutureSpec(ArchitectureSpec, frozen=True, kw_only=True):
    """A description with a field that no backend supports."""

    residual_scale: float = 1.0


UNKNOWN_VALUES = {
    "activation": "relu",
    "query_key_norm": "all heads",
    "norm_placement": "after",
    "norm_offset": 0.5,
    "tied": None,
    "residual_scale": 0.7,
}


def changed(spec, **values):
    return FutureSpec(**{**msgspec.structs.asdict(spec), **values})


def test_field_that_a_backend_does_not_know_may_have_its_default(directory):
    spec = read_source(directory, device=CPU).spec
    assert refusal(changed(spec), "float32") is None
    assert refusal(changed(spec, residual_scale=1.0), "float32") is None


@pytest.mark.parametrize("field", UNKNOWN_VALUES)
def test_value_that_a_backend_does_not_know_is_refused(directory, field):
    spec = changed(read_source(directory, device=CPU).spec, **{field: UNKNOWN_VALUES[field]})
    reason = f"{field} {UNKNOWN_VALUES[field]!r} is not supported"
    assert refusal(spec, "float32") == reason
    for load_backend in (
        lambda weights: Network(spec, weights),
        lambda weights: CpuStep.load(spec, weights, threads=1, max_batched_tokens=16),
    ):
        with (
            Weights(open_checkpoint(directory), dtype=torch.float32, device=CPU) as weights,
            pytest.raises(LoadFailed, match=f"cannot run this model: {reason}"),
        ):
            load_backend(weights)


@pytest.mark.parametrize("field", UNKNOWN_VALUES)
def test_gpu_layers_leave_a_model_with_an_unknown_value_to_torch(directory, field):
    model = load_model(directory, device=CPU, dtype="float32").model
    assert device_layers.refusal(model) is None
    model.shape = changed(model.shape, **{field: UNKNOWN_VALUES[field]})
    assert device_layers.refusal(model) == f"{field} {UNKNOWN_VALUES[field]!r} is not supported"


def test_unknown_kind_of_rotary_embedding_is_refused(directory):
    spec = read_source(directory, device=CPU).spec
    spec = msgspec.structs.replace(spec, ropes=(Rope(theta=1e4, kind="spiral"),) * spec.layers)
    for load_one in (Network, partial(CpuStep.load, threads=1, max_batched_tokens=16)):
        with (
            Weights(open_checkpoint(directory), dtype=torch.float32, device=CPU) as weights,
            pytest.raises(LoadFailed, match="'spiral' are not supported"),
        ):
            load_one(spec, weights)


def test_torch_runs_what_the_cpu_kernel_refuses_and_the_log_has_the_reason(directory, monkeypatch, caplog):
    monkeypatch.setattr("fairlead.engine.cpu_step.SUPPORTED", {})
    loaded = load(directory, kv_cache_bytes=1 << 20)
    assert type(loaded.runner.forward) is TorchForward
    assert "torch runs the model, because in the CPU kernel vocab_size 320 is not supported" in caplog.text
