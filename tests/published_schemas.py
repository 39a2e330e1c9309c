"""JSONSchemaBench, JSON-Schema-Test-Suite and JSONTestSuite, which belong to their authors.

    python tests/published_schemas.py [--from FOLDER]

clones them with git, or links to copies in a folder. Without them, their tests are skipped, and
`bench/schema_suites.py` has nothing to measure.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "build" / "schemas"
REPOSITORIES = {
    "jsonschemabench": "https://github.com/guidance-ai/jsonschemabench",
    "JSON-Schema-Test-Suite": "https://github.com/json-schema-org/JSON-Schema-Test-Suite",
    "JSONTestSuite": "https://github.com/nst/JSONTestSuite",
}
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


class Published(NamedTuple):
    """A published schema. `tests`: values, each with whether it is valid."""

    name: str
    schema: Any
    tests: list[tuple[Any, bool]]


def fetch(source: str | None) -> None:
    """Clone the repositories, or link to copies of them in the folder `source`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, address in REPOSITORIES.items():
        if source is None:
            command = ["git", "clone", "--quiet", "--depth", "1", address, str(FOLDER / name)]
            subprocess.run(command, check=True)
        else:
            (FOLDER / name).symlink_to(Path(source, name).resolve())


def bench() -> Iterator[Published]:
    """Yield the schemas of JSONSchemaBench that have tests."""
    for path in sorted((FOLDER / "jsonschemabench" / "maskbench" / "data").glob("*.json")):
        found = json.loads(path.read_bytes())
        yield Published(path.stem, found["schema"], _tests(found))


def suite() -> Iterator[Published]:
    """Yield the schemas of the test suite, by draft, those of formats included."""
    for draft, address in DRAFTS.items():
        folder = FOLDER / "JSON-Schema-Test-Suite" / "tests" / draft
        for path in [*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/**/*.json"))]:
            for one in json.loads(path.read_bytes()):
                schema = one["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": address, **schema}
                name = f"{path.relative_to(folder.parent).with_suffix('')}: {one['description']}"
                yield Published(name, schema, _tests(one))


def json_strings() -> list[tuple[str, bytes]]:
    """Return the documents of JSONTestSuite about strings that every parser must accept."""
    folder = FOLDER / "JSONTestSuite" / "test_parsing"
    return [(path.stem, path.read_bytes()) for path in sorted(folder.glob("y_string_*.json"))]


def _tests(found: dict[str, Any]) -> list[tuple[Any, bool]]:
    return [(test["data"], test["valid"]) for test in found.get("tests", [])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="source", help="a folder with copies of the repositories")
    fetch(parser.parse_args().source)
