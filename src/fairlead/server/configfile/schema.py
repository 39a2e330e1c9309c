"""Generates the JSON Schema of configuration files from the types of the settings. Pure.

It accepts everything that the reader accepts. Contradictions between settings are found by the reader only.
Editors use it for completion and help: `# yaml-language-server: $schema=…`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from fairlead.base.config import MODEL_KINDS, ApiKey, CommandConfig, FiltersConfig, ModelConfig, read_amount
from fairlead.base.config.access import read_key
from fairlead.base.config.documentation import documentation_of, summary_of
from fairlead.base.config.models import NO_SETTINGS
from fairlead.base.config.spelling import (
    Setting,
    Shape,
    read_command,
    read_environment,
    read_names,
    read_time,
    settings_of,
    shape_of,
)
from fairlead.server.configfile.llama_swap import WITHOUT_EFFECT
from fairlead.server.configfile.macros import DEFAULT_PROXY
from fairlead.server.configfile.sections import FileSettings

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_AMOUNT = r"^\s*\d+(\.\d+)?\s*[kKMG]?\s*$"
_TIME = r"^\s*(\d+(\.\d+)?|(\d+(\.\d+)?(ms|s|m|h|d))+)\s*$"
_USE = {"$ref": "#/$defs/Use"}
# Values beyond its type that a setting may have; the reader treats them as not set.
_ALSO: dict[tuple[type, str], Schema] = {
    (FileSettings, "store"): {"type": "object"},  # llama-swap's, which has no effect
    (ModelConfig, "ttl"): {"const": -1},
    (CommandConfig, "ttl"): {"const": -1},
    (CommandConfig, "concurrencyLimit"): {"const": 0},
    (CommandConfig, "unloadTimeout"): {"const": 0},
}


def schema() -> Schema:
    """Return the schema of a whole file."""
    types = _Types()
    root = types.struct(FileSettings)
    models = {
        "description": "The models, by name: each has path, a folder with one, or cmd, which serves one.",
        "type": "object",
        "additionalProperties": {"anyOf": [types.reference(kind) for kind in MODEL_KINDS.values()]},
    }
    root["properties"] = {"models": models, **root["properties"]}
    root["patternProperties"] = {"^(defs$|x-)": {"description": "A place for anchors."}}
    return {
        "$schema": DIALECT,
        "title": "Configuration of Fairlead",
        **root,
        "$defs": {**types.definitions, "Use": _use()},
    }


class _Types:
    """Makes schemas of types; `definitions` has those of the referenced structs."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def reference(self, kind: type[msgspec.Struct]) -> Schema:
        name = kind.__name__
        if name not in self.definitions:
            self.definitions[name] = {}  # in case it contains itself
            self.definitions[name] = self.struct(kind)
        return {"$ref": f"#/$defs/{name}"}

    def struct(self, kind: type[msgspec.Struct]) -> Schema:
        """Return the schema of a struct, including the further keys that its mapping in a file may have."""
        texts = documentation_of(kind)
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        properties: dict[str, Schema] = {}
        required = []
        for setting in settings_of(kind):
            if kind in MODEL_KINDS.values() and setting.name in NO_SETTINGS:
                continue
            field = fields[setting.name]
            properties[setting.spelling] = self._property(kind, setting, texts.get(setting.name, ""))
            if field.required:
                required.append(setting.spelling)
            elif (default := plain_default(kind, field)) is not None:
                properties[setting.spelling]["default"] = default
        described: Schema = {"description": summary_of(kind), "type": "object"}
        if required:
            described["required"] = required
        if kind is ApiKey:
            described["anyOf"] = [{"required": ["key"]}, {"required": ["hash"]}]
        return described | {"properties": _beside().get(kind, {}) | properties, "additionalProperties": False}

    def _property(self, kind: type, setting: Setting, text: str) -> Schema:
        forms = self._forms(setting.shape)
        if (also := _ALSO.get((kind, setting.spelling))) is not None:
            forms.append(also)
        described = forms[0] if len(forms) == 1 else {"anyOf": forms}
        return {"description": text, **described} if text else dict(described)

    def _forms(self, shape: Shape) -> list[Schema]:
        """Return the alternative schemas of a value of this shape."""
        forms = self._accepted(shape) or [self._plain(kind, shape) for kind in shape.kinds]
        if shape.kind in (int, float, bool) or shape.choices:
            forms.append(_USE)
        if shape.optional:
            forms.append({"type": "null"})
        return forms

    def _accepted(self, shape: Shape) -> list[Schema]:
        """Return the schemas of what the shape's `read` function accepts; none without one."""
        read = shape.meta("read")
        if read is read_time:
            return [{"type": "number", **_bounds(shape)}, {"type": "string", "pattern": _TIME}]
        if read in (read_command, read_names):
            return [{"type": "string"}, {"type": "array", "items": _TEXT}]
        if read is read_environment:
            pairs = {"type": "array", "items": {"type": "string", "pattern": "^[^=]+="}}
            return [pairs, {"type": "object", "additionalProperties": _TEXT}]
        if read is read_amount:
            return [self._plain(shape.kind, shape), {"type": "string", "pattern": _AMOUNT}]
        if read is read_key:
            return [_TEXT, self._plain(shape.kind, shape)]
        assert read is None, f"no schema for the values of {read}"
        return []

    def _plain(self, hint: Any, shape: Shape) -> Schema:
        """Return the schema of one of the shape's kinds."""
        kind = get_origin(hint) or hint
        if kind is Literal or (kind is str and shape.choices):
            return {"enum": list(shape.choices)}
        if kind in (tuple, dict):
            item = self._one(shape.item or shape_of(get_args(hint)[-1]))
            if kind is tuple:
                return {"type": "array", "items": item}
            return {"type": "object", "additionalProperties": item}
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.reference(kind)
        return dict(_PLAIN[kind]) | _bounds(shape)

    def _one(self, shape: Shape) -> Schema:
        forms = self._forms(shape)
        return forms[0] if len(forms) == 1 else {"anyOf": forms}


