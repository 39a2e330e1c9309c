"""From a generation request to the sampling parameters of its job: the model's defaults, and its limits.

Pure. Every refusal is an `InvalidRequest` that names the field.
"""

from collections.abc import Sequence

import msgspec

from fairlead.base.job import Sampling
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import GenerationRequest
from fairlead.dialects.fields import SamplingParameters
from fairlead.language.text.model import TextModel

# Entries that one request may list: each takes some 60 bytes of JSON.
MAX_PROMPT_LOGPROBS = 512 * 1024

_PARAMETERS = tuple(
    name for name in SamplingParameters.__struct_fields__ if name in Sampling.__struct_fields__
)


def sampling_of(request: GenerationRequest, model: TextModel, prompts: Sequence[Sequence[int]]) -> Sampling:
    """Return the sampling parameters, with the model's defaults for those that the client does not set.

    An answer may fill the rest of the model's context, up to a configured maximum: a larger `max_tokens` is
    reduced to that. It is computed for the shortest prompt; the engine reduces it for longer ones.
    """
    requested = request.sampling
    longest = model.longest_answer(min(map(len, prompts)))
    limit = longest if request.max_tokens is None else min(max(1, request.max_tokens), longest)
    if (requested.min_tokens or 0) > limit:
        raise invalid_field("min_tokens", f"{requested.min_tokens} is more than the answer may have: {limit}")
    model.check_token_ids(requested.logit_bias or (), param="logit_bias")
    model.check_token_ids(requested.stop_token_ids or (), param="stop_token_ids")
    model.check_token_ids(requested.allowed_token_ids or (), param="allowed_token_ids")
    values = msgspec.structs.asdict(model.defaults)
    for name in _PARAMETERS:
        if (value := getattr(requested, name)) is not None:
            values[name] = value
    values["top_k"] = max(0, values["top_k"])  # vLLM's -1 means off
    if request.suffix and model.infill is not None and not requested.ignore_eos:
        values["stop_token_ids"] = (*(requested.stop_token_ids or ()), *model.infill.ends)
    values["prompt_logprobs"] = _prompt_logprobs(request, prompts)
    return Sampling(max_tokens=limit, logprobs=request.logprobs, **values)


def default_sampling(model: TextModel) -> Sampling:
    """Return the parameters of an answer whose request sets none, as long as the context allows."""
    values = msgspec.structs.asdict(model.defaults)
    return Sampling(max_tokens=max(1, model.longest_answer(1)), **values)


def _prompt_logprobs(request: GenerationRequest, prompts: Sequence[Sequence[int]]) -> int | None:
    """Return the number of alternatives to list per token of the prompts; None if none are requested."""
    count = request.prompt_logprobs
    if count is None:
        return None
    listed = request.n * sum(map(len, prompts)) * (count + 1)
    if listed > MAX_PROMPT_LOGPROBS:
        param = "prompt_logprobs" if count == request.sampling.prompt_logprobs else "logprobs"
        reason = f"{listed} log-probabilities of prompts were requested; one request may have"
        raise invalid_field(param, f"{reason} {MAX_PROMPT_LOGPROBS}")
    return count
