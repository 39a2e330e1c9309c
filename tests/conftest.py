"""For all tests, before anything imports torch: its threads must not spin while they wait.

Where there is no GPU, Triton is asked to interpret our kernels, which it is when it is imported.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say how long to fuzz, which is never long enough."""
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-seconds", type=float, default=20.0, help="time for the fuzz tests, all together")
    group.addoption("--fuzz-steps", type=int, default=0, help="instead of a time: strike at so many steps")
    group.addoption("--fuzz-seed", type=int, default=0, help="where --fuzz-steps begins")
