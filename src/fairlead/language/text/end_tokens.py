"""Finds the tokens that end an answer, in the three files that may name them and in the chat template.

Fine-tunes often name them in one file only: their makers add a token to the tokenizer, and leave the other
files of the base model as they are. So all files count, whichever transformers would prefer. Both the parent
and the model's process find them by this function: with fronts, the dispatcher between them has no tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fairlead.base.errors import InvalidRequest
from fairlead.language.checkpoint.checkpoint import open_checkpoint, read_config
from fairlead.language.checkpoint.generation import read_end_ids, read_generation
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.files import read_special_tokens
from fairlead.language.text.settings import read_vocab_size
from fairlead.language.text.tokenizer import Tokenizer

_PROBE = "fairlead probe"
_PARTS: tuple[dict[str, Any], ...] = (
    dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "b"),
    # Mistral's templates accept ids of nine letters only.
    {"tool_calls": [{"id": "probecall", "type": "function", "function": {"name": "f", "arguments": {}}}]},
)
"""What an assistant's turn may have beside its content."""


class EndTokens(msgspec.Struct, frozen=True):
    """The ids that end an answer. `ignored`: those that a file names but the network lacks, for a warning."""

    ids: frozenset[int]
    ignored: tuple[int, ...] = ()


def read_end_tokens(model: Path, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> EndTokens:
    """Return the end tokens of the checkpoint at `model`. Raises `LoadFailed`, which names the invalid file.

    tokenizer: its vocabulary; None: it has no readable one, and only the ids in its files count.
    template: its chat template, which may end a turn with a token that no file names.
    """
    checkpoint = open_checkpoint(model)
    config = read_config(checkpoint)
    named = set(read_end_ids(config, read_generation(checkpoint)))
    if tokenizer is not None:
        token = read_special_tokens(checkpoint).get("eos_token")
        end = None if template is None else _end_of_turn(template, tokenizer)
        ids = (tokenizer.token_id(text) for text in (token, end) if text is not None)
        named.update(token_id for token_id in ids if token_id is not None)
    vocab_size = read_vocab_size(config)
    ignored = {token_id for token_id in named if vocab_size is not None and token_id >= vocab_size}
    return EndTokens(frozenset(named - ignored), tuple(sorted(ignored)))


def _end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """Return the control token with which a template ends an assistant's turn; None if that is not certain.

    The last turn of a chat is written as the model was trained to write it. The token ends it only if it is
    all that follows the content, and if reasoning or a call before that end adds no other: a token that ends
    each part of a turn does not end the answer.
    """
    plain = _rendered(template, {})
    if plain is None:
        return None
    _, probe, rest = plain.rpartition(_PROBE)
    end = rest.strip()
    if not probe or end not in tokenizer.control_tokens:
        return None
    others = [text for part in _PARTS if (text := _rendered(template, part)) is not None]
    return end if all(text.count(end) == plain.count(end) for text in others) else None


def _rendered(template: ChatTemplate, part: Mapping[str, Any]) -> str | None:
    """Return a chat that ends with an assistant's turn with another part; None if the template refuses it."""
    answer = {"role": "assistant", "content": _PROBE, **part}
    try:
        return str(template.render([{"role": "user", "content": "a"}, answer], add_generation_prompt=False))
    except InvalidRequest:  # such as a template for pairs of texts
        return None
