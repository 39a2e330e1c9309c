"""One real server with the demonstration model, shared by the tests which leave its state unchanged."""

from collections.abc import Iterator

import pytest

import shared_certificates
from e2e.real_server import RealServer, real_server

shared_certificates.install()


@pytest.fixture(scope="session")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running
