"""Infilling: a model writes the text between a prefix and a suffix, if its vocabulary has tokens for that.

The tokens mark where each part begins. Some models were trained with the suffix first. Independent of
tokenizers: the parts are token ids.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec


class InfillSpelling(NamedTuple):
    """The marks of one group of models, as they are spelled in vocabularies.

    prefix: before the text that precedes the middle.
    suffix: before the text that follows it.
    middle: ends the prompt; may be empty.
    suffix_first: whether the suffix precedes the prefix.
    ends: tokens that such models write after the middle.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that there are, in the order of the fields."""
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))


SPELLINGS = (
    # Qwen2.5-Coder and later Qwen, CodeGemma, Granite 4
    InfillSpelling(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=(
            *("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|fim_pad|>"),
            *("<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
        ),
    ),
    # StarCoder, Granite Code
    InfillSpelling(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<file_sep>", "<filename>", "<repo_name>", "<reponame>"),
    ),
    # SantaCoder
    InfillSpelling("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")),
    # DeepSeek-Coder
    InfillSpelling(
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
        ends=("<｜end▁of▁sentence｜>", "<|EOT|>"),
    ),
    # Code Llama
    InfillSpelling("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # Codestral
    InfillSpelling("[PREFIX]", "[SUFFIX]", suffix_first=True),
    # GLM-4 and CodeGeeX4
    InfillSpelling(
        "<|code_prefix|>",
        "<|code_suffix|>",
        "<|code_middle|>",
        suffix_first=True,
        ends=("<|endoftext|>", "<|user|>"),
    ),
)

INFILL_MARKS = frozenset(mark for spelling in SPELLINGS for mark in spelling.marks)
"""The spellings of all marks. They are control tokens, which clients cannot write in text."""


class InfillTokens(msgspec.Struct, frozen=True):
    """The ids of a model's marks.

    prefix: before the text that precedes the middle.
    suffix: before the text that follows it.
    middle: ends the prompt; None: there is none.
    suffix_first: whether the suffix precedes the prefix.
    ends: ids that end the text in the middle, beside the model's own.
    """

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: tuple[int, ...]

    @classmethod
    def find(cls, control_tokens: Mapping[str, int]) -> "InfillTokens | None":
        """Return the marks among a vocabulary's control tokens, by spelling; None if it has none."""
        for spelling in SPELLINGS:
            if all(mark in control_tokens for mark in spelling.marks):
                ids = [control_tokens[mark] for mark in spelling.marks]
                ends = [control_tokens[end] for end in spelling.ends if end in control_tokens]
                middle = ids[2] if spelling.middle else None
                return cls(ids[0], ids[1], middle, spelling.suffix_first, (*ids, *ends))
        return None

    def prompt(self, begin: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt for the text between; `begin`: the ids that every prompt begins with."""
        before, after = (self.prefix, *prefix), (self.suffix, *suffix)
        parts = (*after, *before) if self.suffix_first else (*before, *after)
        return [*begin, *parts] if self.middle is None else [*begin, *parts, self.middle]
