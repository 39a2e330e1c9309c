"""Replaceable parts by name: those of this package, and those that other installed packages provide."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from fairlead.base.config import ConfigError, Fault
from fairlead.base.config.spelling import KeyPath

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """The parts of one kind, by the names that a configuration uses.

    A package provides more of them as entry points of `group`; a name in `parts` cannot be replaced.
    """

    def __init__(self, kind: str, group: str, parts: Mapping[str, Part]) -> None:
        self._kind = kind
        self._group = group
        self._parts = dict(parts)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted({*self._parts, *entry_points(group=self._group).names})

    def find(self, name: str, *path: str) -> Part:
        """Return the part of this name. Raises `ConfigError` for the setting at `path` if there is none."""
        if name in self._parts:
            return self._parts[name]
        for entry in entry_points(group=self._group, name=name):
            try:
                part: Part = entry.load()
            except (ImportError, AttributeError) as error:
                raise self._refused(path, f"the {self._kind} {name!r} cannot be imported: {error}") from error
            return part
        raise self._refused(path, f"there is no {self._kind} {name!r}; known: {', '.join(self.names())}")

    def faults(self, name: str, *path: str) -> tuple[Fault, ...]:
        """Return why `find` would raise; empty if it would not."""
        try:
            self.find(name, *path)
        except ConfigError as error:
            return error.faults
        return ()

    def _refused(self, path: KeyPath, message: str) -> ConfigError:
        fault = Fault(path, message)
        return ConfigError(str(fault), [fault])
