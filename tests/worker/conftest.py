"""Long timeouts, so that the last output of a child is not lost on a busy machine."""

import pytest

from worker.children import PATIENCE_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("END_WAIT_S", "LOG_WAIT_S"):
        monkeypatch.setattr(f"fairlead.worker.client.{name}", PATIENCE_S / 2)
