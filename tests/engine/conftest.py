"""Fixtures of the engine tests."""

import pytest


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """All launches of our GPU kernels in this test, interpreted: (name, grid, arguments, options)."""
    from engine.interpreted import note_launches

    return note_launches(monkeypatch)
