"""Settings for all tests, made before anything imports torch: its threads must not spin while they wait.

Without a GPU, Triton interprets our kernels; it reads that setting when it is imported.

Hypothesis generates the same examples in each run and has no deadline. So a commit that passed once passes
again, also on a busy machine. It generates few: tests of mutants have numbers of their own. With
`--hypothesis-profile nightly` it searches twelve times as long, for new examples. It first repeats those that
failed in an earlier run, which it keeps in `.hypothesis/examples`.
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from fairlead.language.structured import trials

TESTS = Path(__file__).parent
# The marks of folders; a test has that of the innermost, or "unit".
MARKS = {
    **dict.fromkeys(("clients", "e2e", "nodes", "peers", "settings"), "process"),
    **dict.fromkeys(
        ("distributed/ray", "distributed/supervisor", "engine/worker", "router/fleet", "server/cli"),
        "process",
    ),
    **dict.fromkeys(("nodes/http", "nodes/streams"), "unit"),
    "browser": "browser",
    **dict.fromkeys(("advisories", "fuzz", "simulation"), "fuzz"),
    **dict.fromkeys(("cext", "engine", "language/checkpoint"), "kernels"),
    "gpu": "gpu",
}
# Folders with a mark that have folders of unit tests.
HOLD_UNITS = {folder for name in MARKS if MARKS[name] == "unit" for folder in (TESTS / name).parents}
# With several workers each core has one already, and to prepare a process for simulations takes seconds.
SIMULATORS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
PATIENCE_S = 0.05  # of the virtual clock while a thread works
UNIT_ONLY = ("unit", "unit and not slow")  # of `-m`

# Tests start hundreds of interpreters; without bytecode files each would compile the package again.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["FAIRLEAD_STORE"] = "none"  # no test writes into the home of the person who runs it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # every core has a worker already
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "nightly",
    # Every setting is given, because Hypothesis has other defaults if the variable `CI` is set.
    max_examples=300,
    derandomize=False,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
    print_blob=True,
)
settings.register_profile(
    "suite", settings.get_profile("nightly"), max_examples=25, derandomize=True, database=None
)
# For `.ci/aarch64`, where an emulated processor runs the kernels' tests.
settings.register_profile("emulated", settings.get_profile("suite"), max_examples=5)
settings.load_profile("suite")

# The suite's workers keep all processors busy, of which a trial of a grammar gets little.
trials.BUSY_FACTOR = 150

# A shell ignores it in what it starts in the background, and so would every process of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the length of tests, fuzzing and simulations."""
    parser.addoption("--nightly", action="store_true", help="run also the long forms of tests")
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-seconds", type=float, default=10.0, help="time for the fuzz tests, all together")
    group.addoption("--fuzz-steps", type=int, default=0, help="instead of a time: strike at so many steps")
    group.addoption("--fuzz-seed", type=int, default=0, help="where --fuzz-steps and --fuzz-requests begin")
    group.addoption("--fuzz-requests", type=int, default=1000, help="mutated requests to a real server")
    group.addoption("--fuzz-connections", type=int, default=100, help="mutated connections beside them")
    group = parser.getgroup("simulation")
    group.addoption("--simulation-hours", type=int, default=6, help="virtual hours to simulate")
    group.addoption("--simulation-seed", type=int, default=None, help="the seed to replay, or to begin with")
    group.addoption("--simulation-sweep", default="", help="the place in a sweep to replay, as name:number")
    group.addoption("--simulation-thorough", action="store_true", help="faults at every place, not at some")
    group.addoption("--simulation-processes", type=int, default=SIMULATORS, help="processes that simulate")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If few tests are selected, do not import the files of all others: most of them import torch."""
    if not collection_path.is_relative_to(TESTS):
        return None
    other = False
    if config.option.markexpr in UNIT_ONLY:
        other = mark_of(collection_path) != "unit" and collection_path not in HOLD_UNITS
    elif config.option.markexpr == "alone" and collection_path.suffix == ".py":
        other = b"mark.alone" not in collection_path.read_bytes()
    return True if other else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the objects of all modules and items, so that no garbage collection visits them again."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by its folder. Deselect the tests marked `nightly` unless `--nightly` is given."""
    for item in items:
        item.add_marker(mark_of(item.path))
    if config.getoption("--nightly"):
        return
    config.hook.pytest_deselected(items=[item for item in items if "nightly" in item.keywords])
    items[:] = [item for item in items if "nightly" not in item.keywords]


def mark_of(path: Path) -> str:
    """Return the mark of the innermost folder of a test that has one. All other tests are unit tests."""
    inner = path.relative_to(TESTS)
    names = (folder.as_posix() for folder in (inner, *inner.parents))
    return next((MARKS[name] for name in names if name in MARKS), "unit")


@pytest.fixture
def autojump_clock(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> trio.testing.MockClock:
    """Return pytest-trio's clock, which waits up to `PATIENCE_S` before each jump while a thread works.

    Trio counts only tasks. The clock would jump through hours of virtual time during the work of a thread,
    and the tasks that wake up in these hours would take the GIL from it.
    """
    run_sync = trio.to_thread.run_sync
    threads, threshold_s = 0, 0.0

    async def run_without_jumps(*arguments: Any, **options: Any) -> Any:
        nonlocal threads, threshold_s
        if not threads:
            threshold_s = autojump_clock.autojump_threshold
            autojump_clock.autojump_threshold = max(threshold_s, PATIENCE_S)
        threads += 1
        try:
            return await run_sync(*arguments, **options)
        finally:
            threads -= 1
            if not threads:
                autojump_clock.autojump_threshold = threshold_s

    monkeypatch.setattr(trio.to_thread, "run_sync", run_without_jumps)
    return autojump_clock
