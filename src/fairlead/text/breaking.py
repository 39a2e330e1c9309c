"""Which tokens of a vocabulary are control tokens, and a tokenizer that encodes text with breaks in it.

See `control_tokens` for what a break is. Works on the Rust library's tokenizers; knows no text.
"""

import re
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import AddedToken, normalizers

from fairlead.text.control_tokens import BREAK

# Some authors do not mark such tokens as special.
_IN_BARS = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
# What replaces a break: nothing, unless the vocabulary has control tokens as words too (Unigram) and would
# find them in the text that is left.
_SEPARATORS = ("", "\u200b", " ")


def control_tokens(tokenizer: tokenizers.Tokenizer, named: Iterable[str] = ()) -> dict[str, int]:
    """Return the spelling and the id of each token that only a template is to write.

    These are the tokens that tokenizer.json marks as special, the `named` ones, and those spelled <|...|>.
    Not `<think>` or `<tool_call>`: clients see these in answers and send them back in their history.
    """
    marked = (
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special or _IN_BARS.fullmatch(token.content)
    )
    found = {token: tokenizer.token_to_id(token) for token in (*marked, *named)}
    # A single character cannot be told from the token that it spells.
    return {token: token_id for token, token_id in found.items() if token_id is not None and len(token) > 1}


def with_breaks(tokenizer: tokenizers.Tokenizer, control: dict[str, int]) -> tokenizers.Tokenizer:
    """Return a tokenizer that encodes as this one does, and removes breaks after it has found added tokens.

    The two share the model and its memory. Raises `ValueError` if the added tokens would have other ids.
    """
    for separator in _SEPARATORS:
        copy = tokenizers.Tokenizer(tokenizer.model)
        remove = normalizers.Replace(BREAK, separator)
        inner = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        copy.normalizer = normalizers.Sequence([remove, *inner])
        if tokenizer.pre_tokenizer is not None:
            copy.pre_tokenizer = tokenizer.pre_tokenizer
        if tokenizer.post_processor is not None:
            copy.post_processor = tokenizer.post_processor
        copy.add_tokens(list(_added(tokenizer, control)))
        if any(copy.token_to_id(token) != token_id for token, token_id in control.items()):
            raise ValueError("the ids of its added tokens do not follow those of its model")
        if not any(_is_word(copy, token, token_id) for token, token_id in control.items()):
            break
    return copy


def _added(tokenizer: tokenizers.Tokenizer, control: dict[str, int]) -> Iterator[AddedToken]:
    """Yield the added tokens in the order of their ids, so that they are given the same ids again.

    Control tokens must be found before the text is normalized, because breaks are removed then.
    """
    for _, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        yield AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and token.content not in control,
            special=token.special,
        )


def _is_word(tokenizer: tokenizers.Tokenizer, token: str, token_id: int) -> bool:
    """Tell whether a spelling with a break in it still becomes the token, other than as what is unknown."""
    try:
        broken = tokenizer.encode(token[0] + BREAK + token[1:], add_special_tokens=False).ids
        unknown = tokenizer.encode(BREAK[0], add_special_tokens=False).ids
    except Exception:  # noqa: BLE001 — a vocabulary may have no token for what is unknown
        return False
    return token_id in broken and token_id not in unknown
