"""Fixtures of the simulation tests."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from simulation import workers


@pytest.fixture(scope="session")
def simulators(pytestconfig: pytest.Config) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes that run simulations."""
    with workers.pool(pytestconfig.getoption("--simulation-processes")) as executor:
        yield executor
