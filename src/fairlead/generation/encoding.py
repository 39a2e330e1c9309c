"""Encoding of one request's prompts: each within the model's limits, all together within the request's."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlySequence
from typing import Any

from fairlead.base.config import Limits, SpecialTokens
from fairlead.base.errors import ContextLengthExceeded
from fairlead.dialects.body import too_many_tokens
from fairlead.dialects.dialect import GenerationRequest, Prompt, TextPairs
from fairlead.language.text.model import TextModel
from fairlead.language.text.truncation import Truncation

LONG_PROMPT_TOKENS = 1024
ROOM_FRACTION = 4
"""The part of the context that is left for an answer without a limit, if turns are left out for it."""

_SYSTEM = frozenset({"system", "developer"})


def encode_prompts(
    model: TextModel,
    prompts: Iterable[Prompt],
    limits: Limits,
    param: str,
    *,
    special_tokens: SpecialTokens = "parse",
    suffix: str = "",
    truncation: Truncation | None = None,
) -> tuple[ReadOnlySequence[int], ...]:
    """Return each prompt's token ids; a prompt may be ids already. Raises `InvalidRequest` for `param`.

    With a `suffix`, the prompts are for the text between each prompt, which is a text, and the suffix. With a
    `truncation`, prompts that are too long are cut.
    """
    encoded: list[ReadOnlySequence[int]] = []
    tokens = 0
    for prompt in prompts:
        if suffix:
            assert isinstance(prompt, str)
            ids = model.encode_infill(prompt, suffix, special_tokens=special_tokens)
        elif truncation is not None:
            if isinstance(prompt, str):
                ids = model.encode_truncated(prompt, truncation, special_tokens=special_tokens, param=param)
            else:
                ids = model.truncate_ids(prompt, truncation, param=param)
        elif isinstance(prompt, str):
            ids = model.encode_prompt(prompt, special_tokens=special_tokens, param=param)
        else:
            ids = prompt
            model.check_prompt(ids, param=param)
        tokens += len(ids)
        check_tokens(tokens, param, limits)
        encoded.append(pack_ids(ids))
    return tuple(encoded)


def encode_conversation(model: TextModel, request: GenerationRequest) -> list[int]:
    """Return the token ids of a request's chat. Raises `InvalidRequest`."""
    assert request.messages is not None
    if request.drops_turns:
        return _encode_latest(model, request, request.messages)
    return _encode(model, request, request.messages)


def _encode_latest(model: TextModel, request: GenerationRequest, messages: list[dict[str, Any]]) -> list[int]:
    """Return the ids of a chat, without its oldest turns if it is too long. System messages stay.

    A turn begins with a message of the user, so a call never loses its result. The turns that stay
    leave room for `max_tokens`, by default a quarter of the context. The last turn always stays.
    """
    starts = [at for at, message in enumerate(messages) if message["role"] == "user"]
    context = model.max_model_len
    room = min(request.max_tokens or context // ROOM_FRACTION, context // 2)

    def encode(turns: int) -> list[int] | None:
        """Return the ids without so many turns; None if they are too long."""
        try:
            ids = _encode(model, request, _without(messages, starts[turns] if turns else 0))
        except ContextLengthExceeded:
            return None
        return ids if len(ids) + room <= context else None

    last = len(starts) - 1
    if last < 1:
        return _encode(model, request, messages)
    if (ids := encode(0)) is not None:
        return ids
    # The least number of turns to leave out, between these two. Each attempt is a rendering.
    low, high, found = 1, last, None
    while low < high:
        middle = (low + high) // 2
        if (ids := encode(middle)) is None:
            low = middle + 1
        else:
            high, found = middle, ids
    return found or _encode(model, request, _without(messages, starts[low]))


def _without(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """Return the messages from an index on, after the system messages before it."""
    return [one for at, one in enumerate(messages) if at >= start or one["role"] in _SYSTEM]


def _encode(model: TextModel, request: GenerationRequest, messages: list[dict[str, Any]]) -> list[int]:
    return model.encode_chat(
        messages,
        tools=request.tools,
        variables=request.template_variables,
        continuation=request.continuation,
        add_generation_prompt=request.add_generation_prompt,
        continues_last=request.continues_last,
    )


def encode_pairs(
    model: TextModel, pairs: TextPairs, limits: Limits, truncation: Truncation | None = None
) -> tuple[ReadOnlySequence[int], ...]:
    """Return the token ids of each pair, for a model that scores pairs; for another those of each text.

    The first texts precede the second ones then. Raises `InvalidRequest` for the field of a text.
    """
    if model.scoring is None:
        firsts, seconds = (
            encode_prompts(model, texts, limits, param, truncation=truncation)
            for texts, param in zip((pairs.firsts, pairs.seconds), pairs.fields, strict=True)
        )
        encoded = (*firsts, *seconds)
        check_tokens(sum(map(len, encoded)), pairs.fields[1], limits)
        return encoded
    tokens, scored = 0, []
    queries = pairs.firsts * len(pairs.seconds) if len(pairs.firsts) == 1 else pairs.firsts
    for first, second in zip(queries, pairs.seconds, strict=True):
        if truncation is None:
            ids = model.encode_pair(first, second, fields=pairs.fields)
        else:
            ids = model.encode_truncated_pair(first, second, truncation, fields=pairs.fields)
        tokens += len(ids)
        check_tokens(tokens, pairs.fields[1], limits)
        scored.append(pack_ids(ids))
    return tuple(scored)


def check_tokens(tokens: int, param: str, limits: Limits) -> None:
    """Raise `InvalidRequest` of `param` for more tokens than one request may have."""
    if tokens > limits.request_tokens:
        raise too_many_tokens(tokens, param, limits)


def pack_ids(ids: ReadOnlySequence[int]) -> ReadOnlySequence[int]:
    """Return many ids as an array of four bytes each, the form that the engine takes."""
    return array("i", ids) if len(ids) >= LONG_PROMPT_TOKENS else ids
