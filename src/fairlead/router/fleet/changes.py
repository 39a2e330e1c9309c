"""The differences between two configurations in their models and nodes. Pure."""

from collections.abc import Mapping
from typing import Any

from fairlead.base.config import Config
from fairlead.router.fleet.status import ConfigChanges


def changes_between(old: Config, new: Config) -> ConfigChanges:
    """Return the names of added, changed and removed models and nodes, in the order of the files."""
    models = _differences(
        {model.name: model for model in old.models}, {model.name: model for model in new.models}
    )
    nodes = _differences({node.id: node for node in old.nodes}, {node.id: node for node in new.nodes})
    names = {f"models_{change}": found for change, found in models.items()}
    return ConfigChanges(**names, **{f"nodes_{change}": found for change, found in nodes.items()})


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {
        "added": tuple(name for name in new if name not in old),
        "changed": tuple(name for name in new if name in old and old[name] != new[name]),
        "removed": tuple(name for name in old if name not in new),
    }
