"""Whether a configuration file contains API keys, which other users of the machine should not read. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from fairlead.base.config.command_keys import keys_of
from fairlead.base.config.spelling import read_command, read_environment
from fairlead.server.configfile.document import Document
from fairlead.server.configfile.macros import Expansion

_KEY_NAME = re.compile(r"key|token|secret|sig", re.IGNORECASE)


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
    """Yield the server's keys and those that it sends to other servers; None for one without a key."""
    for raw in tree.get("apiKeys") or ():
        yield raw.get("key") if isinstance(raw, dict) else raw
    for server in (
        *(tree.get("nodes") or ()),
        *(tree.get("peers") or {}).values(),
        *(tree.get("models") or {}).values(),
    ):
        if isinstance(server, dict):
            yield server.get("apiKey")
            yield from _keys_in_url(server.get("url") or server.get("proxy"))
            yield from keys_of(_words(server.get("cmd")), _variables(server.get("env"))).keys


def _keys_in_url(url: object) -> Iterator[str]:
    query = url.partition("?")[2] if isinstance(url, str) else ""
    yield from (value for name, value in parse_qsl(query) if _KEY_NAME.search(name))


def _words(command: object) -> list[str]:
    read = read_command(command) if isinstance(command, str) else command
    return list(map(str, read)) if isinstance(read, list) else []


def _variables(raw: object) -> dict[str, str]:
    read = read_environment(raw)
    return {name: str(value) for name, value in read.items()} if isinstance(read, dict) else {}
