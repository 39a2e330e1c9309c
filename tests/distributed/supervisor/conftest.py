"""A server that the tests of a file share."""

from collections.abc import Iterator

import pytest

import shared_certificates
from distributed.supervisor.running_server import RunningServer, shared_server
from fairlead.base.config import Limits, QueueConfig

shared_certificates.install()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with two fronts and room for many waiting jobs, which each test leaves at rest.

    It is its clients' proxy, and has little memory for answers that they do not read.
    """
    with shared_server(
        queue=QueueConfig(capacity=200, timeout_s=600.0),
        limits=Limits(answers_bytes=2_500_000),
        trusted_proxies=("127.0.0.1", "::1"),
        tenant_names="plain",
    ) as server:
        yield server
