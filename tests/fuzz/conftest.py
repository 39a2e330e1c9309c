"""Command-line options of the fuzz tests."""

import pytest


@pytest.fixture
def fuzz_seconds(pytestconfig: pytest.Config) -> float:
    """Return the time limit of all fuzz tests together, in seconds; each takes its share."""
    return pytestconfig.getoption("--fuzz-seconds")
