"""Finds the files of a checkpoint's weights: safetensors, one file or shards with an index. Opens none."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from fairlead.errors import LoadFailed
from fairlead.models.config import CheckpointConfig

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class WeightListing(msgspec.Struct, frozen=True):
    """The files of the weights. `path` is the file that lists the tensors.

    `shards` has the file name of each tensor, as the index gives it; None if one file has all.
    """

    path: Path
    shards: Mapping[str, str] | None = None


def list_weights(directory: Path) -> WeightListing:
    """Return the files of the weights in `directory`. Raises `LoadFailed` if one is missing."""
    index, single = directory / _INDEX, directory / _SINGLE
    if index.is_file():
        return WeightListing(index, _read_shards(CheckpointConfig.read(index)))
    if single.exists():
        return WeightListing(single)
    if any(found for pattern in _PICKLED for found in directory.glob(pattern)):
        raise LoadFailed(
            f"{directory}: only pickled weights here; safetensors are needed, pickle is never read"
        )
    raise LoadFailed(f"{directory}: neither {_SINGLE} nor {_INDEX} is here")


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
