"""What published models have in their files: the keys that decide something, with the values as published.

Sizes are made small by `published_folders`, which also maps the ids of tokens. Each form says what a server
must read from it, as the model's makers document it.
"""

from typing import Any, NamedTuple

Json = dict[str, Any]


class Reading(NamedTuple):
    """What is read from a folder.

    `context`: the most tokens of a prompt and its answer.
    `ends`: the tokens that end an answer.
    `head_dim`: channels of a head.
    `windows`: of each layer that is kept; one value for all.
    `rope`: kind, theta and factor, in the layers without a window if there are any; None: not ours to say.
    `tied`: whether the head is the embedding.
    `defaults`: sampling parameters that differ from ours.
    `native`: whether the architecture is built in; else transformers makes its layers.
    `task`: what the model makes.
    """

    context: int
    ends: frozenset[str]
    head_dim: int
    windows: int | tuple[int | None, ...] | None = None
    rope: tuple[str, float, float] | None = None
    tied: bool = False
    defaults: Json = {}  # noqa: RUF012
    native: bool = True
    task: str = "generate"


class Form(NamedTuple):
    """The files of one model. `tokens`: ids as published, with their texts.

    `family`: of `structured.families`, for the chat template; None: it has none. `files`: others by name.
    `expected`: what is read, or a text of the refusal.
    """

    config: Json
    tokens: dict[int, str]
    expected: Reading | str
    generation: Json | None = None
    tokenizer: Json = {}  # noqa: RUF012
    files: dict[str, Any] = {}  # noqa: RUF012
    family: str | None = None


# Parts that several models share.
LLAMA_2 = {0: "<unk>", 1: "<s>", 2: "</s>"}
LLAMA_3 = {
    128000: "<|begin_of_text|>",
    128001: "<|end_of_text|>",
    128004: "<|finetune_right_pad_id|>",
    128008: "<|eom_id|>",
    128009: "<|eot_id|>",
}
QWEN = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
GEMMA = {0: "<pad>", 1: "<eos>", 2: "<bos>", 106: "<end_of_turn>"}
DISTILL = {151643: "<｜end▁of▁sentence｜>", 151645: "<｜Assistant｜>", 151646: "<｜begin▁of▁sentence｜>"}
OLMO = {100257: "<|endoftext|>", 100277: "<|pad|>"}


def ends(*texts: str) -> frozenset[str]:
    return frozenset(texts)


def rope_3(factor: float) -> Json:
    return {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None, **more: Any) -> Json:
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in sizes.items() if value is not None} | more


def mistral(hidden: int, inner: int, layers: int, **more: Any) -> Json:
    base = llama(hidden, inner, layers, 32, 8, bos_token_id=1, eos_token_id=2, vocab_size=32000)
    return base | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"} | more


def qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return (
        llama(hidden, inner, layers, heads, kv_heads)
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "max_position_embeddings": 32768,
            "max_window_layers": layers,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
        | more
    )


def qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Json:
    keys = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_scaling": None,
        "sliding_window": None,
    }
    return qwen2(hidden, inner, layers, heads, kv_heads) | keys | more


def qwen3_moe(hidden: int, layers: int, heads: int, experts: int, inner: int, **more: Any) -> Json:
    keys = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    return qwen3(hidden, 6144, layers, heads, 4) | keys | more


QWEN3_GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
QWEN3_DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
QWEN3_ENDS = ends("<|im_end|>", "<|endoftext|>")


