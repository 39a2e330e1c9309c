"""One real server with the demonstration model for all tests that leave it as they found it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from e2e.real_server import RealServer, real_server

if TYPE_CHECKING:  # it skips where the tools are missing, and only those tests that need them
    from e2e.browser import Browser


@pytest.fixture(scope="session")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator["Browser"]:
    """A headless browser, where there is one. Its pictures stay among the tests' output."""
    from e2e.browser import browser

    with browser(tmp_path_factory.mktemp("pictures")) as started:
        yield started
