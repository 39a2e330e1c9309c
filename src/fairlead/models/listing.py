"""Finds the tensors of a checkpoint: safetensors, one file or shards with an index. Reads headers only."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import LoadFailed
from fairlead.models.config import CheckpointConfig
from fairlead.models.tensor_file import StoredTensor, TensorFile

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorListing(NamedTuple):
    """The `tensors` of a checkpoint by name, and the `path` of the file that lists them."""

    path: Path
    tensors: dict[str, StoredTensor]


def list_tensors(directory: Path) -> TensorListing:
    """Return the tensors in `directory`. Raises `LoadFailed` if a file is missing or broken."""
    index, single = directory / _INDEX, directory / _SINGLE
    if index.is_file():
        return TensorListing(index, _open_shards(CheckpointConfig.read(index)))
    if single.exists():
        return TensorListing(single, TensorFile(single).tensors)
    if any(found for pattern in _PICKLED for found in directory.glob(pattern)):
        raise LoadFailed(
            f"{directory}: only pickled weights here; safetensors are needed, pickle is never read"
        )
    raise LoadFailed(f"{directory}: neither {_SINGLE} nor {_INDEX} is here")


def _open_shards(index: CheckpointConfig) -> dict[str, StoredTensor]:
    """Open the shards that an index names; both must list the same tensors."""
    shards, tensors = _read_shards(index), dict[str, StoredTensor]()
    for shard in sorted(set(shards.values())):
        for name, tensor in TensorFile(index.path.with_name(shard)).tensors.items():
            if name in tensors:
                raise tensor.fails(f"is also in {tensors[name].file.path.name}")
            if name not in shards:
                raise tensor.fails(f"is not in {index.path.name}")
            tensors[name] = tensor
    for name, shard in shards.items():
        if name not in tensors or tensors[name].file.path.name != shard:
            path = index.path.with_name(shard)
            raise LoadFailed(f"{path}: tensor {name!r} is missing, but the index lists it here")
    return tensors


def _read_shards(index: CheckpointConfig) -> Mapping[str, str]:
    """Return the file of each tensor. All files must be beside the index."""
    shards = index.names("weight_map")
    missing = []
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard or shard in {"", ".", ".."}:
            raise index.fails("weight_map", f"{shard!r} is not a file beside it")
        try:
            is_there = index.path.with_name(shard).exists()
        except (OSError, ValueError):  # ValueError: a null character
            is_there = False
        if not is_there:
            missing.append(shard)
    if missing:
        others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise index.fails("weight_map", f"{missing[0]}{others} missing")
    return shards
