"""How settings are spelled in a configuration file, and the errors for invalid ones.

A type has a `Meta` with bounds (`ge`, `gt`, `le`). Its `extra` has the function that parses the file's value
(`read`) and the wording of the constraint (`must`). Independent of files, YAML and particular settings.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Key = str | int
KeyPath = tuple[Key, ...]

UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Fault(NamedTuple):
    """An error in the setting at `path`."""

    path: KeyPath
    message: str

    def under(self, *path: Key) -> "Fault":
        """Return the same fault with `path` before its own path."""
        return Fault((*path, *self.path), self.message)

    def __str__(self) -> str:
        """Return text such as 'models.qwen.slots: must be at least 1'."""
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """Settings are invalid; the message names them, one per line.

    Paths in `faults` are relative to the value under construction, those in the message are complete.
    """

    def __init__(self, message: str, faults: Iterable[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


def dotted(path: KeyPath) -> str:
    """Return the path as displayed: `apiKeys[1].limits`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def spelled(name: str) -> str:
    """Return a setting's name in a configuration file: camelCase, and without the `_s` of times."""
    first, *others = name.removesuffix("_s").split("_")
    return first + "".join(map(str.capitalize, others))


def written(value: str | float) -> str:
    """Return a value as text for a file. 1.0 is '1', as in Go and so in the macros of llama-swap."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    return str(value)


# Values in a file ----------------------------------------------------------------------------------


def read_time(raw: object) -> object:
    """Parse '5m', '1h30m', '250ms' or '60' to seconds. Return other types unchanged. Raises `ValueError`."""
    if not isinstance(raw, str):
        return raw
    text = raw.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _TIME.fullmatch(text):
        raise ValueError(f"must be a time like 60, 250ms, 5m or 1h30m, not {raw[:40]!r}")
    return sum(float(number) * UNIT_S[unit] for number, unit in _TIME_PART.findall(text))


def read_command(raw: object) -> object:
    """Split a command line into words, without lines that begin with #. Raises `ValueError`.

    Backslashes at the ends of lines and quotes work as in a shell, but no shell is involved.
    """
    if not isinstance(raw, str):
        return raw
    lines = (line.strip() for line in raw.split("\n"))
    text = "\n".join(line.removesuffix("\\") for line in lines if not line.startswith("#"))
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def read_environment(raw: object) -> object:
    """Parse a list of NAME=value to a mapping. Return other types unchanged. Raises `ValueError`."""
    if not isinstance(raw, list):
        return raw
    variables = {}
    for entry in raw:
        name, sign, value = str(entry).partition("=")
        if not name or not sign or "\0" in value:
            raise ValueError(f"must be NAME=value, not {str(entry)[:40]!r}")
        variables[name] = value
    return variables


def read_names(raw: object) -> object:
    """Parse 'a, b' to a list of unique names. Return other types unchanged."""
    if not isinstance(raw, str):
        return raw
    return list(dict.fromkeys(name.strip() for name in raw.split(",") if name.strip()))


def _text(description: str, read: object) -> Meta:
    return Meta(description=description, extra={"read": read})


_A_TIME = {"read": read_time, "must": "be a time above 0"}
_A_TIME_OR_0 = {"read": read_time, "must": "be a time, or 0"}

AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastZero = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, extra=_A_TIME)]
SecondsOrNone = Annotated[float, Meta(ge=0, extra=_A_TIME_OR_0)]
Command = Annotated[tuple[str, ...], _text("A command line, over several lines or not.", read_command)]
Environment = Annotated[dict[str, str], _text("A list of NAME=value.", read_environment)]
Names = Annotated[tuple[str, ...], _text("A list, or names with commas between them.", read_names)]


# Shapes of types --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A parsed type hint.

    kind: the type without `None` and `Meta`.
    optional: whether `None` is allowed.
    metas: the bounds, from `Meta`.
    item: the shape of a collection's items; None for other kinds, and for a union of several.
    """

    kind: Any
    optional: bool
    metas: tuple[Meta, ...]
    item: "Shape | None"

    def meta(self, name: str) -> Any:
        """Return the value of this name in the `extra` of the metas, or None."""
        return next((meta.extra[name] for meta in self.metas if meta.extra and name in meta.extra), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that it may have; of a union, those of its texts. Empty: any value of the kind."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else self.meta("choices") or ()

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The kinds of a union; else only `kind`."""
        return get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)


class Setting(NamedTuple):
    """A field of a struct: its Python name, its spelling in a file, and its shape."""

    name: str
    spelling: str
    shape: Shape


@cache
def settings_of(kind: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Return the fields of a struct."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return tuple(Setting(field.name, field.encode_name, shape_of(hints[field.name])) for field in fields)


def shape_of(hint: Any) -> Shape:
    """Parse a type hint."""
    metas: tuple[Meta, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *others = get_args(hint)
        metas = tuple(other for other in others if isinstance(other, Meta))
    optional = False
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        optional = len(kinds) < len(get_args(hint))
        if len(kinds) == 1:
            inner = shape_of(kinds[0])
            return Shape(inner.kind, True, metas + inner.metas, inner.item)
        hint = Union[tuple(kinds)]  # noqa: UP007  of kinds that are not known before
    arguments = get_args(hint) if get_origin(hint) in (tuple, dict) else ()
    item = shape_of(arguments[0] if get_origin(hint) is tuple else arguments[1]) if arguments else None
    return Shape(hint, optional, metas, item)


# Validation ------------------------------------------------------------------------------------------


def faults_of(settings: msgspec.Struct) -> Iterator[Fault]:
    """Yield faults of the settings and all nested ones: values out of bounds, and contradictions.

    Contradictions come from the struct's method of that name. Nested structs that validate themselves in
    `__post_init__` are not checked again.
    """
    for setting in settings_of(type(settings)):
        for fault in _faults_in(getattr(settings, setting.name), setting.shape):
            yield fault.under(setting.spelling)
    contradictions = getattr(settings, "contradictions", None)
    if contradictions is not None:
        yield from contradictions()


def refuse_faults(settings: msgspec.Struct, *path: Key) -> None:
    """Raise `ConfigError` if the settings, which belong at `path`, have a fault."""
    faults = tuple(faults_of(settings))
    if faults:
        raise ConfigError("\n".join(str(fault.under(*path)) for fault in faults), faults)


def _faults_in(value: Any, shape: Shape) -> Iterator[Fault]:
    if isinstance(value, msgspec.Struct):
        if not hasattr(value, "__post_init__"):
            yield from faults_of(value)
    elif isinstance(value, tuple | Mapping) and shape.item is not None:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from (fault.under(key) for fault in _faults_in(item, shape.item))
    elif isinstance(value, int | float) and not all(_within(value, meta) for meta in shape.metas):
        yield Fault((), f"must {shape.meta('must') or _bounds(shape.metas)}")


def _within(value: float, meta: Meta) -> bool:
    bounded = (meta.ge, meta.gt, meta.le) != (None, None, None)
    return not bounded or (
        math.isfinite(value)
        and (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
    )


def _bounds(metas: Iterable[Meta]) -> str:
    bounds = []
    for meta in metas:
        bounds += [f"more than {meta.gt}"] * (meta.gt is not None)
        bounds += [f"at least {meta.ge}"] * (meta.ge is not None)
        bounds += [f"at most {meta.le}"] * (meta.le is not None)
    return f"be {' and '.join(bounds)}"
