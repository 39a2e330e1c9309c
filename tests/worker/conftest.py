"""Nobody's last words are missed here because the machine is busy."""

import pytest

from worker.children import PATIENCE_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("END_WAIT_S", "LOG_WAIT_S"):
        monkeypatch.setattr(f"fairlead.worker.client.{name}", PATIENCE_S / 2)
