"""A headless browser, and one real server with the demonstration model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from e2e.conftest import server

if TYPE_CHECKING:  # its import skips without the tools: only tests that need them may skip
    from browser.headless import Browser

__all__ = ["chromium", "server"]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator["Browser"]:
    """A headless browser, if one is installed. Its screenshots are kept in pytest's temporary folder."""
    from browser.headless import browser

    with browser(tmp_path_factory.mktemp("screenshots")) as started:
        yield started
