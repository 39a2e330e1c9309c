"""For all tests, before anything imports torch: its threads must not spin while they wait.

Where there is no GPU, Triton is asked to interpret our kernels, which it is when it is imported.

Hypothesis makes up the same examples in each run, so that a commit that passed once passes again, and a busy
machine does not trouble it. With `--hypothesis-profile nightly` it looks for new ones, and tries those first
that failed in an earlier run: it keeps them in `.hypothesis/examples`.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "nightly",
    # Said in full: where a variable `CI` is set, Hypothesis has other defaults.
    derandomize=False,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
    print_blob=True,
)
settings.register_profile("suite", settings.get_profile("nightly"), derandomize=True, database=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for how long to test, fuzz and simulate."""
    parser.addoption("--nightly", action="store_true", help="run also the long forms of tests")
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-seconds", type=float, default=20.0, help="time for the fuzz tests, all together")
    group.addoption("--fuzz-steps", type=int, default=0, help="instead of a time: strike at so many steps")
    group.addoption("--fuzz-seed", type=int, default=0, help="where --fuzz-steps and --fuzz-requests begin")
    group.addoption("--fuzz-requests", type=int, default=1000, help="mutated requests to a real server")
    group.addoption("--fuzz-connections", type=int, default=100, help="mutated connections beside them")
    group = parser.getgroup("simulation")
    group.addoption("--simulation-hours", type=int, default=20, help="virtual hours to simulate")
    group.addoption("--simulation-seed", type=int, default=None, help="the seed to replay, or to begin with")
    group.addoption("--simulation-sweep", default="", help="the place in a sweep to replay, as name:number")
    group.addoption("--simulation-thorough", action="store_true", help="faults at every place, not at some")
    group.addoption("--simulation-processes", type=int, default=2, help="processes that simulate")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long forms without `--nightly`."""
    if config.getoption("--nightly"):
        return
    config.hook.pytest_deselected(items=[item for item in items if "nightly" in item.keywords])
    items[:] = [item for item in items if "nightly" not in item.keywords]
