"""One real server with the demonstration model, shared by the tests which leave its state unchanged."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from e2e.real_server import RealServer, real_server

if TYPE_CHECKING:  # its import skips without the tools: only tests that need them may skip
    from e2e.browser import Browser


@pytest.fixture(scope="session")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator["Browser"]:
    """A headless browser, if one is installed. Its screenshots are kept in pytest's temporary folder."""
    from e2e.browser import browser

    with browser(tmp_path_factory.mktemp("screenshots")) as started:
        yield started
