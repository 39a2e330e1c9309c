"""From a parsed body to the parts of a `Job`: messages, prompts, sampling. Checks what depends on the model.

Pure: does not know HTTP and encodes nothing. Every refusal is an `InvalidRequest` that names the field.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from fairlead.api import schemas
from fairlead.errors import InvalidRequest
from fairlead.job import Sampling
from fairlead.text.model import TextModel

# Entries that one request may list: each takes some 60 bytes of JSON.
MAX_PROMPT_LOGPROBS = 512 * 1024

Prompt = str | list[int]
Value = TypeVar("Value")


def refuse(param: str, reason: str) -> InvalidRequest:
    """Return the error that names the field and its fault."""
    return InvalidRequest(f"{param}: {reason}", param=param)


# Before encoding -----------------------------------------------------------------------------------


def check_generation(wanted: schemas.Generation, *, prompts: int, sequences: int) -> int:
    """Refuse options that are not served, and more than `sequences` per request; return `n`."""
    if wanted.response_format is not None and wanted.response_format.type != "text":
        raise refuse("response_format", "only the type 'text' is served")
    if wanted.stream_options is not None and not wanted.stream:
        raise refuse("stream_options", "only makes sense with stream: true")
    if wanted.prompt_logprobs is not None and wanted.stream:
        raise refuse("prompt_logprobs", "is not served with stream: true")
    n = wanted.n or 1
    if prompts * n > sequences:
        param = "n" if n > 1 else "prompt"
        raise refuse(param, f"{prompts * n} answers were asked for; one request may have {sequences}")
    return n


def check_completion(wanted: schemas.CompletionRequest) -> None:
    """Refuse options of old completion models."""
    if wanted.suffix:
        raise refuse("suffix", "inserting text is not served")
    if wanted.best_of is not None and wanted.best_of != (wanted.n or 1):
        raise refuse("best_of", "must equal n")
    if wanted.max_tokens == 0 and not wanted.echo:
        raise refuse("max_tokens", "must be at least 1, unless echo is true")


def check_tokenize(wanted: schemas.TokenizeRequest) -> None:
    """Refuse fields that have no meaning for a prompt, or for messages."""
    if (wanted.prompt is None) == (wanted.messages is None):
        raise refuse("prompt", "either prompt or messages must be given")
    if wanted.messages is not None and wanted.special_tokens is not None:
        raise refuse("special_tokens", "only makes sense with prompt; for messages the model's setting holds")
    if wanted.messages is not None and wanted.add_special_tokens:
        raise refuse("add_special_tokens", "only makes sense with prompt; a chat template writes its own")


def chat_logprobs(wanted: schemas.ChatCompletionRequest) -> int | None:
    """Return the number of alternatives to list per token; None if no log-probabilities are requested."""
    if wanted.top_logprobs and not wanted.logprobs:
        raise refuse("top_logprobs", "needs logprobs: true")
    return (wanted.top_logprobs or 0) if wanted.logprobs else None


def chat_tools(wanted: schemas.ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """Return the tools for the chat template; None if there are none or the model must not use them."""
    if wanted.tool_choice not in (None, "none", "auto"):
        raise refuse("tool_choice", "only 'none' and 'auto' are served")
    return None if wanted.tool_choice == "none" else template_tools(wanted.tools)


def template_tools(tools: list[schemas.Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as chat templates read them."""
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise refuse(f"tools[{index}].type", "only 'function' is served")
    return [{"type": tool.type, "function": _given(tool.function)} for tool in tools] if tools else None


