"""Reads from a model's files whether it makes embeddings, and in which form. Used in the parent process.

`models/pooling.py` computes them in the model's process, and reads the same files.
"""

from pathlib import Path

import msgspec

from fairlead.errors import LoadFailed
from fairlead.text.files import read_json

_FILE = "modules.json"


class EmbeddingSettings(msgspec.Struct, frozen=True):
    """The form of a model's embeddings: vectors of `width` numbers, of length 1 if `normalized`."""

    width: int
    normalized: bool


class _Module(msgspec.Struct):
    type: str


class _Text(msgspec.Struct):
    hidden_size: int | None = None


class _Config(_Text):
    text_config: _Text | None = None


def read_embedding(path: Path) -> EmbeddingSettings | None:
    """Return the form of the embeddings of the model in the directory `path`; None if it makes none.

    An embedding model has a `modules.json`, the list of its parts that sentence-transformers writes. Raises
    `LoadFailed`, which names the invalid file.
    """
    if not (path / _FILE).is_file():
        return None
    modules = read_json(path / _FILE, list[_Module])
    config = read_json(path / "config.json", _Config)
    width = (config.text_config or config).hidden_size
    if width is None or width < 1:
        raise LoadFailed(f"{path / 'config.json'}: hidden_size, the length of the vectors, is missing")
    return EmbeddingSettings(width, any(module.type.endswith(".Normalize") for module in modules))
