"""How one model writes reasoning and tool calls, as its texts and grammars need it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead.base.job import AnswerParts, ReasoningLimit
from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.wire_format import WireFormat
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.structured.grammar import PLAIN, ReasoningState
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.probing import DetectedFormat, detect, reasoning_state
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.files import TokenizerConfig, read_json
from fairlead.language.text.tokenizer import Tokenizer

# The end of a prompt that is searched for marks of reasoning.
_PROMPT_END_TOKENS = 24
_PROMPT_END_CHARS = 200


@dataclass(frozen=True)
class AnswerFormat:
    """A model's wire format and the tokens of its marks.

    `special`: ids of special tokens by their text, None for those that end an answer. `mark_ids`: the special
    tokens in marks, which are text for the parser.
    """

    detected: DetectedFormat
    special: Mapping[str, int | None]
    mark_ids: frozenset[int]

    @classmethod
    def find(
        cls,
        path: Path,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        configured: str | Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
    ) -> "AnswerFormat":
        """Return the format of the model in a directory. Raises `ValueError` for a faulty configuration.

        path: the directory.
        template: the chat template; None: it has none.
        tokenizer: its tokenizer.
        eos_token_ids: the tokens that end an answer.
        configured: the name of a known format, or a record, which has precedence; None: neither.
        vocab_size: tokens from this one on are text, because the network lacks them; None: there are none.
        """
        known = tokenizer.special_ids
        if vocab_size is not None:
            known = frozenset(token_id for token_id in known if token_id < vocab_size)
        special = {
            text: None if token_id in eos_token_ids else token_id
            for text, token_id in tokenizer.control_tokens.items()
            if token_id in known
        }
        detected = detected_format(path, template, configured)
        marks = _texts_of_marks(detected.wire_format)
        shown = {
            token_id
            for text, token_id in tokenizer.control_tokens.items()
            if token_id in known and any(text in mark for mark in marks)
        }
        return cls(detected, special, frozenset(shown))

    @property
    def wire_format(self) -> WireFormat:
        return self.detected.wire_format

    def reasoning_at_the_end(self, prompt: Sequence[int], tokenizer: Tokenizer) -> ReasoningState:
        """Return the state of the reasoning at the end of a prompt."""
        end = tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        return reasoning_state(self.wire_format.reasoning, end)

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt ends within the reasoning of its answer."""
        return reasoning_state(self.wire_format.reasoning, prompt[-_PROMPT_END_CHARS:]) == "opened"

    def reasoning_limit(
        self, max_tokens: int, state: ReasoningState, tokenizer: Tokenizer
    ) -> ReasoningLimit | None:
        """Return a limit of the reasoning; None if the answer has none."""
        marks = self.wire_format.reasoning
        if marks is None or state == "closed":
            return None
        begin, end = pattern.texts(marks.open), pattern.texts(marks.close)
        if not begin or not end:
            return None
        opening, closing = (
            tuple(tokenizer.encode(texts[0], add_special_tokens=False)) for texts in (begin, end)
        )
        return ReasoningLimit(max_tokens, opening, closing, state == "opened")

    def parser(self, parts: AnswerParts) -> AnswerParser:
        """Return the parser of one answer."""
        return AnswerParser(self.wire_format, tools=parts.tools, in_reasoning=parts.in_reasoning)


def detected_format(
    path: Path, template: ChatTemplate | None, configured: str | Mapping[str, Any] | None = None
) -> DetectedFormat:
    """Return the wire format of the model in a directory; without a chat template it has no marks.

    Raises ValueError for a faulty configuration, and `LoadFailed`.
    """
    if template is None:
        return DetectedFormat(PLAIN, "default")
    file = open_checkpoint(path).document("tokenizer_config.json")
    record = read_json(file, TokenizerConfig).response_template if file.is_file() else None
    return detect(template.render, template.literals, record=record, configured=configured)


def _texts_of_marks(wire_format: WireFormat) -> list[str]:
    """Return the regular expressions of all marks without their escapes, in which texts are searched for."""
    calls = [] if wire_format.calls is None else [wire_format.calls]
    calls += [slip.syntax for slip in wire_format.slips]
    marks = [wire_format.reasoning, wire_format.content, *(one.marks for one in calls)]
    elements = [one for pair in marks if pair is not None for one in (pair.open, pair.close)]
    texts = [text for one in elements for text in pattern.all_texts(one)]
    return [*texts, *(text for one in calls for text in one.json.string_delimiters or ())]
