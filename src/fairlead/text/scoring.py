"""Reads from a model's files whether it scores pairs of texts (a cross-encoder), and how.

Used in the parent process. `models/network.py` computes the scores in the model's process.
"""

import math
from pathlib import Path

import msgspec

from fairlead.errors import LoadFailed
from fairlead.text.chat_template import ChatTemplate, Message
from fairlead.text.files import read_json

_ARCHITECTURE = "ForSequenceClassification"
_ROLES = frozenset({"query", "document"})


class ScoringSettings(msgspec.Struct, frozen=True):
    """How a model scores pairs of texts.

    `uses_template`: its chat template writes messages of the roles "query" and "document". Otherwise the
    tokenizer joins the texts. `is_probability`: a score is the sigmoid of what the model computes.
    """

    uses_template: bool
    is_probability: bool

    def score(self, number: float) -> float:
        """Return the score for what the model has computed."""
        # The same as 1 / (1 + exp(-number)), which could overflow.
        return (1 + math.tanh(number / 2)) / 2 if self.is_probability else number


class _CrossEncoder(msgspec.Struct):
    activation_fn: str | None = None


class _Config(msgspec.Struct):
    architectures: list[str] | None = None
    sentence_transformers: _CrossEncoder | None = None
    sbert_ce_default_activation_function: str | None = None


def read_scoring(path: Path, template: ChatTemplate | None) -> ScoringSettings | None:
    """Return how the model in the directory `path` scores pairs of texts; None if it does not.

    The activation is named by sentence-transformers' entries in config.json; a sigmoid if there are none.
    Raises `LoadFailed`, which names the file, for another one than a sigmoid or the identity.
    """
    config = read_json(path / "config.json", _Config)
    if not any(name.endswith(_ARCHITECTURE) for name in config.architectures or ()):
        return None
    named = (config.sentence_transformers or _CrossEncoder()).activation_fn
    activation = (named or config.sbert_ce_default_activation_function or "Sigmoid").rpartition(".")[2]
    if activation not in ("Sigmoid", "Identity"):
        raise LoadFailed(f"{path / 'config.json'}: only Sigmoid and Identity are supported, not {activation}")
    uses_template = template is not None and template.literals >= _ROLES
    return ScoringSettings(uses_template, activation == "Sigmoid")


def pair_messages(first: str, second: str) -> list[Message]:
    """Return two texts as messages for a chat template that writes pairs."""
    return [{"role": "query", "content": first}, {"role": "document", "content": second}]
