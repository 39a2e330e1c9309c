"""Marks that name the advisories that a test tries."""

import pytest


def tries(*numbers: str) -> pytest.MarkDecorator:
    """Name the advisories that the test tries. They are all in its id: `-k CVE-2025-48956` finds it."""
    return pytest.mark.parametrize("numbers", [numbers], ids=["+".join(numbers)], indirect=True)


def tries_each(*numbers: str) -> pytest.MarkDecorator:
    """Run the test once for each of these advisories; its argument `number` is the advisory's number."""
    return pytest.mark.parametrize("number", numbers, ids=numbers)