def template_messages(messages: list[schemas.Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them, with the role `system` for `developer`."""
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: schemas.Message, path: str) -> dict[str, Any]:
    role = str(message.__struct_config__.tag)
    # Few templates know OpenAI's newer name, and some refuse unknown roles.
    written = {"role": "system" if role == "developer" else role, **_given(message)}
    if isinstance(message.content, list):
        written["content"] = [
            _template_part(part, f"{path}.content[{index}]") for index, part in enumerate(message.content)
        ]
    if isinstance(message, schemas.AssistantMessage) and message.tool_calls:
        written["tool_calls"] = [
            {**_given(call), "function": _given(call.function)} for call in message.tool_calls
        ]
    return written


def _template_part(part: schemas.ContentPart, path: str) -> dict[str, str]:
    if part.type != "text":
        raise refuse(f"{path}.type", f"parts of type {part.type[:50]!r} are not served, only 'text'")
    if part.text is None:
        raise refuse(f"{path}.text", "is missing")
    return {"type": "text", "text": part.text}


def _given(fields: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are set. Not recursive: JSON schemas may be nested as deep as Python goes."""
    return {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}


def completion_prompts(prompt: str | list[Any]) -> list[Prompt]:
    """Return the prompts, each a text or token ids, from any of the four forms OpenAI allows."""
    kinds = {str} if isinstance(prompt, str) else set(map(type, prompt))
    if len(kinds) > 1:
        raise refuse("prompt", "must be a text, token ids, or a list of either, all of one kind")
    prompts = [prompt] if isinstance(prompt, str) or kinds == {int} else prompt
    if not prompts or "" in prompts:
        raise refuse("prompt", "is empty")
    return prompts


# After encoding ------------------------------------------------------------------------------------


def check_token_ids(token_ids: list[int], model: TextModel, param: str) -> None:
    """Refuse ids that are not in the model's vocabulary."""
    size = model.tokenizer.vocab_size
    if max(token_ids) >= size:
        raise refuse(param, f"{max(token_ids)} is not a token id; this model has {size}")


def prompt_logprobs(wanted: schemas.Generation, prompts: Sequence[Sequence[int]], n: int) -> int | None:
    """Return the number of alternatives to list per token of the prompts; None if none are requested.

    `echo` requests as many as `logprobs` does. Raises `InvalidRequest` if the response would be too long.
    """
    asked = {"prompt_logprobs": wanted.prompt_logprobs}
    if isinstance(wanted, schemas.CompletionRequest) and wanted.echo:
        asked["logprobs"] = wanted.logprobs
    counts = {param: count for param, count in asked.items() if count is not None}
    if not counts:
        return None
    param = max(counts, key=counts.__getitem__)
    listed = n * sum(map(len, prompts)) * (counts[param] + 1)
    if listed > MAX_PROMPT_LOGPROBS:
        reason = f"{listed} log-probabilities of prompts were asked for; one request may have"
        raise refuse(param, f"{reason} {MAX_PROMPT_LOGPROBS}")
    return counts[param]


def sampling(
    wanted: schemas.Generation,
    model: TextModel,
    *,
    shortest_prompt: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Sampling:
    """Return the sampling parameters, with the model's defaults for those that the client does not set.

    `shortest_prompt` is in tokens. An answer may fill the rest of the model's context, up to a configured
    maximum: a larger `max_tokens` is reduced to that. Of several prompts the engine reduces it further for
    the longer ones.
    """
    longest = model.longest_answer(shortest_prompt)
    limit = longest if max_tokens is None else min(max(1, max_tokens), longest)
    if (wanted.min_tokens or 0) > limit:
        raise refuse("min_tokens", f"{wanted.min_tokens} is more than the answer may have: {limit}")
    bias, stop_token_ids = wanted.logit_bias or {}, wanted.stop_token_ids or []
    if bias:
        check_token_ids(list(bias), model, "logit_bias")
    if stop_token_ids:
        check_token_ids(stop_token_ids, model, "stop_token_ids")
    defaults = model.defaults
    return Sampling(
        max_tokens=limit,
        temperature=_either(wanted.temperature, defaults.temperature),
        top_p=_either(wanted.top_p, defaults.top_p),
        top_k=max(0, _either(wanted.top_k, defaults.top_k)),  # vLLM's -1 means off
        min_p=_either(wanted.min_p, defaults.min_p),
        seed=wanted.seed,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=bool(wanted.ignore_eos),
        min_tokens=wanted.min_tokens or 0,
        presence_penalty=wanted.presence_penalty or 0.0,
        frequency_penalty=wanted.frequency_penalty or 0.0,
        repetition_penalty=_either(wanted.repetition_penalty, defaults.repetition_penalty),
        logit_bias=bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def stop_strings(wanted: schemas.Generation) -> tuple[str, ...]:
    """Return the stop strings, from either form."""
    return (wanted.stop,) if isinstance(wanted.stop, str) else tuple(wanted.stop or ())


def _either(given: Value | None, default: Value) -> Value:
    return default if given is None else given
