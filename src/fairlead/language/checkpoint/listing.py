"""A checkpoint that is a folder of Hugging Face's layout with safetensors: one file, or shards with an index.

Reads headers only. `language/checkpoint/checkpoint.py` has the protocol.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.quantized.schemes import read_scheme
from fairlead.language.checkpoint.quantized.tensors import join_parts
from fairlead.language.checkpoint.tensor_file import StoredTensor, TensorFile

if TYPE_CHECKING:
    from fairlead.language.checkpoint.checkpoint import CheckpointTensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorListing(NamedTuple):
    """The `tensors` of a checkpoint by name, and the `path` of the file that lists them."""

    path: Path
    tensors: Mapping[str, "CheckpointTensor"]


class SafetensorsFolder(NamedTuple):
    """`Checkpoint` of a folder."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Return the checkpoint in a folder; None if there is no folder."""
        return cls(path) if path.is_dir() else None

    @property
    def created(self) -> int:
        config = self.document("config.json")
        try:
            return int(config.stat().st_mtime)
        except OSError as error:
            raise LoadFailed(f"{config}: {error.strerror or error}") from error

    def document(self, name: str) -> Path:
        return self.path / name

    def documents(self, pattern: str) -> list[Path]:
        return sorted(self.path.glob(pattern))

    def tensors(self) -> TensorListing:
        path, tensors = list_tensors(self.path)
        config = self.document("config.json")
        scheme = read_scheme(CheckpointConfig.read(config)) if config.is_file() else None
        return TensorListing(path, tensors if scheme is None else join_parts(tensors, scheme))


def list_tensors(directory: Path) -> tuple[Path, Mapping[str, StoredTensor]]:
    """Return the tensors in `directory`, and the file that lists them.

    Raises `LoadFailed` if a file is missing or broken.
    """
    index, single = directory / _INDEX, directory / _SINGLE
    if index.is_file():
        return index, _open_shards(index)
    if single.exists():
        return single, TensorFile(single).tensors
    if any(found for pattern in _PICKLED for found in directory.glob(pattern)):
        raise LoadFailed(
            f"{directory}: only pickled weights here; safetensors are needed, pickle is never read"
        )
    raise LoadFailed(f"{directory}: neither {_SINGLE} nor {_INDEX} is here")


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    """Open the shards that an index names; both must list the same tensors."""
    shards, tensors = _read_shards(index), dict[str, StoredTensor]()
    for shard in sorted(set(shards.values())):
        for name, tensor in TensorFile(index.with_name(shard)).tensors.items():
            if name in tensors:
                raise tensor.fails(f"is also in {tensors[name].file.path.name}")
            if name not in shards:
                raise tensor.fails(f"is not in {index.name}")
            tensors[name] = tensor
    for name, shard in shards.items():
        if name not in tensors or tensors[name].file.path.name != shard:
            path = index.with_name(shard)
            raise LoadFailed(f"{path}: tensor {name!r} is missing, but the index lists it here")
    return tensors


def _read_shards(index: Path) -> Mapping[str, str]:
    """Return the file of each tensor. All files must be beside the index."""
    entries = CheckpointConfig.read(index)
    shards = entries.names("weight_map")
    missing = []
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard or shard in {"", ".", ".."}:
            raise entries.fails("weight_map", f"{shard!r} is not a file beside it")
        try:
            is_there = index.with_name(shard).exists()
        except (OSError, ValueError):  # ValueError: a null character
            is_there = False
        if not is_there:
            missing.append(shard)
    if missing:
        others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise entries.fails("weight_map", f"{missing[0]}{others} missing")
    return shards
