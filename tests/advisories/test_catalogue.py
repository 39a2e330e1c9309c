"""Every known advisory has tests or a reason to have none; every number in a test is in the catalogue."""

import re

import pytest

from advisories.catalogue import Advisory, read_catalogue, tried_numbers

NUMBER = re.compile(r"CVE-\d{4}-\d{4,7}|GHSA(-[23456789cfghjmpqrvwx]{4}){3}|[\w.-]+/[\w.-]+#\d+", re.ASCII)


@pytest.fixture(scope="module")
def tried() -> dict[str, list[str]]:
    return tried_numbers()


@pytest.mark.parametrize(
    ("number", "advisory"), read_catalogue(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_advisory_has_either_tests_or_a_reason_why_not(tried, number: str, advisory: Advisory):
    tests = [test for each in (number, *advisory.aliases) for test in tried.get(each, [])]
    assert bool(tests) != bool(advisory.untested_because), (tests, advisory.untested_because)


def test_number_that_is_tried_is_in_the_catalogue(tried):
    known = {each for number, advisory in read_catalogue() for each in (number, *advisory.aliases)}
    assert {number: tests for number, tests in tried.items() if number not in known} == {}


def test_numbers_are_well_formed_and_unique():
    numbers = [each for number, advisory in read_catalogue() for each in (number, *advisory.aliases)]
    assert [number for number in numbers if NUMBER.fullmatch(number) is None] == []
    assert sorted(numbers) == sorted(set(numbers))


def test_texts_are_single_sentences():
    for number, advisory in read_catalogue():
        for text in (advisory.summary, advisory.untested_because or "It is tried."):
            assert re.fullmatch(r"[^\s].{10,200}\.", text), number
