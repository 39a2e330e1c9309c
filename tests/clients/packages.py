"""Packages of clients, imported at their first use.

Each worker of a test run collects all files, and only a few of them run the tests of a package that takes
seconds to import.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Package:
    """A package or module that is imported when an attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks and mocks in all that a file of tests has
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def package(name: str) -> Package:
    """Return a package by its full name. If it is not installed, skip the tests of the calling file."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return Package(name)
