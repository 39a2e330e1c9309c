"""Reads from a model's files whether it makes embeddings, and in which form. Used in the parent process.

`language/checkpoint/pooling.py` computes them in the model's process, and reads the same files.
"""

from pathlib import Path

import msgspec

from fairlead.language.checkpoint.checkpoint import open_checkpoint, read_config
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.registry import read_built_in
from fairlead.language.text.files import read_json

_FILE = "modules.json"


class EmbeddingSettings(msgspec.Struct, frozen=True):
    """The form of a model's embeddings: vectors of `width` numbers, of length 1 if `normalized`."""

    width: int
    normalized: bool


class _Module(msgspec.Struct):
    type: str


def read_embedding(path: Path) -> EmbeddingSettings | None:
    """Return the form of the embeddings of the checkpoint at `path`; None if it makes none.

    An embedding model has a `modules.json`, the list of its parts that sentence-transformers writes. Raises
    `LoadFailed`, which names the invalid file.
    """
    checkpoint = open_checkpoint(path)
    document = checkpoint.document(_FILE)
    if not document.is_file():
        return None
    modules = read_json(document, list[_Module])
    width = _read_width(read_config(checkpoint))
    return EmbeddingSettings(width, any(module.type.endswith(".Normalize") for module in modules))


def _read_width(config: CheckpointConfig) -> int:
    spec = read_built_in(config) if "architectures" in config else None
    if spec is not None:
        return spec.hidden_size
    text = config.section("text_config") if "text_config" in config else config
    return text.integer("hidden_size")
