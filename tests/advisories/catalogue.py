"""The known advisories of similar servers and of libraries, with a reason for each that has no test.

They are in catalogue/*.toml, one table per advisory:

    [CVE-2025-00000]
    summary = "One sentence."
    aliases = ["GHSA-xxxx-xxxx-xxxx"]  # its other numbers
    untested_because = "Why no test tries it."

The tests name the advisories that they try (see `tries`); the catalogue does not repeat those names.
"""

import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent


class Advisory(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of the catalogue."""

    summary: str
    aliases: list[str] = []
    untested_because: str | None = None


def read_catalogue() -> list[tuple[str, Advisory]]:
    """Return all entries with their numbers; a number in two files is returned twice."""
    entries: list[tuple[str, Advisory]] = []
    for path in sorted((FOLDER / "catalogue").glob("*.toml")):
        entries += msgspec.convert(tomllib.loads(path.read_text()), dict[str, Advisory]).items()
    return entries


def tried_numbers() -> dict[str, list[str]]:
    """Return the names of the tests that try each number."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        module = importlib.import_module(f"advisories.{path.stem}")
        for name, test in vars(module).items():
            for number in _numbers(test):
                found.setdefault(number, []).append(f"{path.stem}.{name}")
    return found


def _numbers(test: Any) -> Iterator[str]:
    for mark in getattr(test, "pytestmark", []):
        match mark.args:
            case ["numbers", [numbers]]:
                yield from numbers
            case ["number", numbers]:
                yield from numbers