# Text may also be a number: a key may be 0123.
_TEXT: Schema = {"type": ["string", "number"]}
_PLAIN: dict[Any, Schema] = {
    str: _TEXT,
    Path: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    Any: {},
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "pattern": "pattern"}


def plain_default(kind: type, field: msgspec.structs.FieldInfo) -> Any:
    """Return a field's default as in a file; None if there is none, or if it is empty or a struct."""
    if (kind, field.name) == (CommandConfig, "proxy"):
        return DEFAULT_PROXY  # macros are expanded before the struct is made
    if field.default is msgspec.NODEFAULT or isinstance(field.default, msgspec.Struct):
        return None
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(default, float) and default.is_integer():
        return int(default)
    return default if default not in ([], {}, "", None) else None


def _bounds(shape: Shape) -> Schema:
    return {
        name: value
        for meta in shape.metas
        for field, name in _BOUNDS.items()
        if (value := getattr(meta, field)) is not None
    }


@cache
def _beside() -> dict[type, dict[str, Schema]]:
    """Return the keys that a mapping in a file may have besides the settings of its struct, by struct."""
    macros = {
        "description": "Values that replace ${NAME} in the file, by name.",
        "type": ["object", "array", "null"],
    }
    older = {"description": "The older name of stripParams.", "type": ["string", "array"], "items": _TEXT}
    extra: dict[type, dict[str, Schema]] = {
        FileSettings: {"macros": macros},
        ModelConfig: {"macros": macros},
        CommandConfig: {"macros": macros},
        FiltersConfig: {"strip_params": older},
    }
    idle: Schema = {"description": "Has no effect here."}
    for path in WITHOUT_EFFECT:
        section = path[:-1] if path[-2:-1] in (("upstream",), ("compat",)) else path
        for kind in _owners(section):
            nested: Schema = {"type": "object", "properties": {path[-1]: idle}}
            extra.setdefault(kind, {})[section[-1]] = idle if section is path else nested
    return extra


def _owners(path: tuple[str, ...]) -> Iterator[type]:
    """Yield the structs that have the last key of a path in a file; `*` in a path is any key."""
    kinds: list[type] = [FileSettings]
    for key in path[:-1]:
        if key == "models":
            kinds = [*MODEL_KINDS.values()]
        elif key != "*":
            kinds = [
                _struct_of(each.shape) for kind in kinds for each in settings_of(kind) if each.spelling == key
            ]
    yield from kinds


def _struct_of(shape: Shape) -> type:
    kind: type = shape.kind if shape.item is None else shape.item.kind
    return kind


def _use() -> Schema:
    return {
        "description": "A macro or an environment variable that has the value.",
        "type": "string",
        "pattern": r"^\$\{[A-Za-z0-9_.-]+\}$",
    }
