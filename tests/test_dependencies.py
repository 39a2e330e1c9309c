"""Each dependency of pyproject.toml is imported somewhere, or has a reason to be there all the same."""

import ast
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Not imported by us.
REASONS = {
    "h2": "hypercorn imports it, and would take a version with a known fault",
    "fairlead": "the extras of this very package",
    "import-linter": "run by tests/check.py",
    "mypy": "run by tests/check.py",
    "ruff": "run by tests/check.py",
    "pytest-timeout": "a plugin of pytest: `timeout` in pyproject.toml",
    "pytest-trio": "a plugin of pytest: `trio_mode` in pyproject.toml",
    "pytest-xdist": "a plugin of pytest: `-n` in tests/check.py",
}


def imported(files: Iterable[Path]) -> set[str]:
    """Return the top modules that are imported, also by `import_module` and `importorskip`."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Import(names):
                    found |= {name.name.partition(".")[0] for name in names}
                case ast.ImportFrom(module=str(module), level=0):
                    found.add(module.partition(".")[0])
                case ast.Call(ast.Attribute(attr="importorskip"), [ast.Constant(str(module)), *_]):
                    found.add(module.partition(".")[0])
    return found


def distributions(modules: set[str]) -> set[str]:
    """Return the names of the distributions that have these modules, here."""
    owners = packages_distributions()
    return {canonicalize_name(owner) for module in modules for owner in owners.get(module, ())}


def names(lines: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


OURS = list((ROOT / "src").rglob("*.py"))
ALL = [*OURS, *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py"), ROOT / "setup.py"]
OPTIONAL = PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    ("required", "files"),
    [
        (names([*PROJECT["dependencies"], *OPTIONAL["hf"], *OPTIONAL["otel"]]), OURS),
        (names([*OPTIONAL["bench"], *OPTIONAL["test"]]), ALL),
    ],
    ids=["of the package", "of its tests"],
)
def test_each_dependency_is_imported_or_has_a_reason(required, files):
    assert required - distributions(imported(files)) - REASONS.keys() == set()


def test_reasons_are_of_dependencies():
    lines = [*PROJECT["dependencies"], *(line for extra in OPTIONAL.values() for line in extra)]
    assert REASONS.keys() - names(lines) == set()
