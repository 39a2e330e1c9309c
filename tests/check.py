"""Run all checks: format, lint, imports, types, stubs and tests. Exit with 1 if any of them failed.

Every tool runs in the interpreter that runs this file. `--fast` runs the unit tests only. `--only` runs one
part, as the jobs of continuous integration do. Static checks run at the same time. A step that passes prints
its last line; one that fails prints its whole output. No test is repeated.
"""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("lint", "types", "tests")
KERNEL_SOURCES = ROOT / "cext"
KERNELS_BUILT = ROOT / "src" / "fairlead" / "_cext"
EXTENSION_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
PYTEST_SUMMARY = re.compile(
    r"(\d+ (passed|failed|errors?|skipped|deselected|warnings?)|no tests ran).* in [\d.]+s"
)
LINT_IMPORTS = (
    "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
)


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    passed: bool
    output: str


@dataclass(frozen=True)
class Step:
    """A check. `prints_itself`: its output is printed while it runs."""

    name: str
    check: Callable[[], Outcome]
    prints_itself: bool = False


def main() -> int:
    """Run every step, then print a summary."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fast", action="store_true", help="run the unit tests only")
    parser.add_argument("--only", choices=PARTS, help="run this part only")
    parser.add_argument(
        "--coverage", action="store_true", help="report the lines that tests run (needs pytest-cov)"
    )
    options = parser.parse_args()

    lines: list[str] = []
    failures = 0
    pytest_summaries: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        for steps in _groups(fast=options.fast, only=options.only, has_coverage=options.coverage):
            for step, (outcome, seconds) in zip(steps, executor.map(_timed, steps), strict=True):
                if not step.prints_itself:
                    _print_head(step)
                    print(outcome.output if not outcome.passed else _last_line(outcome.output), flush=True)
                elif found := [line for line in outcome.output.splitlines() if PYTEST_SUMMARY.search(line)]:
                    pytest_summaries.append(f"{step.name}: {found[-1].strip('= ')}")
                failures += not outcome.passed
                lines.append(f"{'passed' if outcome.passed else 'FAILED'}  {seconds:6.1f} s  {step.name}")

    print("\n-- summary ", "-" * 69, sep="")
    print("\n".join(lines))
    print(f"{failures} of {len(lines)} checks failed" if failures else f"all {len(lines)} checks passed")
    if options.only in (None, "tests"):
        print("\n".join(pytest_summaries) or "pytest did not finish", flush=True)
    return 1 if failures else 0


def _groups(*, fast: bool, only: str | None = None, has_coverage: bool = False) -> list[list[Step]]:
    """Return the steps in groups, which run one after another; the steps of a group run at the same time.

    - `fast`: only the unit tests.
    - `only`: one of `PARTS`; None: all.
    - `has_coverage`: the tests report which lines of the package they have run.
    """
    stubs = [f"fairlead._cext.{source.stem}" for source in sorted(KERNELS_BUILT.glob("*.pyi"))]
    # Each process has its own files and ports. An idle one takes half of another's remaining tests. Many
    # tests wait for servers, but no unit test: one process more than processors keeps these busy.
    workers = min(4, (os.cpu_count() or 1) + (not fast))
    in_parallel = ["-n", str(workers), "--dist", "worksteal", "-q", "-m"]
    in_parallel.append("unit and not slow" if fast else "not alone")
    # The cache is a database, which stubtest opens, too: it finds it locked if both have the same one.
    mypy_cache = ["--cache-dir", ".mypy_cache/mypy"]
    coverage = ["--cov=fairlead", "--cov-report="] if has_coverage else []
    appended = ["--cov-append", "--cov-report=term", "--cov-report=xml"] if has_coverage else []
    alone = ["-m", "pytest", "-q", "-m", "alone", *coverage, *appended]
    types = [
        _tool("mypy", "-m", "mypy", *mypy_cache),
        _tool("stubtest", "-m", "mypy.stubtest", "--mypy-config-file", "pyproject.toml", *stubs),
    ]
    lint = [
        _tool("ruff format", "-m", "ruff", "format", "--check", "."),
        _tool("ruff check", "-m", "ruff", "check", "."),
        _tool("import-linter", "-c", LINT_IMPORTS),
    ]
    tests = [[_tool("pytest", "-m", "pytest", *in_parallel, *coverage, prints_itself=True)]]
    if not fast:
        tests.append([_tool("pytest, alone", *alone, prints_itself=True)])
    parts = {"lint": [lint], "types": [types], "tests": tests}
    chosen = parts[only] if only else [types + lint, *tests]
    return [[Step("kernels are built from these sources", _check_kernels)], *chosen]


def _timed(step: Step) -> tuple[Outcome, float]:
    """Run a step; return its result and how many seconds it took."""
    if step.prints_itself:
        _print_head(step)
    started = time.monotonic()
    return step.check(), time.monotonic() - started


def _print_head(step: Step) -> None:
    print(f"\n-- {step.name} ", "-" * (76 - len(step.name)), flush=True, sep="")


def _tool(name: str, *arguments: str, prints_itself: bool = False) -> Step:
    return Step(name, lambda: _python(arguments, shown=prints_itself), prints_itself)


def _python(arguments: Sequence[str], *, shown: bool = False) -> Outcome:
    """Run this interpreter in the repository; with `shown`, print its output as it arrives."""
    # The tests start hundreds of interpreters; without bytecode files each would compile the package again.
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        output = bytearray()
        while piece := os.read(process.stdout.fileno(), 65536):
            output += piece
            if shown:
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
    return Outcome(process.returncode == 0, output.decode(errors="replace").rstrip())


def _check_kernels() -> Outcome:
    """Build the kernels that are missing or older than their sources, so that no stale one is tested."""
    package = importlib.util.find_spec("fairlead")
    if package is None or not Path(str(package.origin)).resolve().is_relative_to(ROOT):
        where = package.origin if package else "nowhere"
        return Outcome(passed=False, output=f"fairlead is imported from {where}: pip install -e '.[test]'")
    stale = _stale_kernels()
    if not stale:
        return Outcome(passed=True, output="up to date")
    built = _python(["setup.py", "build_ext", "--inplace"])
    if not built.passed:
        return built
    if remaining := _stale_kernels():
        reason = "not built by setup.py, or setup.py does not list all sources"
        return Outcome(passed=False, output=f"{built.output}\n{', '.join(remaining)}: {reason}")
    return Outcome(passed=True, output=f"built {', '.join(stale)}")


def _stale_kernels() -> list[str]:
    return [source.stem for source in sorted(KERNEL_SOURCES.glob("*.pyx")) if _is_stale(source)]


def _is_stale(source: Path) -> bool:
    """Return whether a kernel is missing, or older than its .pyx or any file in the folder of its name."""
    built = KERNELS_BUILT / (source.stem + EXTENSION_SUFFIX)
    parts = [source, *source.with_suffix("").rglob("*.*")]
    return not built.exists() or built.stat().st_mtime < max(part.stat().st_mtime for part in parts)


def _last_line(output: str) -> str:
    return output.rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
