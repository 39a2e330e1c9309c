"""Converts plain values to the types of the settings, and collects every fault.

msgspec converts each value, strictly. The structs are traversed here, because msgspec stops at the first
fault and does not report in which entry of a mapping it was.
"""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from fairlead.base.config.spelling import ConfigError, Fault, KeyPath, Shape, settings_of, written
from fairlead.server.configfile.document import Document

S = TypeVar("S", bound=msgspec.Struct)
_WRONG: Any = object()
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    dict: "a mapping",
    tuple: "a list",
    list: "a list",
    type(None): "nothing",
}
_TRUTHS = {"yes": True, "on": True, "no": False, "off": False}  # as in YAML 1.1 and llama-swap


class Conversion:
    """Converts the values of one document; `faults` are those found so far."""

    def __init__(self, document: Document) -> None:
        self.faults: list[Fault] = []
        self._document = document

    def struct(
        self,
        kind: type[S],
        raw: object,
        path: KeyPath,
        *,
        fixed: Mapping[str, Any] | None = None,
        default: S | None = None,
        misplaced: Mapping[str, str] | None = None,
        also_known: Collection[str] = (),
    ) -> S | None:
        """Return the struct, made of the valid values; None if they do not suffice.

        kind: the type of the struct.
        raw: the value in the file.
        path: where it is in the file.
        fixed: values of fields that a file cannot set.
        default: has the values of settings that are not in the file; None: the defaults of `kind`.
        misplaced: messages for keys that belong elsewhere.
        also_known: further keys that an unknown key may be a misspelling of.
        """
        fixed = fixed or {}
        if not isinstance(raw, dict):
            self._fault(path, f"must be a mapping, not {_WORDS[type(raw)]}")
            return None
        settings = {setting.spelling: setting for setting in settings_of(kind) if setting.name not in fixed}
        values = dict(fixed)
        for key, value in raw.items():
            setting = settings.get(key)
            if setting is None:
                self.unknown(key, path, (*settings, *also_known), misplaced or {})
            elif value is not None:
                inner = None if default is None else getattr(default, setting.name)
                converted = self._value(
                    setting.shape, value, (*path, key), inner or _default_of(kind, setting.name)
                )
                if converted is not _WRONG:
                    values[setting.name] = converted
        return self._made(kind, values, path, default)

    def _made(self, kind: type[S], values: dict[str, Any], path: KeyPath, default: S | None) -> S | None:
        if default is None:
            missing = [
                field.encode_name
                for field in msgspec.structs.fields(kind)
                if field.required and field.name not in values
            ]
            for name in missing:
                if not any(fault.path[: len(path) + 1] == (*path, name) for fault in self.faults):
                    self._fault((*path, name), "is missing")
            if missing:
                return None
        try:
            return kind(**values) if default is None else msgspec.structs.replace(default, **values)
        except ConfigError as error:
            self.faults += (fault.under(*path) for fault in error.faults)
            return None

    def _value(self, shape: Shape, raw: Any, path: KeyPath, default: Any = None) -> Any:
        kind = get_origin(shape.kind) or shape.kind
        is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        read = shape.meta("read")
        if read is not None:
            if shape.kind is not float and isinstance(raw, int | float):
                raw = self._written(raw, path)
            try:
                raw = read(raw)
            except ValueError as error:
                return self._fault(path, str(error))
        if is_struct:
            made = self.struct(kind, raw, path, default=default if isinstance(default, kind) else None)
            return _WRONG if made is None else made
        if kind is dict and isinstance(raw, dict) and shape.item is not None:
            return self._items(shape.item, raw, path)
        if kind is tuple and isinstance(raw, list) and shape.item is not None:
            items = self._items(shape.item, dict(enumerate(raw)), path)
            return _WRONG if items is _WRONG else tuple(items.values())
        return self._leaf(shape, raw, path)

    def _items(self, shape: Shape, raw: Mapping[Any, Any], path: KeyPath) -> Any:
        converted = {key: self._value(shape, value, (*path, key)) for key, value in raw.items()}
        return _WRONG if any(value is _WRONG for value in converted.values()) else converted

    def _leaf(self, shape: Shape, raw: Any, path: KeyPath) -> Any:
        kind = shape.kind
        if kind is Any:
            return raw
        if kind is str and isinstance(raw, int | float):
            raw = self._written(raw, path)
        if bool in shape.kinds and isinstance(raw, str):
            raw = _TRUTHS.get(raw.lower(), raw)
        try:
            return msgspec.convert(raw, kind, strict=True, dec_hook=_path)
        except msgspec.ValidationError:
            if get_origin(kind) is Literal:
                return self._fault(path, f"must be one of {', '.join(shape.choices)}")
            expected = " or ".join(map(_word, shape.kinds))
            return self._fault(path, f"must be {expected}, not {_WORDS.get(type(raw), 'that')}")

    def _written(self, raw: float, path: KeyPath) -> str:
        """Return a number as the text in the file: a key may be 0123."""
        return self._document.text(path) or written(raw)

    def unknown(self, key: str, path: KeyPath, known: Collection[str], misplaced: Mapping[str, str]) -> None:
        """Add a fault for an unknown key. It names where the key belongs, or a similar key.

        key: the key.
        path: where it is in the file.
        known: the keys that are allowed there.
        misplaced: messages for keys that belong elsewhere.
        """
        if key in misplaced:
            self._fault((*path, key), misplaced[key])
            return
        near = difflib.get_close_matches(key, known, 1)
        self._fault((*path, key), "is not a setting" + (f"; did you mean {near[0]}?" if near else ""))

    def _fault(self, path: KeyPath, message: str) -> Any:
        self.faults.append(Fault(path, message))
        return _WRONG


def _word(kind: Any) -> str:
    """Return how an error names the values of a kind."""
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return _WORDS.get(get_origin(kind) or kind, "something else")


def _path(kind: type, raw: object) -> object:
    if kind is Path and isinstance(raw, str) and raw.strip() and "\0" not in raw:
        return Path(raw)
    raise ValueError


def _default_of(kind: type[msgspec.Struct], name: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(kind) if field.name == name)
