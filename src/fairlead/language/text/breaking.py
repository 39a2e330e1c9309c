"""Finds the control tokens of a vocabulary, and makes a tokenizer that encodes text with breaks in it.

See `control_tokens` for what a break is. Works on the Rust library's tokenizers, independently of texts.
"""

import re
from collections.abc import Collection, Container

import tokenizers
from tokenizers import AddedToken, normalizers

from fairlead.language.text.control_tokens import BREAK
from fairlead.language.text.infill import INFILL_MARKS

# Some models do not mark such tokens as special.
_IN_BARS = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
# The replacements of a break, of which the first possible one is used: nothing, unless the model also has
# control tokens as words (Unigram) and would find them in the remaining text.
_SEPARATORS = ("", "\u200b", " ")


def control_tokens(tokenizer: tokenizers.Tokenizer, named: Collection[str] = ()) -> dict[str, int]:
    """Return the spelling and the id of each token that only a template may write.

    These are the added tokens that are marked as special, that are `named`, that are spelled <|...|>, or that
    mark infilling. Not `<think>` or `<tool_call>`: clients get these in answers and send them back in their
    history.
    """
    named = {*named, *INFILL_MARKS}
    return {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or token.content in named or _IN_BARS.fullmatch(token.content)
        if len(token.content) > 1  # a break cannot split a single character
    }


def with_breaks(tokenizer: tokenizers.Tokenizer, control: dict[str, int]) -> tokenizers.Tokenizer:
    """Return a tokenizer that encodes like this one, but removes breaks after it has matched added tokens.

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
        # Added in the order of their ids, they get the same ids again.
        if any(copy.token_to_id(token.content) != token_id for token_id, token in added.items()):
            raise ValueError("the ids of its added tokens do not follow those of its model")
        if not _words(copy, control):
            break
    return copy


def _unnormalized(token: AddedToken, control: Container[str]) -> AddedToken:
    """Return the token. A control token is matched before normalization, which removes the breaks."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and token.content not in control,
        special=token.special,
    )


def _words(tokenizer: tokenizers.Tokenizer, control: dict[str, int]) -> set[int]:
    """Return the control tokens that result even from spellings with a break, except the unknown token."""
    broken = (token[0] + BREAK + token[1:] for token in control)
    text = " ".join(f"{spelling} x{spelling}x" for spelling in broken)
    try:
        found, unknown = tokenizer.encode_batch_fast([text, BREAK[0]], add_special_tokens=False)
    except Exception:  # noqa: BLE001 — a vocabulary may have no unknown token
        return set()
    return set(control.values()) & set(found.ids) - set(unknown.ids)
