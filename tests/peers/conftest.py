"""Programs of others, unmodified, in front of Fairlead and as its nodes.

Each test needs real programs and real time, so the whole suite leaves this folder out: `pytest tests/peers`
runs it. The extra `peers` installs the Python packages; nginx, Caddy and HAProxy are found by `PATH`. The
tests of a program that is missing are skipped.
"""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out unless an argument names it."""
    named = any("peers" in Path(argument.partition("::")[0]).parts for argument in config.args)
    return None if named else True
