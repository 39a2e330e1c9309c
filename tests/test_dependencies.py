"""Each dependency in pyproject.toml is imported somewhere, and each imported package is declared there.

Exceptions to both rules are listed with their reasons.
"""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Declared, but not imported by this code.
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
# Imported, but not declared.
UNDECLARED = {
    "triton": "the kernels of GPUs: torch's builds for GPUs bring it, and no other needs it",
    "compressed_tensors": "unpacks the codes of a test, where it is installed",
    "httptools": "a peer of bench/relaying.py, where it is installed",
}


def imported(files: Iterable[Path]) -> set[str]:
    """Return the top modules that are imported at run time, also by calls like that of `import_module`."""
    return set().union(*map(_imported_by, files))


@cache
def _imported_by(file: Path) -> frozenset[str]:
    found, text = set(), file.read_text()
    has_calls = any(name in text for name in ("importorskip", "import_module", "package("))
    for node in _run(ast.parse(text), statements_only=not has_calls):
        match node:
            case ast.Import(names):
                found |= {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case ast.Call(
                ast.Attribute(attr="importorskip" | "import_module") | ast.Name("import_module" | "package"),
                [ast.Constant(str(module)), *_],
            ):
                found.add(module.partition(".")[0])
    return frozenset(found)


def _run(tree: ast.AST, *, statements_only: bool) -> Iterator[ast.AST]:
    """Yield a node and its descendants, except code for type checkers and, if required, expressions."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        match node:
            case ast.If(ast.Name("TYPE_CHECKING"), _, otherwise):
                nodes += otherwise
            case _ if statements_only:
                nodes += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
            case _:
                nodes += ast.iter_child_nodes(node)


def third_party(modules: set[str]) -> set[str]:
    """Return the modules without the standard library, this package, and those of tests and bench."""
    folders = [ROOT / "tests", ROOT / "bench", ROOT / "bench" / "demo"]
    local_modules = {path.stem for folder in folders for path in folder.iterdir()}
    # `compression` is in the standard library from 3.14 on.
    return modules - sys.stdlib_module_names - local_modules - {"fairlead", "_testcapi", "compression"}


def distributions(modules: set[str]) -> set[str]:
    """Return the names of the installed distributions that provide these modules."""
    return {canonicalize_name(owner) for module in modules for owner in _owners().get(module, ())}


@cache
def _owners() -> Mapping[str, list[str]]:
    return packages_distributions()


def names(lines: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


LOCAL_MODULES = list((ROOT / "src").rglob("*.py"))
# Their packages are an extra of their own, which need not be installed.
CLIENTS = list((ROOT / "tests" / "clients").rglob("*.py"))
TESTS = [path for path in (ROOT / "tests").rglob("*.py") if path not in CLIENTS]
ALL = [*LOCAL_MODULES, *TESTS, *(ROOT / "bench").rglob("*.py"), ROOT / "setup.py"]
OPTIONAL = PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    ("required", "files"),
    [
        (
            names(
                [
                    *PROJECT["dependencies"],
                    *(line for extra in ("hf", "otel", "postgres", "redis") for line in OPTIONAL[extra]),
                ]
            ),
            LOCAL_MODULES,
        ),
        (names([*OPTIONAL["bench"], *OPTIONAL["test"]]), ALL),
    ],
    ids=["of the package", "of its tests"],
)
def test_each_dependency_is_imported_or_has_a_reason(required, files):
    assert required - distributions(imported(files)) - REASONS.keys() == set()


@pytest.mark.parametrize(
    ("declared", "files"),
    [
        (
            names(
                [
                    *PROJECT["dependencies"],
                    *OPTIONAL["hf"],
                    *OPTIONAL["otel"],
                    *OPTIONAL["postgres"],
                    *OPTIONAL["redis"],
                    *OPTIONAL["ray"],
                    *OPTIONAL["bench"],
                ]
            ),
            LOCAL_MODULES,
        ),
        (names([*PROJECT["dependencies"], *(line for extra in OPTIONAL.values() for line in extra)]), ALL),
    ],
    ids=["by the package", "by its tests"],
)
def test_each_package_that_is_imported_is_declared_or_has_a_reason(declared, files):
    missing = {
        module
        for module in third_party(imported(files)) - UNDECLARED.keys()
        if not (distributions({module}) | {canonicalize_name(module)}) & declared  # it may be absent
    }
    assert missing == set()


def test_each_package_of_the_extra_for_clients_is_imported_by_their_tests():
    modules = {"pydantic-ai-slim": "pydantic_ai"}
    declared = {modules.get(name, name.replace("-", "_")) for name in names(OPTIONAL["clients"])}
    of_all_tests = {"httpx", "pytest", "trio"}
    assert third_party(imported(CLIENTS)) - of_all_tests == declared


def test_each_undeclared_package_with_a_reason_is_imported():
    assert UNDECLARED.keys() - imported(ALL) == set()


def test_each_reason_belongs_to_a_dependency():
    lines = [*PROJECT["dependencies"], *(line for extra in OPTIONAL.values() for line in extra)]
    assert REASONS.keys() - names(lines) == set()


def test_models_of_the_hub_need_no_extra():
    assert "huggingface-hub" in names(PROJECT["dependencies"])
    assert "hub" not in OPTIONAL
