"""Whether a model makes vectors of texts, and what they are like: what the parent reads of its files.

How they are made is `models/pooling.py`'s, in the model's process, which reads the same files.
"""

from pathlib import Path

import msgspec

from fairlead.errors import LoadFailed
from fairlead.text.files import read_json

_FILE = "modules.json"


class Embedding(msgspec.Struct, frozen=True):
    """A model's vectors: `width` numbers each, of length 1 if `normalized`."""

    width: int
    normalized: bool


class _Module(msgspec.Struct):
    type: str


class _Text(msgspec.Struct):
    hidden_size: int | None = None


class _Config(_Text):
    text_config: _Text | None = None


def read_embedding(path: Path) -> Embedding | None:
    """Return what the model in the directory `path` makes of texts; None if it was not made for that.

    It was if there is a `modules.json`, the list of its parts that sentence-transformers writes. `LoadFailed`
    names the file at fault.
    """
    if not (path / _FILE).is_file():
        return None
    modules = read_json(path / _FILE, list[_Module])
    config = read_json(path / "config.json", _Config)
    width = (config.text_config or config).hidden_size
    if width is None or width < 1:
        raise LoadFailed(f"{path / 'config.json'}: hidden_size is missing: how long are the vectors?")
    return Embedding(width, any(module.type.endswith(".Normalize") for module in modules))
