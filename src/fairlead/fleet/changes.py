"""The differences between two configurations in their models and nodes. Pure."""

from collections.abc import Mapping
from typing import Any

from fairlead.config import Config
from fairlead.fleet.status import ConfigChanges


def changes_between(old: Config, new: Config) -> ConfigChanges:
    """Return the names of added, changed and removed models and nodes, in the order of the files."""
    models = _differences(
        {model.name: model for model in old.models}, {model.name: model for model in new.models}
    )
    nodes = _differences({node.id: node for node in old.nodes}, {node.id: node for node in new.nodes})
    return ConfigChanges(
        models_added=models[0],
        models_changed=models[1],
        models_removed=models[2],
        nodes_added=nodes[0],
        nodes_changed=nodes[1],
        nodes_removed=nodes[2],
    )


Names = tuple[str, ...]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Names, Names, Names]:
    added = tuple(name for name in new if name not in old)
    changed = tuple(name for name in new if name in old and old[name] != new[name])
    removed = tuple(name for name in old if name not in new)
    return added, changed, removed
