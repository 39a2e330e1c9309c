"""Sets long timeouts, so that the last output of a child is read also on a busy machine."""

import pytest

from engine.worker.children import TIMEOUT_S


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("END_WAIT_S", "LOG_WAIT_S"):
        monkeypatch.setattr(f"fairlead.nodes.engines.client.{name}", TIMEOUT_S / 2)
