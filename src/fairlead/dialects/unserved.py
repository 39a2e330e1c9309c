"""Fields of OpenAI's, vLLM's, SGLang's, llama.cpp's and TGI's requests that our engine does not serve.

A field that constrains an answer or its content is refused until it is served. A client that requests JSON
must not get anything else. Only null and the values that mean "off" pass. A field that changes no answer is
ignored, and listed here with the reason. Unknown fields are ignored, because clients send more of them every
month, and named in a header of the answer (`unread`).

Requests that are relayed keep all of their fields: the other server may serve them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from fairlead.base.errors import InvalidRequest

Request = TypeVar("Request", bound=msgspec.Struct)

_ABSENT = msgspec.Raw()
# No value that means "off" is longer in JSON.
_MAX_OFF_LENGTH = 16


class Unserved(NamedTuple):
    """A field that is refused. `off`: accepted values besides null. `instead`: a field to use."""

    off: tuple[Any, ...] = ()
    instead: str = ""


_EMPTY_TEXT, _EMPTY_LIST, _EMPTY_OBJECT = Unserved(("",)), Unserved(([],)), Unserved(({},))
_FALSE, _TRUE, _ZERO, _ONE = Unserved((False,)), Unserved((True,)), Unserved((0,)), Unserved((1,))
_ANY = Unserved()
Fields = Mapping[str, Unserved]

# Constraints on the generated text.
_CONSTRAINTS: Fields = {
    "structural_tag": _ANY,
    "guided_whitespace_pattern": _ANY,
    "grammar": _EMPTY_TEXT,
    "json_schema": _ANY,  # {} is a schema too: any JSON
    "regex": _EMPTY_TEXT,
    "ebnf": _EMPTY_TEXT,
    "bad_words": _EMPTY_LIST,
    "stop_regex": Unserved(("", [])),
    "n_indent": _ZERO,
    "logits_processors": _EMPTY_LIST,
    "custom_logit_processor": _EMPTY_TEXT,
    "moderation": _ANY,
}
# The former names of vLLM's `structured_outputs`, where that is served.
_GUIDED: Fields = {
    "guided_json": _ANY,
    "guided_json_object": _FALSE,
    "guided_regex": _EMPTY_TEXT,
    "guided_choice": _EMPTY_LIST,
    "guided_grammar": _EMPTY_TEXT,
}
# Sampling and stopping.
_SAMPLING: Fields = {
    "use_beam_search": _FALSE,
    "length_penalty": _ONE,
    "early_stopping": _FALSE,
    "watermarking": _FALSE,
    "typical_p": _ONE,
    "top_n_sigma": Unserved((-1, 0)),
    "xtc_probability": _ZERO,
    "dry_multiplier": _ZERO,
    "mirostat": _ZERO,
    "dynatemp_range": _ZERO,
    "adaptive_target": Unserved((-1,)),
    "min_keep": _ZERO,
    "samplers": _ANY,
    "repeat_penalty": Unserved((1,), "repetition_penalty"),
    "n_predict": Unserved((-1,), "max_tokens"),
    "n_cmpl": Unserved((1,), "n"),
    "t_max_predict_ms": Unserved((0, -1)),
    "repetition_detection": _ANY,
    "thinking_token_budget": Unserved((-1,)),
    "lora": _EMPTY_LIST,
    "lora_path": _ANY,
    "lora_request": _ANY,
    "vllm_xargs": _EMPTY_OBJECT,
}
# The model's input.
_PROMPT: Fields = {
    "prompt_embeds": _ANY,
    "input_ids": _ANY,
    "session_params": _EMPTY_OBJECT,
    # These two isolate cached prefixes; `kvCache.isolateTenants` does that for all requests.
    "cache_salt": _ANY,
    "extra_key": _ANY,
}
# The content of a response beside the text, and which text it shows.
_ANSWER: Fields = {
    "logprob_token_ids": _ANY,
    "n_probs": Unserved((0,), "logprobs"),
    "post_sampling_probs": _FALSE,
    "return_tokens": _FALSE,
    "return_tokens_as_token_ids": _FALSE,
    "return_prompt_text": _FALSE,
    "return_prompt_token_ids": _FALSE,
    "return_hidden_states": _FALSE,
    "return_routed_experts": _FALSE,
    "response_fields": _EMPTY_LIST,
    "include_stop_str_in_output": _FALSE,
    "no_stop_trim": _FALSE,
    "skip_special_tokens": _TRUE,
}

_TRUNCATION: Fields = {"truncate_prompt_tokens": _ANY}

COMPLETION: Fields = {**_CONSTRAINTS, **_SAMPLING, **_PROMPT, **_ANSWER, "add_special_tokens": _TRUE}

# How the chat template renders messages. /tokenize reads these fields, too.
_MESSAGES: Fields = {
    "chat_template": _ANY,
    "documents": Unserved(([],), "documents in chat_template_kwargs"),
    "tool_prompt": _EMPTY_TEXT,
    "guideline": _EMPTY_TEXT,
    "task": _ANY,
}

CHAT: Fields = {
    **{name: field for name, field in COMPLETION.items() if name != "thinking_token_budget"},
    **_TRUNCATION,
    **_MESSAGES,
    "add_special_tokens": _FALSE,
    "special_tokens": Unserved((), "specialTokens in the model's configuration"),
    "echo": _FALSE,
    "best_of": _ONE,
    "suffix": _EMPTY_TEXT,
    "functions": Unserved(([],), "tools"),
    "function_call": Unserved(("none", "auto"), "tool_choice"),
    "include_reasoning": _TRUE,
    "reasoning_format": Unserved(("auto", "deepseek")),
    "separate_reasoning": _TRUE,
    "modalities": Unserved((["text"],)),
    "audio": _ANY,
    "verbosity": Unserved(("medium",)),
    "web_search_options": _ANY,
}

MESSAGES: Fields = {
    **_CONSTRAINTS,
    **_GUIDED,
    **_SAMPLING,
    **_PROMPT,
    **_TRUNCATION,
    "n": _ONE,
    "stop": Unserved(("", []), "stop_sequences"),
    "response_format": Unserved((), "output_config.format"),
    "structured_outputs": Unserved((), "output_config.format"),
    "container": _ANY,
    "mcp_servers": _EMPTY_LIST,
}

RESPONSES: Fields = {
    **CHAT,
    **_GUIDED,
    "add_generation_prompt": _TRUE,
    "continue_final_message": _FALSE,
    "return_token_ids": _FALSE,
    "background_options": _EMPTY_OBJECT,
    "context_management": _EMPTY_LIST,
    "image": _ANY,
    "logprobs": Unserved((False,), "include"),
    "max_completion_tokens": Unserved((), "max_output_tokens"),
    "max_tokens": Unserved((), "max_output_tokens"),
    "messages": Unserved((), "input"),
    "n": _ONE,
    "n_cmpl": _ONE,
    "n_predict": Unserved((-1,), "max_output_tokens"),
    "n_probs": Unserved((0,), "include"),
    "prompt": _ANY,
    "reasoning_effort": Unserved((), "reasoning.effort"),
    "response_format": Unserved((), "text.format"),
}

EMBEDDING: Fields = {
    "messages": Unserved((), "input"),
    "prompt_embeds": _ANY,
    "add_special_tokens": _TRUE,
    "truncate": Unserved((False, "NONE"), "truncate_prompt_tokens"),
    "embed_dtype": Unserved(("float32",)),
    "endianness": Unserved(("native", "little")),
    "normalize": _ANY,
    "use_activation": _ANY,
    "input_type": _ANY,
    "lora_path": _ANY,
    "lora_request": _ANY,
}

COMPARISON: Fields = {
    "truncate": Unserved((False,), "truncate_prompt_tokens"),
    "truncation": Unserved((False,), "truncate_prompt_tokens"),
    "max_tokens_per_doc": _ANY,
    "max_chunks_per_doc": _ANY,
    "rank_fields": _EMPTY_LIST,
    "top_k": Unserved((), "top_n"),
    "use_activation": _TRUE,
    "activation": _TRUE,
    "softmax": _FALSE,
    "raw_scores": _FALSE,
    "instruction": _EMPTY_TEXT,
    "chat_template": _ANY,
    "chat_template_kwargs": _EMPTY_OBJECT,
    "add_special_tokens": _TRUE,
    "texts": Unserved((), "documents"),
    "data_1": _ANY,
    "data_2": _ANY,
    "lora_path": _ANY,
    "lora_request": _ANY,
}

TOKENIZE: Fields = {
    **_MESSAGES,
    "content": Unserved(("",), "prompt"),
    "add_special": Unserved((), "add_special_tokens"),
    "parse_special": Unserved((True,), "special_tokens"),
    "with_pieces": Unserved((False,), "return_token_strs"),
}

# Ignored fields, by the reason why that does no harm.
_HARMLESS = {
    "concerns the records that a provider keeps": "metadata store service_tier custom_labels",
    "concerns where, when or how fast an answer is computed": (
        "prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt n_cache_reuse n_keep"
        " n_discard id_slot request_id rid session_id data_parallel_rank routed_dp_rank"
        " disagg_prefill_dp_rank kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port"
        " bootstrap_room ngram_corpus_id stream_interval sse_ping_interval backend_sampling"
    ),
    "concerns images, sound and video, which are refused as parts of a message": (
        "mm_processor_kwargs media_io_kwargs images_config use_audio_in_video max_dynamic_patch"
        " min_dynamic_patch return_mm_kwargs"
    ),
    "has an effect only beside a field that is refused": (
        "grammar_lazy grammar_triggers grammar_type preserved_tokens custom_params truncation_side"
        " xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat_tau"
        " mirostat_eta dynatemp_exponent adaptive_decay spaces_between_special_tokens"
        " routed_experts_start_len routed_experts_prompt_start"
    ),
    "requests measurements of the work, which do not change the answer": (
        "timings_per_token return_progress return_meta_info return_cached_tokens_details return_token_offsets"
        " verbose"
    ),
    "is a hint at the length of the reasoning, which any answer satisfies": "reasoning",
    "is a hint at the answer, or at how it is computed": "prediction guided_decoding_backend",
    "concerns in how large pieces reasoning is streamed": "stream_reasoning",
}
IGNORED = {name: reason for reason, names in _HARMLESS.items() for name in names.split()}


def capturing(request: type[Request], fields: Fields) -> type[Request]:
    """Return a subtype of `request` for decoding bodies, which also has these fields."""
    added = [(name, msgspec.Raw, _ABSENT) for name in fields]
    subtype = msgspec.defstruct(request.__name__, added, bases=(request,), frozen=True, kw_only=True)
    assert subtype.__struct_fields__[-len(fields) :] == tuple(fields)
    return cast("type[Request]", subtype)


def refuse_unserved(request: msgspec.Struct, fields: Fields, *, within: str = "") -> None:
    """Raise `InvalidRequest` for the first of these fields that is not off. `capturing` makes the type.

    `within`: the path of the object that has them, with a dot at its end.
    """
    values = msgspec.structs.astuple(request)[-len(fields) :]
    if values == (_ABSENT,) * len(fields):
        return
    for (name, field), value in zip(fields.items(), values, strict=True):
        if value is not _ABSENT and not _is_off(value, field.off):
            advice = f"; use {field.instead}" if field.instead else ""
            raise InvalidRequest(f"{within}{name}: is not served{advice}", param=within + name)


def notes(fields: Fields) -> str:
    """Return which fields are refused and which are ignored, in Markdown."""
    refused, ignored = (", ".join(f"`{name}`" for name in sorted(names)) for names in (fields, IGNORED))
    return (
        f"Models of our own engine refuse these fields, unless they are null or off: {refused}.\n\n"
        f"They ignore: {ignored}."
    )


def _is_off(value: msgspec.Raw, off: tuple[Any, ...]) -> bool:
    written = bytes(value)
    if len(written) > _MAX_OFF_LENGTH:
        return False
    try:
        decoded = msgspec.json.decode(written)
    except msgspec.DecodeError:  # half a surrogate pair
        return False
    return decoded is None or any(_same(decoded, neutral) for neutral in off)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where 0 is not false."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
