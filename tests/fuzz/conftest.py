"""What the fuzz tests are told on the command line."""

import pytest


@pytest.fixture
def fuzz_seconds(pytestconfig: pytest.Config) -> float:
    """How long all fuzz tests together may take; each takes its share."""
    return pytestconfig.getoption("--fuzz-seconds")
