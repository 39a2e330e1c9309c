"""`config.json` as transformers before and since version 5 writes it, and with invalid values."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.config import ConfigError
from fairlead.base.errors import LoadFailed
from fairlead.engine.models.frequencies import inverse_frequencies
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.folder import read_max_model_len
from fairlead.language.checkpoint.positions import DEFAULT_POSITIONS
from fairlead.language.checkpoint.registry import ARCHITECTURES, read_built_in
from fairlead.language.checkpoint.rope import Rope

PATH = Path("model") / "config.json"
VALID = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1000,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}
LLAMA3_ROPE = Rope(theta=5e5, kind="llama3", factor=8.0, original_positions=100, low=1.0, high=4.0)


def read_config(family="Llama", **values):
    return ARCHITECTURES[f"{family}ForCausalLM"](CheckpointConfig(PATH, VALID | values))


def failure(family="Llama", **values):
    with pytest.raises(LoadFailed) as caught:
        read_config(family, **values)
    return caught.value.message


def test_head_size_follows_from_the_hidden_size_unless_given():
    assert (read_config().head_dim, read_config().kv_heads) == (16, 4)
    assert (read_config(head_dim=40).head_dim, read_config(num_key_value_heads=2).kv_heads) == (40, 2)
    assert read_config("Qwen3").head_dim == 128


def test_rope_is_read_from_the_keys_of_transformers_4():
    assert (
        read_config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}).ropes
        == (LLAMA3_ROPE,) * 4
    )
    assert read_config(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}).ropes == (LLAMA3_ROPE,) * 4


def test_rope_is_read_from_the_keys_of_transformers_5():
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    assert read_config(rope_parameters=parameters, rope_theta=None).ropes == (LLAMA3_ROPE,) * 4


def test_rope_without_keys_is_the_default():
    assert (Rope(theta=10_000.0),) * 4 == read_config().ropes == read_config(rope_scaling=None).ropes
    assert (Rope(theta=1e6),) * 4 == read_config(rope_theta=1e6).ropes


def test_dynamic_rope_equals_the_default_within_the_trained_context():
    spec = read_config(rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert spec.for_context(spec.max_positions) == spec
    expected = inverse_frequencies(Rope(theta=10_000.0), 16)
    assert np.array_equal(expected, inverse_frequencies(spec.ropes[0], 16))


@pytest.mark.parametrize(("keys", "scale"), [({}, 1.1386), ({"attention_factor": 0.7}, 0.7)])
def test_yarn_scale_follows_from_factor_or_attention_factor(keys, scale):
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250, **keys}
    assert pytest.approx(scale, abs=1e-4) == read_config(rope_scaling=section).ropes[0].scale


@pytest.mark.parametrize(
    ("family", "values", "windows"),
    [
        ("Llama", {"sliding_window": 9}, [None] * 4),
        ("Mistral", {"sliding_window": 9}, [9] * 4),
        ("Mistral", {"sliding_window": None}, [None] * 4),
        ("Qwen2", {"sliding_window": 9, "max_window_layers": 1}, [None] * 4),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, [None, 9, 9, 9]),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 9}, [None] * 4),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 9, None, 9],
        ),
    ],
)
def test_windows_are_read_from_the_keys_of_each_family(family, values, windows):
    assert tuple(windows) == read_config(family, **values).windows


GLOBAL_ROPE, LOCAL_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, {"rope_theta": 2e4}


@pytest.mark.parametrize(
    ("keys", "ropes"),
    [
        ({}, (Rope(theta=1e6), Rope(theta=1e4))),
        ({"rope_theta": 5e5, "rope_local_base_freq": 2e4}, (Rope(theta=5e5), Rope(theta=2e4))),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            (Rope(theta=1e6, kind="linear", factor=8.0), Rope(theta=1e4)),
        ),
        (
            {"rope_parameters": {"full_attention": GLOBAL_ROPE, "sliding_attention": LOCAL_ROPE}},
            (Rope(theta=5e5, kind="linear", factor=8.0), Rope(theta=2e4)),
        ),
        (
            {"rope_parameters": {"full_attention": GLOBAL_ROPE}, "rope_scaling": None},
            (Rope(theta=5e5, kind="linear", factor=8.0), Rope(theta=1e4)),
        ),
    ],
)
def test_gemma_has_a_separate_rope_for_sliding_layers(keys, ropes):
    shape = read_config("Gemma3", **keys, sliding_window_pattern=2)
    assert shape.windows == (4096, None) * 2
    assert shape.ropes == ropes[::-1] * 2


def test_gemma_sliding_layers_come_from_layer_types_or_a_pattern():
    layers = {"num_hidden_layers": 7, "sliding_window": 9}
    assert read_config("Gemma3", **layers).windows == (9, 9, 9, 9, 9, None, 9)
    assert read_config("Gemma3", **layers, sliding_window_pattern=2).windows == (9, None, 9, None, 9, None, 9)
    kinds = ["full_attention"] + ["sliding_attention"] * 6
    shape = read_config("Gemma3", **layers, layer_types=kinds)
    assert shape.windows == (None, 9, 9, 9, 9, 9, 9)
    assert (shape.groups, shape.layer_groups) == ((None, 9), (0, 1, 1, 1, 1, 1, 1))


def test_gemma_has_its_own_defaults():
    shape = read_config("Gemma3")
    assert (shape.tied, shape.head_dim, shape.activation) == (True, 256, "gelu_tanh")
    assert (shape.attention_scale, shape.attention_cap, shape.logit_cap) == (256**-0.5, None, None)
    shape = read_config(
        "Gemma3", query_pre_attn_scalar=64, attn_logit_softcapping=50.0, final_logit_softcapping=30
    )
    assert (shape.attention_scale, shape.attention_cap, shape.logit_cap) == (0.125, 50, 30)


def test_gemma_text_config_may_be_a_nested_section():
    text = VALID | {"hidden_size": 32, "sliding_window": 5}
    assert read_config("Gemma3", hidden_size=32, sliding_window=5) == read_config("Gemma3", text_config=text)
    text["sliding_window"] = 0
    assert f"{PATH}: text_config.sliding_window: " in failure("Gemma3", text_config=text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_activation", "relu"),
        ("use_bidirectional_attention", True),
        ("query_pre_attn_scalar", 0),
        ("final_logit_softcapping", -30.0),
        ("attn_logit_softcapping", "high"),
        ("layer_types", ["sliding_attention"]),
        ("sliding_window_pattern", 0),
        ("rope_local_base_freq", 0),
    ],
)
def test_invalid_gemma_value_is_refused_with_file_and_key(key, value):
    assert f"{PATH}: {key}: " in failure("Gemma3", **{key: value})


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (True, True, True, True)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (False,) * 4),
    ],
)
def test_qwen3_moe_layers_with_experts_are_read_from_the_config(keys, layers):
    experts = read_config("Qwen3Moe", **MOE, **keys).experts
    assert msgspec.structs.astuple(experts) == (8, 2, 16, False, layers)


def test_number_of_experts_is_read_from_either_of_two_keys():
    for key in ("num_experts", "num_local_experts"):
        experts = read_config("Mixtral", **{key: 5, "num_experts_per_tok": 5}).experts
        assert msgspec.structs.astuple(experts) == (5, 5, VALID["intermediate_size"], True, (True,) * 4)


def test_qwen3_moe_has_a_window_in_all_layers_or_in_none():
    assert read_config("Qwen3Moe", **MOE, sliding_window=9).windows == (None,) * 4
    assert read_config("Qwen3Moe", **MOE, sliding_window=9, use_sliding_window=True).windows == (9,) * 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 0),
        ("num_experts", 10**7),
        ("num_experts", None),
        ("num_experts_per_tok", 9),
        ("num_experts_per_tok", None),
        ("moe_intermediate_size", None),
        ("norm_topk_prob", 1),
        ("mlp_only_layers", ["all"]),
        ("decoder_sparse_step", 0),
    ],
)
def test_invalid_mixture_of_experts_is_refused_with_file_and_key(key, value):
    reported_key = "num_local_experts" if (key, value) == ("num_experts", None) else key
    assert f"{PATH}: {reported_key}: " in failure("Qwen3Moe", **{**MOE, key: value})


def test_biases_are_optional_in_llama_and_fixed_in_qwen2():
    shape = read_config(attention_bias=True, mlp_bias=True)
    assert (shape.qkv_bias, shape.output_bias, shape.mlp_bias) == (True, True, True)
    shape = read_config("Qwen2")
    assert (shape.qkv_bias, shape.output_bias, shape.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 0),
        ("hidden_size", None),
        ("hidden_size", True),
        ("vocab_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", 1),
        ("hidden_act", "gelu"),
        ("rope_theta", -1),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", "gptq"),
        ("attention_bias", "yes"),
    ],
)
def test_invalid_value_is_refused_with_file_and_key(key, value):
    values = {key: value}
    if key == "partial_rotary_factor":
        values["rope_parameters"] = {"rope_type": "default"}
    assert f"{PATH}: {key}: " in failure(**values)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"rope_type": "longrope"}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [0.0] * 64}, "short_factor"),
        ({"rope_type": "spiral"}, "rope_type"),
        ({"rope_type": 3}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "8"}, "factor"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"full_attention": {"rope_type": "default"}, "rope_theta": []}, "rope_theta"),
    ],
)
def test_invalid_rope_is_refused_with_file_and_key(section, key):
    assert f"{PATH}: rope_parameters.{key}: " in failure(rope_parameters=section)


def test_architectures_must_be_a_list():
    with pytest.raises(LoadFailed, match="architectures"):
        read_built_in(CheckpointConfig(PATH, {"architectures": "LlamaForCausalLM"}))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_config_that_is_not_a_json_object_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(LoadFailed, match=r"config\.json"):
        CheckpointConfig.read(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    *VALID,
    "head_dim",
    "num_key_value_heads",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "text_config",
    "sliding_window_pattern",
    "final_logit_softcapping",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "mlp_only_layers",
]


@given(
    family=st.sampled_from(["Gemma3", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe"]),
    values=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3),
)
def test_any_values_make_a_shape_or_a_load_failure(family, values):
    try:
        shape = read_config(family, **values)
    except LoadFailed as error:
        assert str(PATH) in error.message  # noqa: PT017  either outcome is right
    else:
        assert len(shape.windows) == shape.layers


CONFIGURATIONS = {
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
    "Gemma3ForConditionalGeneration": transformers.Gemma3Config,
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "MixtralForCausalLM": transformers.MixtralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig,
}


def test_every_family_is_compared_with_transformers():
    assert ARCHITECTURES.keys() == CONFIGURATIONS.keys()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_key_that_is_left_out_has_the_value_that_transformers_gives_it(name):
    made = CONFIGURATIONS[name]()
    complete, read = made.to_dict(), ARCHITECTURES[name]
    text = made.get_text_config().to_dict()
    expected = read(CheckpointConfig(PATH, complete))
    assert read(CheckpointConfig(PATH, {})) == expected
    for key in text:
        without = {other: value for other, value in text.items() if other != key}
        assert read(CheckpointConfig(PATH, without)) == expected, key


def test_gemma_as_published_leaves_out_what_equals_the_defaults():
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    published = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
    spec = ARCHITECTURES["Gemma3ForConditionalGeneration"](CheckpointConfig(PATH, published))
    theirs = transformers.Gemma3Config(text_config=dict(text)).text_config
    assert (spec.vocab_size, spec.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (8, 4, 256)
    assert spec.windows.count(None) == theirs.layer_types.count("full_attention")


def test_dense_decoders_of_transformers_have_its_default_length():
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    compared = [kind for kind in DEFAULT_POSITIONS if kind in known]
    assert len(compared) > 30
    for kind in compared:
        made = transformers.AutoConfig.for_model(kind).get_text_config()
        assert made.max_position_embeddings == DEFAULT_POSITIONS[kind], kind


FOUR, TRAINED = {"factor": 4.0}, {"original_max_position_embeddings": 512}
LONGER = {"max_position_embeddings": 2048}
QWEN = {"max_position_embeddings": 512, "rope_theta": 1_000_000.0}


@pytest.mark.parametrize(
    ("keys", "length", "most"),
    [
        # As the makers of Qwen2.5 and Qwen3 describe it: the trained length stays in the file.
        ({"rope_scaling": {"type": "yarn", **FOUR, **TRAINED}}, 2048, 2048),
        ({"max_position_embeddings": 640, "rope_scaling": {"type": "yarn", **FOUR, **TRAINED}}, 2048, 2048),
        ({"rope_scaling": {"rope_type": "yarn", **FOUR}}, 2048, 2048),
        # As models that were trained with it are saved: the file has the longer length.
        (
            {**LONGER, "rope_parameters": {"rope_type": "yarn", **FOUR, **TRAINED, "rope_theta": 1e6}},
            2048,
            2048,
        ),
        ({**LONGER, "rope_scaling": {"type": "yarn", **TRAINED}}, 2048, 2048),
        ({**LONGER, **TRAINED, "rope_scaling": {"type": "yarn", **FOUR}}, 2048, 2048),
        ({"rope_scaling": {"type": "linear", **FOUR}}, 2048, 2048),
        ({**LONGER, "rope_scaling": {"type": "linear", **FOUR, **TRAINED}}, 2048, 2048),
        ({"rope_scaling": {"type": "dynamic", **FOUR}}, 512, 2048),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 512, 512),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, 2**31 - 1, 2**31 - 1),
        ({"rope_scaling": {}}, 512, 512),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "SmolLM3ForCausalLM"])
def test_scaling_extends_the_trained_length_as_its_makers_document(architecture, keys, length, most):
    config = CheckpointConfig(PATH, {"architectures": [architecture], **QWEN, **keys})
    spec = read_built_in(config)
    if spec is None:  # transformers' own dynamic scaling depends on the batch, so it gets no longer texts
        most = length
    assert read_max_model_len(config, spec, None) == length
    assert read_max_model_len(config, spec, most) == most
    if most < 2**31 - 1:
        with pytest.raises(ConfigError, match=f"above the model's own limit of {most} tokens"):
            read_max_model_len(config, spec, most + 1)


def test_longrope_serves_the_trained_length():
    keys = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
    config = CheckpointConfig(PATH, {**keys, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}})
    assert read_max_model_len(config, None, None) == 4096


def test_scaling_of_gemma_is_part_of_its_length():
    spec = read_config("Gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (spec.max_positions, spec.most_positions) == (1000, 1000)


def test_longer_texts_with_dynamic_scaling_have_the_frequencies_that_transformers_computes_for_them():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    theirs = transformers.LlamaConfig(**VALID, rope_parameters=dict(scaling))
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"]
    for tokens in (1000, 1001, 3000):
        spec = read_config(rope_parameters=scaling).for_context(tokens)
        expected = compute(theirs, device="cpu", seq_len=tokens)[0]
        torch.testing.assert_close(
            torch.from_numpy(inverse_frequencies(spec.ropes[0], spec.head_dim)), expected
        )
        assert spec.max_positions == tokens
