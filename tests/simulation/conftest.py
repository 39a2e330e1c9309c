"""What the tests of the simulation share: processes to run it in."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from simulation import workers


@pytest.fixture(scope="session")
def simulators(pytestconfig: pytest.Config) -> Iterator[ProcessPoolExecutor]:
    """Processes that run simulations."""
    with workers.pool(pytestconfig.getoption("--simulation-processes")) as executor:
        yield executor
