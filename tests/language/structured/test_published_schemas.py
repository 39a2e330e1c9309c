"""Published schemas accept no value that is not valid for them, as far as they are served.

All of them are counted by `bench/schema_suites.py`; this is one of so many.
"""

import importlib.util
from itertools import islice
from pathlib import Path

import pytest

from published_schemas import FOLDER, bench, suite

SCRIPT = Path(__file__).parents[3] / "bench" / "schema_suites.py"
COLLECTIONS = {"JSONSchemaBench": (bench, 100, 0.8), "JSON-Schema-Test-Suite": (suite, 15, 0.6)}
"""Each with how many schemas one is taken of, and the least part of them that is served."""


@pytest.mark.parametrize("name", COLLECTIONS)
def test_no_value_is_accepted_that_is_not_valid(name: str) -> None:
    if not (FOLDER / "jsonschemabench").is_dir():
        pytest.skip("the collections are not there: see published_schemas.py")
    spec = importlib.util.spec_from_file_location("schema_suites", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    measuring = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measuring)
    published, every, least = COLLECTIONS[name]
    found = measuring.measure(islice(published(), 0, None, every), 1)
    assert [one for one in found.wrongly_accepted if "hostname" not in one] == []
    assert found.served >= least * found.schemas
    assert found.accepted >= 0.95 * found.valid
