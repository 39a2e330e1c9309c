"""Encoding of one request's prompts: each within the model's limits, all together within the request's."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlySequence

from fairlead.api.body import too_many_tokens
from fairlead.api.dialects.dialect import GenerationRequest, Prompt
from fairlead.config import Limits, SpecialTokens
from fairlead.text.model import TextModel

LONG_PROMPT_TOKENS = 1024


def encode_prompts(
    model: TextModel,
    prompts: Iterable[Prompt],
    limits: Limits,
    param: str,
    *,
    special_tokens: SpecialTokens = "parse",
) -> tuple[ReadOnlySequence[int], ...]:
    """Return each prompt's token ids; a prompt may be ids already. Raises `InvalidRequest` for `param`."""
    encoded: list[ReadOnlySequence[int]] = []
    tokens = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = model.encode_prompt(prompt, special_tokens=special_tokens, param=param)
        else:
            ids = prompt
            model.check_prompt(ids, param=param)
        tokens += len(ids)
        if tokens > limits.request_tokens:
            raise too_many_tokens(tokens, param, limits)
        encoded.append(packed(ids))
    return tuple(encoded)


def encode_conversation(model: TextModel, request: GenerationRequest) -> list[int]:
    """Return the token ids of a request's chat. Raises `InvalidRequest`."""
    assert request.messages is not None
    return model.encode_chat(
        request.messages,
        tools=request.tools,
        variables=request.template_variables,
        continuation=request.continuation,
    )


def packed(ids: ReadOnlySequence[int]) -> ReadOnlySequence[int]:
    """Return many ids as an array of four bytes each, the form that the engine takes."""
    return array("i", ids) if len(ids) >= LONG_PROMPT_TOKENS else ids
