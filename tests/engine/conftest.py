"""What several of these tests begin with."""

import pytest


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Every launch of one of our GPU kernels in this test, interpreted: (name, grid, arguments, options)."""
    from engine.interpreted import note_launches

    return note_launches(monkeypatch)
