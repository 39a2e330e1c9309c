"""A server that the tests of a file share."""

from collections.abc import Iterator

import pytest

import shared_certificates
from fairlead.config import QueueConfig
from roles.running_server import RunningServer, shared_server

shared_certificates.install()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with two fronts and room for many waiting jobs, which each test leaves at rest."""
    with shared_server(queue=QueueConfig(capacity=200, timeout_s=600.0)) as server:
        yield server
