"""One real server with the demonstration model for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from e2e.real_server import RealServer, real_server


@pytest.fixture(scope="session")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running
