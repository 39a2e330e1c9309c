"""Reads from a model's files whether it scores pairs of texts (a cross-encoder), and how.

Used in the parent process. `engine/models/network.py` computes the scores in the model's process.
"""

import math
from pathlib import Path

import msgspec

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.checkpoint import CONFIG, open_checkpoint
from fairlead.language.text.chat_template import ChatTemplate
from fairlead.language.text.files import read_json
from fairlead.language.text.template_limits import Message

_ARCHITECTURE = "ForSequenceClassification"
_MODULE = ".LogitScore"
_ROLES = frozenset({"query", "document"})


class ScoringSettings(msgspec.Struct, frozen=True):
    """How a model scores pairs of texts.

    `uses_template`: its chat template writes messages of the roles "query" and "document", after a system
    message with the `prompt`, if there is one. Otherwise the tokenizer joins the texts. `is_probability`: a
    score is the sigmoid of what the model computes.
    """

    uses_template: bool
    is_probability: bool
    prompt: str = ""

    def score(self, number: float) -> float:
        """Return the score for what the model has computed."""
        # The same as 1 / (1 + exp(-number)), which could overflow.
        return (1 + math.tanh(number / 2)) / 2 if self.is_probability else number

    def messages(self, first: str, second: str) -> list[Message]:
        """Return two texts as messages for a chat template that writes pairs."""
        system = [{"role": "system", "content": self.prompt}] if self.prompt else []
        return [*system, {"role": "query", "content": first}, {"role": "document", "content": second}]


class _Module(msgspec.Struct):
    type: str


class _CrossEncoder(msgspec.Struct):
    """What sentence-transformers writes of a cross-encoder, in a file of its own or in config.json."""

    activation_fn: str | None = None
    default_prompt_name: str | None = None
    prompts: dict[str, str] = {}

    @property
    def prompt(self) -> str:
        return self.prompts.get(self.default_prompt_name or "", "")


class _Config(msgspec.Struct):
    architectures: list[str] | None = None
    sentence_transformers: _CrossEncoder | None = None
    sbert_ce_default_activation_function: str | None = None


def read_scoring(path: Path, template: ChatTemplate | None) -> ScoringSettings | None:
    """Return how the checkpoint at `path` scores pairs of texts; None if it does not.

    A model scores by a row in place of its head, or by the logits that its modules.json names. Its activation
    is the one that sentence-transformers wrote; a sigmoid if it wrote none. Raises `LoadFailed`, which names
    the file, for another one than a sigmoid or the identity.
    """
    checkpoint = open_checkpoint(path)
    config, modules = read_json(checkpoint.document(CONFIG), _Config), checkpoint.document("modules.json")
    kinds = [module.type for module in read_json(modules, list[_Module])] if modules.is_file() else []
    if not any(name.endswith(_ARCHITECTURE) for name in config.architectures or ()) and not any(
        kind.endswith(_MODULE) for kind in kinds
    ):
        return None
    own = checkpoint.document("config_sentence_transformers.json")
    settings = read_json(own, _CrossEncoder) if own.is_file() else _CrossEncoder()
    named = settings.activation_fn or (config.sentence_transformers or settings).activation_fn
    activation = (named or config.sbert_ce_default_activation_function or "Sigmoid").rpartition(".")[2]
    if activation not in ("Sigmoid", "Identity"):
        raise LoadFailed(f"{path}: only the activations Sigmoid and Identity are supported, not {named}")
    uses_template = template is not None and template.literals >= _ROLES
    if settings.prompt and not uses_template:
        raise LoadFailed(f"{own}: a default prompt is only supported with a chat template that writes pairs")
    return ScoringSettings(uses_template, activation == "Sigmoid", settings.prompt)
