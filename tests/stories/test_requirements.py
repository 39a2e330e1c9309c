"""Every line of `requirements.yaml` names tests that exist, or says why there are none."""

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).parents[1]
TABLE = yaml.safe_load(Path(__file__).with_name("requirements.yaml").read_text(encoding="utf-8"))
LINES = [(number, line) for number, document in TABLE.items() for line in document["requirements"]]
FIELDS = {"at", "requirement", "tests", "differs", "out_of_scope"}


@cache
def names_in(file: str) -> frozenset[str]:
    """Return what pytest collects from a file: functions, classes, and state machines' test cases."""
    collected = set()
    for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            collected.add(node.name)
        elif isinstance(node, ast.Assign):
            collected |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in collected if name.startswith(("test_", "Test")))


def test_table_has_the_five_documents():
    assert list(TABLE) == ["000", "001", "002", "003", "004"]
    assert all(document["title"] for document in TABLE.values())


@pytest.mark.parametrize(("number", "line"), LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_line_has_a_requirement_and_either_tests_or_a_reason_for_none(number, line):
    assert set(line) <= FIELDS
    assert line["at"].strip()
    assert line["requirement"].strip()
    assert bool(line.get("tests")) != bool(line.get("out_of_scope"))
    assert all(text.strip() for text in (line.get("differs", "x"), line.get("out_of_scope", "x")))


def test_every_named_test_exists():
    named = sorted({test for _, line in LINES for test in line.get("tests", ())})
    missing = []
    for test in named:
        file, _, name = test.partition("::")
        if not (TESTS / file).is_file() or name not in names_in(file):
            missing.append(test)
    assert missing == []


def test_no_line_is_duplicated():
    lines = [(number, line["at"], line["requirement"]) for number, line in LINES]
    assert len(lines) == len(set(lines))


def test_every_story_is_named_in_the_table():
    named = {test for _, line in LINES for test in line.get("tests", ())}
    stories = [
        f"stories/{file.name}::{test}"
        for file in sorted((TESTS / "stories").glob("test_seed_*.py"))
        for test in names_in(f"stories/{file.name}")
    ]
    assert sorted(story for story in stories if story not in named) == []


@pytest.mark.parametrize("field", ["prompt_embeds", "mm_features", "lora_request"])
def test_columns_that_the_batch_does_not_have_are_out_of_scope_with_a_reason(field):
    (line,) = [line for number, line in LINES if number == "001" and line["requirement"].startswith(field)]
    assert line["out_of_scope"].endswith(".")
    absent = (
        (TESTS.parent / "ARCHITECTURE.md")
        .read_text(encoding="utf-8")
        .partition("\n## Absent on purpose\n")[2]
    )
    assert f"`{field}`" in absent.partition("\n## ")[0]