def gemma3(hidden: int, inner: int, layers: int, **text: Any) -> Json:
    """Return the multimodal form, whose text_config leaves out what equals the family's defaults."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "model_type": "gemma3_text",
            "num_hidden_layers": layers,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


GEMMA3_TOKENS = {**GEMMA, 255999: "<start_of_image>", 256000: "<end_of_image>", 262144: "<image_soft_token>"}
GEMMA3_GENERATION = {
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "do_sample": True,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "top_k": 64,
    "top_p": 0.95,
}
GEMMA3 = Reading(
    context=131072,
    ends=ends("<eos>", "<end_of_turn>"),
    head_dim=256,
    windows=(1024,) * 5 + (None, 1024),
    rope=("linear", 1e6, 8.0),
    tied=True,
    defaults={"top_k": 64, "top_p": 0.95},
)
PHI_3 = {1: "<s>", 2: "</s>", 32000: "<|endoftext|>", 32001: "<|assistant|>", 32007: "<|end|>"}


def phi3(**more: Any) -> Json:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
        **more,
    }


def auto_map(owner: str) -> Json:
    return {
        "auto_map": {
            "AutoConfig": f"{owner}configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": f"{owner}modeling_phi3.Phi3ForCausalLM",
        }
    }


EMBEDDING_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
LAST_TOKEN = {
    "word_embedding_dimension": 1024,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}

FORMS: dict[str, Form] = {
    # Llama and models of its form.
    "TinyLlama 1.1B Chat": Form(
        llama(
            *(2048, 5632, 22, 32, 4),
            attention_bias=False,
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=2048,
            pretraining_tp=1,
            rope_scaling=None,
            rope_theta=10000.0,
            vocab_size=32000,
        ),
        LLAMA_2,
        Reading(2048, ends("</s>"), 64, rope=("default", 1e4, 1.0)),
        tokenizer={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"},
    ),
    "Llama 2 7B Chat, without rope_theta": Form(
        llama(
            *(4096, 11008, 32, 32, 32),
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=4096,
            pad_token_id=0,
            pretraining_tp=1,
            rope_scaling=None,
            torch_dtype="float16",
            vocab_size=32000,
        ),
        LLAMA_2,
        Reading(
            4096, ends("</s>"), 128, rope=("default", 1e4, 1.0), defaults={"temperature": 0.6, "top_p": 0.9}
        ),
        generation={
            "bos_token_id": 1,
            "do_sample": True,
            "eos_token_id": 2,
            "max_length": 4096,
            "pad_token_id": 0,
            "temperature": 0.6,
            "top_p": 0.9,
        },
        tokenizer={"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"},
    ),
    "Vicuna 7B v1.5 16k, whose linear scaling extends its context": Form(
        llama(
            *(4096, 11008, 32, 32, 32),
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=4096,
            max_sequence_length=16384,
            pad_token_id=0,
            rope_scaling={"factor": 4.0, "type": "linear"},
            torch_dtype="float16",
            vocab_size=32000,
        ),
        LLAMA_2,
        Reading(16384, ends("</s>"), 128, rope=("linear", 1e4, 4.0)),
    ),
    "Llama 3 8B Instruct, whose generation_config has a second end": Form(
        llama(
            *(4096, 14336, 32, 32, 8),
            attention_bias=False,
            bos_token_id=128000,
            eos_token_id=128009,
            max_position_embeddings=8192,
            pretraining_tp=1,
            rope_scaling=None,
            rope_theta=500000.0,
            vocab_size=128256,
        ),
        LLAMA_3,
        Reading(
            8192,
            ends("<|end_of_text|>", "<|eot_id|>"),
            128,
            rope=("default", 5e5, 1.0),
            defaults={"temperature": 0.6, "top_p": 0.9},
        ),
        generation={
            "bos_token_id": 128000,
            "do_sample": True,
            "eos_token_id": [128001, 128009],
            "max_length": 4096,
            "temperature": 0.6,
            "top_p": 0.9,
        },
        tokenizer={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        family="Llama 3",
    ),
    "Llama 3.1 8B, the base model": Form(
        llama(
            *(4096, 14336, 32, 32, 8),
            attention_bias=False,
            bos_token_id=128000,
            eos_token_id=128001,
            max_position_embeddings=131072,
            mlp_bias=False,
            pretraining_tp=1,
            rope_scaling=rope_3(8.0),
            rope_theta=500000.0,
            vocab_size=128256,
        ),
        LLAMA_3,
        Reading(131072, ends("<|end_of_text|>"), 128, rope=("llama3", 5e5, 8.0)),
        tokenizer={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    "Llama 3.3 70B Instruct, with three ends": Form(
        llama(
            *(8192, 28672, 80, 64, 8),
            attention_bias=False,
            bos_token_id=128000,
            eos_token_id=[128001, 128008, 128009],
            max_position_embeddings=131072,
            mlp_bias=False,
            rope_scaling=rope_3(8.0),
            rope_theta=500000.0,
            vocab_size=128256,
        ),
        LLAMA_3,
        Reading(
            131072,
            ends("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            128,
            rope=("llama3", 5e5, 8.0),
            defaults={"temperature": 0.6, "top_p": 0.9},
        ),
        generation={
            "bos_token_id": 128000,
            "do_sample": True,
            "eos_token_id": [128001, 128008, 128009],
            "temperature": 0.6,
            "top_p": 0.9,
        },
        tokenizer={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        family="Llama 3",
    ),
    "Llama 3.2 1B, tied": Form(
        llama(
            *(2048, 8192, 16, 32, 8),
            bos_token_id=128000,
            eos_token_id=128001,
            head_dim=64,
            max_position_embeddings=131072,
            mlp_bias=False,
            rope_scaling=rope_3(32.0),
            rope_theta=500000.0,
            tie_word_embeddings=True,
            vocab_size=128256,
        ),
        LLAMA_3,
        Reading(131072, ends("<|end_of_text|>"), 64, rope=("llama3", 5e5, 32.0), tied=True),
        tokenizer={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    "Llama 3.2 3B Instruct of unsloth, with an end in one file only": Form(
        llama(
            *(3072, 8192, 28, 24, 8),
            bos_token_id=128000,
            eos_token_id=128009,
            head_dim=128,
            max_position_embeddings=131072,
            pad_token_id=128004,
            rope_scaling=rope_3(32.0),
            rope_theta=500000.0,
            tie_word_embeddings=True,
            vocab_size=128256,
        ),
        LLAMA_3,
        Reading(131072, ends("<|eot_id|>"), 128, rope=("llama3", 5e5, 32.0), tied=True),
        family="Llama 3",
    ),
    "SmolLM2 1.7B Instruct": Form(
        llama(
            *(2048, 8192, 24, 32, 32),
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=8192,
            mlp_bias=False,
            pad_token_id=2,
            rope_scaling=None,
            rope_theta=130000,
            tie_word_embeddings=True,
            vocab_size=49152,
            **{"transformers.js_config": {"dtype": "q4", "use_external_data_format": {"model.onnx": True}}},
        ),
        {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"},
        Reading(8192, ends("<|im_end|>"), 64, rope=("default", 130000.0, 1.0), tied=True),
        tokenizer={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        family="Qwen2.5",
    ),
    "Falcon 3 7B Instruct, with heads wider than the hidden size": Form(
        llama(
            *(3072, 23040, 28, 12, 4),
            bos_token_id=11,
            eos_token_id=11,
            head_dim=256,
            max_position_embeddings=32768,
            rope_scaling=None,
            rope_theta=1000042,
            vocab_size=131072,
        ),
        {11: "<|endoftext|>"},
        Reading(32768, ends("<|endoftext|>"), 256, rope=("default", 1000042.0, 1.0)),
        tokenizer={"eos_token": "<|endoftext|>"},
    ),
    "Nous Hermes 2 SOLAR, a ChatML fine-tune with added tokens": Form(
        llama(
            *(4096, 14336, 48, 32, 8),
            bos_token_id=1,
            eos_token_id=32000,
            max_position_embeddings=4096,
            rope_scaling=None,
            rope_theta=10000.0,
            use_cache=False,
            vocab_size=32002,
        ),
        {**LLAMA_2, 32000: "<|im_end|>", 32001: "<|im_start|>"},
        Reading(4096, ends("<|im_end|>"), 128, rope=("default", 1e4, 1.0)),
        tokenizer={"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"},
        family="Qwen2.5",
    ),
    "DeepSeek R1 Distill Llama 8B": Form(
        llama(
            *(4096, 14336, 32, 32, 8),
            bos_token_id=128000,
            eos_token_id=128001,
            max_position_embeddings=131072,
            rope_scaling=rope_3(8.0),
            rope_theta=500000.0,
            vocab_size=128256,
        ),
        {128000: "<｜begin▁of▁sentence｜>", 128001: "<｜end▁of▁sentence｜>", 128011: "<｜User｜>"},
        Reading(
            131072,
            ends("<｜end▁of▁sentence｜>"),
            128,
            rope=("llama3", 5e5, 8.0),
            defaults={"temperature": 0.6, "top_p": 0.95},
        ),
        generation={
            "_from_model_config": True,
            "bos_token_id": 128000,
            "do_sample": True,
            "eos_token_id": 128001,
            "temperature": 0.6,
            "top_p": 0.95,
        },
        tokenizer={
            "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>"},
            "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"},
        },
        family="DeepSeek R1",
    ),
    "A ChatML fine-tune whose end is in tokenizer_config.json only": Form(
        qwen2(*(896, 4864, 24, 14, 2), eos_token_id=151643, tie_word_embeddings=True),
        QWEN,
        Reading(32768, ends("<|im_end|>", "<|endoftext|>"), 64, rope=("default", 1e6, 1.0), tied=True),
        generation={"bos_token_id": 151643, "eos_token_id": 151643, "max_new_tokens": 2048},
        tokenizer={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        family="Qwen2.5",
    ),
    # Mistral and Mixtral.
    "Mistral 7B Instruct v0.1, with a window": Form(
        mistral(*(4096, 14336, 32), max_position_embeddings=32768, rope_theta=10000.0, sliding_window=4096),
        LLAMA_2,
        Reading(32768, ends("</s>"), 128, windows=4096, rope=("default", 1e4, 1.0)),
        tokenizer={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "Mistral 7B v0.2, without one": Form(
        mistral(*(4096, 14336, 32), max_position_embeddings=32768, rope_theta=1000000.0, sliding_window=None),
        LLAMA_2,
        Reading(32768, ends("</s>"), 128, rope=("default", 1e6, 1.0)),
    ),
    "Mistral 7B Instruct v0.3": Form(
        mistral(
            *(4096, 14336, 32),
            max_position_embeddings=32768,
            rope_theta=1000000.0,
            sliding_window=None,
            vocab_size=32768,
        ),
        {**LLAMA_2, 3: "[INST]", 4: "[/INST]", 5: "[TOOL_CALLS]"},
        Reading(32768, ends("</s>"), 128, rope=("default", 1e6, 1.0)),
        generation={"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
        tokenizer={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        family="Mistral v3",
    ),
    "Mistral Nemo, with heads narrower than the hidden size": Form(
        mistral(
            *(5120, 14336, 40),
            head_dim=128,
            max_position_embeddings=128000,
            rope_theta=1000000.0,
            sliding_window=None,
            vocab_size=131072,
        ),
        {**LLAMA_2, 3: "[INST]", 4: "[/INST]", 9: "[TOOL_CALLS]"},
        Reading(128000, ends("</s>"), 128, rope=("default", 1e6, 1.0)),
        family="Mistral v3",
    ),
    "Ministral 8B, with a window of all positions that other programs read": Form(
        mistral(
            *(4096, 12288, 36),
            head_dim=128,
            max_position_embeddings=32768,
            rope_theta=100000000.0,
            sliding_window=32768,
            vocab_size=131072,
        ),
        LLAMA_2,
        Reading(32768, ends("</s>"), 128, windows=32768, rope=("default", 1e8, 1.0)),
    ),
    "Mistral Small 24B 2501": Form(
        mistral(
            *(5120, 32768, 40),
            head_dim=128,
            max_position_embeddings=32768,
            rope_theta=100000000.0,
            sliding_window=None,
            vocab_size=131072,
        ),
        {**LLAMA_2, 3: "[INST]", 4: "[/INST]", 9: "[TOOL_CALLS]"},
        Reading(32768, ends("</s>"), 128, rope=("default", 1e8, 1.0), defaults={"temperature": 0.15}),
        generation={"bos_token_id": 1, "do_sample": True, "eos_token_id": 2, "temperature": 0.15},
        family="Mistral v11",
    ),
    "Mistral Small, as saved by transformers 5": Form(
        {key: value for key, value in mistral(5120, 32768, 40).items() if key != "torch_dtype"}
        | {
            "dtype": "bfloat16",
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "pad_token_id": 11,
            "rope_parameters": {"rope_theta": 1000000000.0, "rope_type": "default"},
            "sliding_window": None,
            "transformers_version": "5.10.2",
            "use_cache": False,
            "vocab_size": 131072,
        },
        {**LLAMA_2, 11: "<pad>"},
        Reading(131072, ends("</s>"), 128, rope=("default", 1e9, 1.0)),
    ),
    "Mixtral 8x7B v0.1": Form(
        mistral(
            *(4096, 14336, 32),
            architectures=["MixtralForCausalLM"],
            max_position_embeddings=32768,
            model_type="mixtral",
            num_experts_per_tok=2,
            num_local_experts=8,
            output_router_logits=False,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
        ),
        LLAMA_2,
        Reading(32768, ends("</s>"), 128, rope=("default", 1e6, 1.0)),
    ),
    # Qwen 2, 2.5 and 3.
    "Qwen2.5 0.5B, the base model": Form(
        qwen2(
            *(896, 4864, 24, 14, 2),
            eos_token_id=151643,
            sliding_window=32768,
            tie_word_embeddings=True,
            use_mrope=False,
        ),
        QWEN,
        # Its chat template ends each turn with <|im_end|>.
        Reading(32768, QWEN3_ENDS, 64, rope=("default", 1e6, 1.0), tied=True),
        generation={
            "bos_token_id": 151643,
            "do_sample": False,
            "eos_token_id": 151643,
            "max_new_tokens": 2048,
        },
        tokenizer={"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        family="Qwen2.5",
    ),
    "Qwen2.5 7B Instruct": Form(
        qwen2(*(3584, 18944, 28, 28, 4), sliding_window=131072, vocab_size=152064),
        QWEN,
        Reading(
            32768,
            QWEN3_ENDS,
            128,
            rope=("default", 1e6, 1.0),
            defaults={"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        generation={
            **QWEN3_GENERATION,
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_p": 0.8,
        },
        tokenizer={"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        family="Qwen2.5",
    ),
    "Qwen2.5 Coder 32B with the YaRN of its card": Form(
        qwen2(
            *(5120, 27648, 64, 40, 8),
            rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            sliding_window=131072,
            vocab_size=152064,
        ),
        QWEN,
        Reading(131072, QWEN3_ENDS, 128, rope=("yarn", 1e6, 4.0)),
        generation={"eos_token_id": [151645, 151643]},
        family="Qwen2.5",
    ),
    "DeepSeek R1 Distill Qwen 1.5B": Form(
        qwen2(
            *(1536, 8960, 28, 12, 2),
            eos_token_id=151643,
            max_position_embeddings=131072,
            max_window_layers=21,
            rope_theta=10000,
            sliding_window=4096,
            use_mrope=False,
        ),
        DISTILL,
        Reading(
            131072,
            ends("<｜end▁of▁sentence｜>"),
            128,
            rope=("default", 1e4, 1.0),
            defaults={"temperature": 0.6, "top_p": 0.95},
        ),
        generation={
            "_from_model_config": True,
            "bos_token_id": 151646,
            "do_sample": True,
            "eos_token_id": 151643,
            "temperature": 0.6,
            "top_p": 0.95,
        },
        tokenizer={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        family="DeepSeek R1",
    ),
    "Qwen3 0.6B": Form(
        qwen3(*(1024, 3072, 28, 16, 8), rope_theta=1000000, tie_word_embeddings=True),
        QWEN,
        Reading(40960, QWEN3_ENDS, 128, rope=("default", 1e6, 1.0), tied=True, defaults=QWEN3_DEFAULTS),
        generation=QWEN3_GENERATION,
        tokenizer={"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        family="Qwen3",
    ),
    "Qwen3 8B with the YaRN of its card": Form(
        qwen3(
            *(4096, 12288, 36, 32, 8),
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        QWEN,
        Reading(131072, QWEN3_ENDS, 128, rope=("yarn", 1e6, 4.0), defaults=QWEN3_DEFAULTS),
        generation=QWEN3_GENERATION,
        family="Qwen3",
    ),
    "Chocolatine 2 4B, a Qwen3 with layer_types, as saved by transformers 4.57": Form(
        {key: value for key, value in qwen3(2560, 9728, 36, 32, 8).items() if key != "torch_dtype"}
        | {
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 262144,
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
        },
        QWEN,
        Reading(262144, ends("<|im_end|>"), 128, rope=("default", 5e6, 1.0), tied=True),
        family="Qwen3",
    ),
    "MiniMind 3, a Qwen3 without ids of tokens": Form(
        {
            key: value
            for key, value in qwen3(
                *(768, 2432, 8, 8, 4),
                dtype="float16",
                head_dim=96,
                layer_types=["full_attention"] * 8,
                max_position_embeddings=32768,
                max_window_layers=28,
                tie_word_embeddings=True,
                vocab_size=6400,
            ).items()
            if key not in ("torch_dtype", "bos_token_id", "eos_token_id")
        },
        {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"},
        Reading(32768, ends("<|im_end|>"), 96, rope=("default", 1e6, 1.0), tied=True),
        tokenizer={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        family="Qwen3",
    ),
    "Qwen3 30B A3B": Form(
        qwen3_moe(2048, 48, 32, 128, 768),
        QWEN,
        Reading(40960, QWEN3_ENDS, 128, rope=("default", 1e6, 1.0), defaults=QWEN3_DEFAULTS),
        generation=QWEN3_GENERATION,
        family="Qwen3",
    ),
    "Qwen3 Coder 30B A3B, with keys of its own": Form(
        qwen3_moe(
            *(2048, 48, 32, 128, 768),
            intermediate_size=5472,
            max_position_embeddings=262144,
            max_window_layers=28,
            qkv_bias=False,
            rope_theta=10000000,
            shared_expert_intermediate_size=0,
            use_qk_norm=True,
        ),
        QWEN,
        Reading(
            262144,
            QWEN3_ENDS,
            128,
            rope=("default", 1e7, 1.0),
            defaults={"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        generation={
            "do_sample": True,
            "eos_token_id": [151645, 151643],
            "pad_token_id": 151643,
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
        family="Qwen3-Coder",
    ),
    "SciThinker 30B, whose rope is in three keys": Form(
        {key: value for key, value in qwen3_moe(2048, 48, 32, 128, 768).items() if key != "torch_dtype"}
        | {
            "dtype": "bfloat16",
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
            "rope_theta": 10000000,
        },
        QWEN,
        Reading(262144, ends("<|im_end|>"), 128, rope=("default", 1e7, 1.0)),
        family="Qwen3-Thinking",
    ),
    "Qwen3 Embedding 0.6B, whose vocabulary is smaller than its tokenizer's": Form(
        qwen3(
            *(1024, 3072, 28, 16, 8),
            eos_token_id=151643,
            max_position_embeddings=32768,
            max_window_layers=28,
            tie_word_embeddings=True,
            vocab_size=151669,
        ),
        QWEN,
        Reading(32768, ends("<|endoftext|>"), 128, rope=("default", 1e6, 1.0), tied=True, task="embed"),
        tokenizer={"eos_token": "<|endoftext|>"},
        files={"modules.json": EMBEDDING_MODULES, "1_Pooling/config.json": LAST_TOKEN},
    ),
    "Qwen3 Reranker 0.6B, saved with one output": Form(
        qwen3(
            *(1024, 3072, 28, 16, 8),
            architectures=["Qwen3ForSequenceClassification"],
            id2label={"0": "LABEL_0"},
            label2id={"LABEL_0": 0},
            pad_token_id=151643,
            tie_word_embeddings=True,
            vocab_size=151669,
        ),
        QWEN,
        Reading(40960, ends("<|im_end|>"), 128, rope=("default", 1e6, 1.0), tied=True, task="score"),
    ),
    # Gemma 3.
    "Gemma 3 1B": Form(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "vocab_size": 262144,
        },
        GEMMA,
        GEMMA3._replace(context=32768, windows=(512,) * 5 + (None, 512), rope=("default", 1e6, 1.0)),
        generation=GEMMA3_GENERATION,
        tokenizer={"bos_token": "<bos>", "eos_token": "<eos>"},
        family="Gemma 3",
    ),
    "Gemma 3 4B, which leaves out its defaults": Form(
        gemma3(2560, 10240, 34),
        GEMMA3_TOKENS,
        GEMMA3,
        generation=GEMMA3_GENERATION,
        tokenizer={"bos_token": "<bos>", "eos_token": "<eos>"},
        family="Gemma 3",
    ),
    "Gemma 3 12B": Form(
        gemma3(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8),
        GEMMA3_TOKENS,
        GEMMA3,
        generation=GEMMA3_GENERATION,
        tokenizer={"bos_token": "<bos>", "eos_token": "<eos>"},
        family="Gemma 3",
    ),
    "Gemma 3 27B, whose scale is not that of its heads": Form(
        gemma3(
            *(5376, 21504, 62),
            head_dim=128,
            num_attention_heads=32,
            num_key_value_heads=16,
            query_pre_attn_scalar=168,
        ),
        GEMMA3_TOKENS,
        GEMMA3._replace(head_dim=128),
        generation=GEMMA3_GENERATION,
        tokenizer={"bos_token": "<bos>", "eos_token": "<eos>"},
        family="Gemma 3",
    ),
    "Gemma 3 27B, its text part alone": Form(
        {
            "architectures": ["Gemma3ForCausalLM"],
            **gemma3(
                *(5376, 21504, 62),
                head_dim=128,
                num_attention_heads=32,
                num_key_value_heads=16,
                query_pre_attn_scalar=168,
                torch_dtype="bfloat16",
            )["text_config"],
        },
        GEMMA,
        GEMMA3._replace(head_dim=128, ends=ends("<eos>"), defaults={}),
        tokenizer={"bos_token": "<bos>", "eos_token": "<eos>"},
    ),
    # Served with the layers of transformers.
    "Gemma 2 2B Instruct": Form(
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "torch_dtype": "bfloat16",
            "vocab_size": 256000,
        },
        GEMMA,
        Reading(8192, ends("<eos>", "<end_of_turn>"), 256, windows=(4096, None), tied=True, native=False),
        tokenizer={"bos_token": "<bos>", "eos_token": "<eos>"},
    ),
    "Phi 1.5, without any end": Form(
        {
            "architectures": ["PhiForCausalLM"],
            "model_type": "phi",
            "bos_token_id": None,
            "embd_pdrop": 0.0,
            "eos_token_id": None,
            "hidden_act": "gelu_new",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "num_key_value_heads": None,
            "partial_rotary_factor": 0.5,
            "qk_layernorm": False,
            "resid_pdrop": 0.0,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "vocab_size": 51200,
        },
        {50256: "<|endoftext|>"},
        Reading(2048, ends("<|endoftext|>"), 64, native=False),
        tokenizer={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "Phi 3 mini 4k, with code that transformers has, too": Form(
        phi3(**auto_map("microsoft/Phi-3-mini-4k-instruct--"), torch_dtype="float16"),
        PHI_3,
        Reading(4096, ends("<|endoftext|>", "<|assistant|>", "<|end|>"), 96, windows=2047, native=False),
        generation={
            "_from_model_config": True,
            "bos_token_id": 1,
            "eos_token_id": [32000, 32001, 32007],
            "pad_token_id": 32000,
        },
        tokenizer={"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    ),
    "Phi 3.5 mini, whose longrope serves the trained length": Form(
        phi3(
            **auto_map("microsoft/Phi-3.5-mini-instruct--"),
            max_position_embeddings=131072,
            rope_scaling={"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            sliding_window=262144,
        ),
        PHI_3,
        Reading(4096, ends("<|endoftext|>", "<|assistant|>", "<|end|>"), 96, native=False),
        generation={"bos_token_id": 1, "eos_token_id": [32007, 32001, 32000], "pad_token_id": 32000},
        tokenizer={"bos_token": "<s>", "eos_token": "<|endoftext|>"},
    ),
    "Phi 4 mini, which rotates a part of its heads": Form(
        phi3(
            **auto_map(""),
            bos_token_id=199999,
            eos_token_id=199999,
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            max_position_embeddings=131072,
            mlp_bias=False,
            num_attention_heads=24,
            num_key_value_heads=8,
            pad_token_id=199999,
            partial_rotary_factor=0.75,
            rope_scaling={"long_factor": [1.118] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            sliding_window=262144,
            tie_word_embeddings=True,
            vocab_size=200064,
        ),
        {199999: "<|endoftext|>", 200020: "<|end|>"},
        Reading(4096, ends("<|endoftext|>", "<|end|>"), 128, tied=True, native=False),
        generation={"bos_token_id": 199999, "eos_token_id": [200020, 199999], "pad_token_id": 199999},
    ),
    "Phi 4, with an empty auto_map": Form(
        phi3(
            auto_map={},
            bos_token_id=100257,
            eos_token_id=100257,
            hidden_size=5120,
            intermediate_size=17920,
            max_position_embeddings=16384,
            num_attention_heads=40,
            num_hidden_layers=40,
            num_key_value_heads=10,
            original_max_position_embeddings=16384,
            pad_token_id=100257,
            rope_theta=250000,
            sliding_window=None,
            vocab_size=100352,
        ),
        {100257: "<|endoftext|>", 100265: "<|im_end|>"},
        Reading(16384, ends("<|endoftext|>", "<|im_end|>"), 128, native=False),
        generation={"bos_token_id": 100257, "eos_token_id": [100257, 100265], "pad_token_id": 100257},
        tokenizer={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    ),
    "SmolLM3 3B, with layers that are not rotated": Form(
        llama(
            *(2048, 11008, 36, 16, 4),
            architectures=["SmolLM3ForCausalLM"],
            bos_token_id=None,
            eos_token_id=128012,
            layer_types=["full_attention"] * 36,
            max_position_embeddings=65536,
            max_window_layers=28,
            model_type="smollm3",
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            pad_token_id=128004,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=5000000.0,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
            vocab_size=128256,
        ),
        {**LLAMA_3, 128012: "<|im_end|>"},
        Reading(
            65536,
            ends("<|im_end|>"),
            128,
            tied=True,
            native=False,
            defaults={"temperature": 0.6, "top_p": 0.95},
        ),
        generation={
            "do_sample": True,
            "eos_token_id": 128012,
            "pad_token_id": 128004,
            "temperature": 0.6,
            "top_p": 0.95,
        },
        tokenizer={"bos_token": None, "eos_token": "<|im_end|>"},
        family="Qwen3",
    ),
    "OLMo 2 1B": Form(
        llama(
            *(2048, 8192, 16, 16, 16),
            architectures=["Olmo2ForCausalLM"],
            attention_bias=False,
            eos_token_id=100257,
            max_position_embeddings=4096,
            model_type="olmo2",
            pad_token_id=100277,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=500000,
            vocab_size=100352,
        ),
        OLMO,
        Reading(4096, ends("<|endoftext|>"), 128, native=False),
        tokenizer={"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
    ),
    "Granite 3.3 8B Instruct": Form(
        llama(
            *(4096, 12800, 40, 32, 8),
            architectures=["GraniteForCausalLM"],
            attention_multiplier=0.0078125,
            bos_token_id=0,
            embedding_multiplier=12.0,
            eos_token_id=0,
            logits_scaling=16.0,
            max_position_embeddings=131072,
            mlp_bias=False,
            model_type="granite",
            pad_token_id=0,
            residual_multiplier=0.22,
            rope_scaling=None,
            rope_theta=10000000.0,
            tie_word_embeddings=True,
            vocab_size=49159,
        ),
        {0: "<|end_of_text|>"},
        Reading(131072, ends("<|end_of_text|>"), 128, tied=True, native=False),
        tokenizer={"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    "Tiny Aya, a Cohere 2": Form(
        {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "attention_bias": False,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_norm_eps": 1e-05,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
            * 9,
            "logit_scale": 1.0,
            "max_position_embeddings": 8192,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "rope_scaling": None,
            "rope_theta": 50000,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "torch_dtype": "bfloat16",
            "vocab_size": 262144,
        },
        {0: "<PAD>", 2: "<BOS_TOKEN>", 3: "<|END_OF_TURN_TOKEN|>"},
        Reading(
            8192,
            ends("<|END_OF_TURN_TOKEN|>"),
            128,
            windows=(4096, 4096, 4096, None),
            tied=True,
            native=False,
        ),
    ),
    # Refused, with what is missing.
    "Qwen3 30B A3B, 4 bits by bitsandbytes": Form(
        qwen3_moe(
            *(2048, 48, 32, 128, 768),
            quantization_config={
                "bnb_4bit_compute_dtype": "bfloat16",
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "load_in_4bit": True,
                "quant_method": "bitsandbytes",
            },
        ),
        QWEN,
        "quantization_config.quant_method: 'bitsandbytes' is not supported",
    ),
    "Zephyr 7B, AWQ for gemv": Form(
        mistral(
            *(4096, 14336, 32),
            max_position_embeddings=32768,
            quantization_config={
                "bits": 4,
                "group_size": 128,
                "quant_method": "awq",
                "version": "gemv",
                "zero_point": True,
            },
            rope_theta=10000.0,
            sliding_window=4096,
        ),
        LLAMA_2,
        "quantization_config.version: 'gemv' is not supported",
    ),
    "gpt-oss 20B": Form(
        llama(
            *(2880, 2880, 24, 64, 8),
            architectures=["GptOssForCausalLM"],
            attention_bias=True,
            eos_token_id=200002,
            experts_per_token=4,
            head_dim=64,
            initial_context_length=4096,
            layer_types=["sliding_attention", "full_attention"] * 12,
            max_position_embeddings=131072,
            model_type="gpt_oss",
            num_experts_per_tok=4,
            num_local_experts=32,
            quantization_config={"quant_method": "mxfp4"},
            rope_scaling={
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            rope_theta=150000,
            sliding_window=128,
            vocab_size=201088,
        ),
        {199999: "<|endoftext|>", 200002: "<|return|>", 200012: "<|call|>"},
        "quantization_config: is supported for our own model families only",
        family="gpt-oss",
    ),
    "DeepSeek V3": Form(
        llama(
            *(7168, 18432, 61, 128, 128),
            architectures=["DeepseekV3ForCausalLM"],
            auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            bos_token_id=0,
            eos_token_id=1,
            kv_lora_rank=512,
            max_position_embeddings=163840,
            model_type="deepseek_v3",
            q_lora_rank=1536,
            vocab_size=129280,
        ),
        {0: "<｜begin▁of▁sentence｜>", 1: "<｜end▁of▁sentence｜>"},
        "auto_map: the model needs code from its repository, which is never run",
        family="DeepSeek V3",
    ),
    "gte Qwen2 1.5B, whose code is not that of its architecture": Form(
        qwen2(
            *(1536, 8960, 28, 12, 2),
            auto_map={
                "AutoModel": "modeling_qwen.Qwen2Model",
                "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
            },
            is_causal=False,
        ),
        QWEN,
        "auto_map: the model needs code from its repository, which is never run",
    ),
    "FLUX.2's Mistral Small 3, with images": Form(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "dtype": "bfloat16",
            "image_token_index": 10,
            "spatial_merge_size": 2,
            "text_config": {
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540},
        },
        {**LLAMA_2, 10: "[IMG]"},
        "architectures: ['Mistral3ForConditionalGeneration'] is not supported",
    ),
    "EmbeddingGemma 300M, which attends in both directions": Form(
        {
            "architectures": ["Gemma3TextModel"],
            "model_type": "gemma3_text",
            "bos_token_id": 2,
            "eos_token_id": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 768,
            "intermediate_size": 1152,
            "max_position_embeddings": 2048,
            "num_attention_heads": 3,
            "num_hidden_layers": 24,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "torch_dtype": "float32",
            "use_bidirectional_attention": True,
            "vocab_size": 262144,
        },
        GEMMA,
        "use_bidirectional_attention: only causal attention is supported",
        files={"modules.json": EMBEDDING_MODULES[:2], "1_Pooling/config.json": LAST_TOKEN},
    ),
}
