"""Configuration files as documents: merged from parts, without a key, or with another value of a key."""

import copy
import json
from typing import Any

from fairlead.base.config import demonstration_model

Document = dict[str, Any]

BASE: Document = {
    "host": "10.0.0.1",
    "port": 8000,
    "tenantNames": "plain",
    "models": {"m": {"path": str(demonstration_model()), "preload": True, "slots": 1}},
}


def merged(base: Document, more: Document) -> Document:
    """Return `base` with `more` merged into it; a value of None removes its key."""
    result = copy.deepcopy(base)
    for name, value in more.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def file_with(more: Document) -> Document:
    """Return a whole configuration file. The path DEMO stands for the demonstration model's folder."""
    document = merged(BASE, more)
    for model in document["models"].values():
        if model.get("path") == "DEMO":
            model["path"] = str(demonstration_model())
    return document


def without_key(document: Document, key: str) -> Document:
    """Return a document without a key, in every mapping at its path (see `_found`)."""
    result: Document = json.loads(json.dumps(document))
    *parents, last = key.split(".")
    for mapping in _mappings_at(result, parents):
        mapping.pop(last, None)
    return result


def replaced(document: Document, key: str, value: object) -> Document:
    """Return a document with another value of a key, in every mapping that has it."""
    result: Document = json.loads(json.dumps(document))
    *parents, last = key.split(".")
    for mapping in _mappings_at(result, parents):
        if last in mapping:
            mapping[last] = value
    return result


def value_of(document: Document, key: str) -> Any:
    """Return the first value of a key that a document has. Raises `KeyError`."""
    *parents, last = key.split(".")
    for mapping in _mappings_at(document, parents):
        if last in mapping:
            return mapping[last]
    raise KeyError(key)


def _mappings_at(document: Document, path: list[str]) -> list[Document]:
    """Return the mappings at a path. NAME matches any key; ENGINE and COMMAND match models of that kind."""
    found: list[Any] = [document]
    for part in path:
        inner: list[Any] = []
        for mapping in found:
            if part in ("NAME", "ENGINE", "COMMAND"):
                kind = {"ENGINE": "path", "COMMAND": "cmd"}.get(part)
                inner += [value for value in mapping.values() if kind is None or kind in value]
            elif part.endswith("[]"):
                inner += mapping.get(part[:-2], [])
            elif part in mapping:
                inner.append(mapping[part])
        found = [mapping for mapping in inner if isinstance(mapping, dict)]
    return found
