"""The calls of the Berkeley Function Calling Leaderboard, in every wire format."""

import pytest

from language.structured import bfcl
from language.structured.bfcl import CATEGORIES, Question
from language.structured.bfcl_counts import INVALID, UNNAMED, counted, outcomes
from language.structured.rendering import WIRE_FORMATS

FEW = 150  # of so many questions, one is asked in the short form


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    if not bfcl.is_present():
        pytest.skip(
            f"without {sum(CATEGORIES.values())} questions: run `python tests/language/structured/bfcl.py`"
        )
    return [*bfcl.questions()]


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
@pytest.mark.parametrize("every", [FEW, pytest.param(1, marks=pytest.mark.nightly)])
def test_ground_truth_is_parsed_back_and_allowed(questions: list[Question], name: str, every: int) -> None:
    counts, defects = counted([name], questions[::every])
    assert not defects
    assert sum(counts[name]["parsed"].values()) >= len(questions[::every])  # of some formats, each call


def test_questions_are_complete(questions: list[Question]) -> None:
    assert len(questions) == sum(CATEGORIES.values())
    assert all(name in question.tools for question in questions for name, _ in question.calls)


def test_types_of_other_languages_become_types_of_json() -> None:
    described = {
        "type": "dict",
        "properties": {
            "ratio": {"type": "float", "description": "a ratio"},
            "pair": {"type": "tuple", "items": {"type": "long"}},
            "map": {"type": "HashMap", "properties": {"any": {"type": "any"}}},
        },
        "required": ["ratio"],
    }
    assert bfcl.json_schema(described) == {
        "type": "object",
        "properties": {
            "ratio": {"type": "number", "format": "float", "description": "a ratio"},
            "pair": {"type": "array", "items": {"type": "integer"}},
            "map": {"type": "object", "properties": {"any": {"type": "string"}}},
        },
        "required": ["ratio"],
    }


NUMBER = {"f": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}}


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [({"n": 5e-7}, {None}), ({"n": "five"}, {None, INVALID}), ({"n": 1, "m": 2}, {None, UNNAMED})],
)
def test_only_what_a_format_cannot_express_has_a_reason(
    name: str, arguments: dict[str, object], reasons: set[str | None]
) -> None:
    found = [*outcomes(name, Question("q", NUMBER, [("f", arguments)]), every_cut=True)]
    assert {outcome.reason for outcome in found} <= reasons
    assert len(found) == 5
