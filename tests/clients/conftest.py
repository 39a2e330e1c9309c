"""Clients as their users run them, unmodified, against a real server with the demonstration model.

The model is too small to answer well, but what it answers has the requested form. The tests of a package that
is not installed are skipped; the extra `clients` installs all.
"""

import gc
from collections.abc import Iterator

import pytest

import shared_certificates
from e2e.real_server import RealServer, real_server

shared_certificates.install()

MODEL = "fairlead-demo"


@pytest.fixture(scope="session")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: RealServer) -> str:
    return f"{server.url}/v1"


@pytest.fixture
def garbage_is_collected() -> Iterator[None]:
    """Collect what a package leaves open while the marks of its file ignore the warnings."""
    yield
    gc.collect()
