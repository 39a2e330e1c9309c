"""Which tokens of a vocabulary are control tokens, and a tokenizer that encodes text with breaks in it.

See `control_tokens` for what a break is. Works on the Rust library's tokenizers; knows no text.
"""

import re
from collections.abc import Collection, Container

import tokenizers
from tokenizers import AddedToken, normalizers

from fairlead.text.control_tokens import BREAK

# Some authors do not mark such tokens as special.
_IN_BARS = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
# What replaces a break: nothing, unless the vocabulary has control tokens as words too (Unigram) and would
# find them in the text that is left.
_SEPARATORS = ("", "\u200b", " ")


def control_tokens(tokenizer: tokenizers.Tokenizer, named: Collection[str] = ()) -> dict[str, int]:
    """Return the spelling and the id of each token that only a template is to write.

    These are the added tokens that are marked as special, that are `named`, or that are spelled <|...|>. Not
    `<think>` or `<tool_call>`: clients see these in answers and send them back in their history.
    """
    return {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or token.content in named or _IN_BARS.fullmatch(token.content)
        if len(token.content) > 1  # a single character cannot be told from the token that it spells
    }


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
        added = tokenizer.get_added_tokens_decoder()
        copy.add_tokens([_unnormalized(added[token_id], control) for token_id in sorted(added)])
        # In the order of their ids, they are given the same ids again.
        if any(copy.token_to_id(token.content) != token_id for token_id, token in added.items()):
            raise ValueError("the ids of its added tokens do not follow those of its model")
        if not _words(copy, control):
            break
    return copy


def _unnormalized(token: AddedToken, control: Container[str]) -> AddedToken:
    """Return a control token such that it is found before text is normalized, because breaks go then."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and token.content not in control,
        special=token.special,
    )


def _words(tokenizer: tokenizers.Tokenizer, control: dict[str, int]) -> set[int]:
    """Return the control tokens that come of their spelling even with a break, other than as unknown."""
    broken = (token[0] + BREAK + token[1:] for token in control)
    text = " ".join(f"{spelling} x{spelling}x" for spelling in broken)
    try:
        found, unknown = tokenizer.encode_batch_fast([text, BREAK[0]], add_special_tokens=False)
    except Exception:  # noqa: BLE001 — a vocabulary may have no token for what is unknown
        return set()
    return set(control.values()) & set(found.ids) - set(unknown.ids)
