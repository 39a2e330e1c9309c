"""Whether a configuration file contains API keys, which other users of the machine should not read. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from fairlead.configfile.document import Document
from fairlead.configfile.macros import Expansion


def has_literal_keys(content: bytes) -> bool:
    """Return whether a valid configuration file has an API key that uses no variable.

    Parsing the file again with marked variables follows them through macros, anchors and merged mappings.
    """
    tree = Expansion().expand(Document(content, _Variables()).tree)
    return any(key is not None and _Variables.value not in str(key) for key in _api_keys(tree))


class _Variables(Mapping[str, str]):
    """An environment that has every variable, each with a value that no file contains."""

    value = "\ue002"

    def __getitem__(self, _name: str) -> str:
        return self.value

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _api_keys(tree: dict[str, Any]) -> Iterator[object]:
    """Yield the server's keys and those that it sends to nodes and peers; None for one without a key."""
    for raw in tree.get("apiKeys") or ():
        yield raw.get("key") if isinstance(raw, dict) else raw
    for node in (*(tree.get("nodes") or ()), *(tree.get("peers") or {}).values()):
        yield node.get("apiKey") if isinstance(node, dict) else None
