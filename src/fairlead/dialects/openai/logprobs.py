"""Log-probabilities as OpenAI's and vLLM's responses list them. Does not know choices or chunks."""

from collections.abc import Sequence as ReadOnlySequence
from typing import Any, NamedTuple

from fairlead.base.job import TokenLogprob
from fairlead.language.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for an impossible token.
MIN_LOGPROB = -9999.0


class Scored(NamedTuple):
    """Tokens with their log-probabilities, for `completion_logprobs`.

    logprobs: The tokens.
    first: A token before them that has no log-probability, as the first one of a prompt; None: there is none.
    text: The shown text of a prompt, which may lack the first token.
    top: How many alternatives are listed beside each token; None: all that are known.
    """

    logprobs: ReadOnlySequence[TokenLogprob]
    first: int | None = None
    text: str = ""
    top: int | None = None


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    """Return a chat's `logprobs`: an entry for each token of the answer."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {**entry(chosen.token_id, chosen.logprob), "top_logprobs": [entry(*other) for other in chosen.top]}
        for chosen in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, parts: ReadOnlySequence[Scored], *, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the four parallel lists, and the offset after them; offsets count the tokens' characters."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []

    def add(token: str, value: float | None, top: dict[str, float] | None, length: int) -> None:
        nonlocal offset
        tokens.append(token)
        values.append(value)
        tops.append(top)
        offsets.append(offset)
        offset += length

    for part in parts:
        if part.first is not None:
            token = tokenizer.token(part.first)
            add(token, None, None, len(token) if part.text.startswith(token) else 0)
        for chosen in part.logprobs:
            token, value = tokenizer.token(chosen.token_id), max(chosen.logprob, MIN_LOGPROB)
            top = {token: value}
            for token_id, logprob in chosen.top[: part.top]:
                if token_id != chosen.token_id:
                    name = tokenizer.token(token_id)
                    # Different tokens can have the same text, and none may replace a likelier one.
                    top[f"token_id:{token_id}" if name in top else name] = max(logprob, MIN_LOGPROB)
            add(token, value, top, len(token))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def prompt_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of a prompt, its entry and the likeliest ones, by id.

    The first token has none. Ranks count from 1, the likeliest.
    """
    listed: list[dict[str, Any] | None] = [None]
    for chosen in logprobs:
        ranks = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(chosen.top, 1)}
        entries = {chosen.token_id: (chosen.logprob, chosen.rank), **ranks}
        entries[chosen.token_id] = chosen.logprob, chosen.rank
        listed.append(
            {
                str(token_id): {
                    "logprob": max(logprob, MIN_LOGPROB),
                    "rank": rank,
                    "decoded_token": tokenizer.token(token_id),
                }
                for token_id, (logprob, rank) in entries.items()
            }
        )
    return listed
