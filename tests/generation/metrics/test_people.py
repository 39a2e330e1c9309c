"""People: their open requests, and their shares against a fair one."""

import pytest

from fairlead.generation.metrics.activity import Activity
from fairlead.generation.metrics.people import KEYS_AT_MOST, PEOPLE_AT_MOST, People, SeatShare
from fairlead.generation.metrics.requests import RequestScope
from generation.metrics.board_values import ended, running, waiting

NOW = 1000.0
ALL = RequestScope()


def people_of(requests, jobs=(), scope=ALL, now=NOW):
    people, activity = People(), Activity(requests)
    for request in requests:
        people.note(request)
    return {person.tenant: person for person in people.find(activity, list(jobs), now, scope)}


def test_person_has_its_open_requests_and_its_oldest_wait():
    jobs = [waiting(age_s=9.0), waiting(age_s=2.0), running(), waiting("ben", age_s=30.0)]
    found = people_of([], jobs)
    assert (found["ana"].waiting, found["ana"].running, found["ana"].oldest_wait_s) == (2, 1, 9.0)
    assert (found["ben"].waiting, found["ben"].running, found["ben"].oldest_wait_s) == (1, 0, 30.0)
    assert list(found) == ["ana", "ben"]


def test_shares_are_of_the_seats_that_were_used():
    found = people_of([ended("ana", took_s=31.0), ended("ben", took_s=11.0)])
    for window in ("minute", "hour", "day"):
        assert getattr(found["ana"], window).part == pytest.approx(0.75)
        assert getattr(found["ben"], window) == SeatShare(pytest.approx(0.25), 0.5)


def test_who_only_waits_has_a_fair_share_of_which_it_got_nothing():
    found = people_of([], [running("ana"), waiting("ben")])
    assert found["ben"].minute == SeatShare(0.0, 0.5)
    assert found["ana"].minute == SeatShare(1.0, 0.5)


def test_who_used_nothing_in_a_time_has_no_part_in_it():
    found = people_of([ended("ana", ended_at=NOW), ended("ben", ended_at=NOW - 1800)])
    assert found["ana"].minute == SeatShare(1.0, 1.0)
    assert found["ben"].minute == SeatShare()
    assert found["ben"].hour.fair == 0.5


def test_team_shares_one_part_by_its_weight():
    jobs = [
        running("ana", team="red", team_weight=2.0),
        running("ben", team="red", team_weight=2.0),
        running("carl"),
    ]
    found = people_of([], jobs)
    assert {name: person.minute.fair for name, person in found.items()} == pytest.approx(
        {"ana": 1 / 3, "ben": 1 / 3, "carl": 1 / 3}
    )
    assert found["ana"].team == "red"


@pytest.mark.parametrize(
    ("scope", "seen"),
    [
        (RequestScope(tenant="ana"), {"ana"}),
        (RequestScope(tenant="portal"), set()),
        (RequestScope(tenant="portal", key="key-portal"), {"portal/carl"}),
        (ALL, {"ana", "ben", "portal/carl"}),
    ],
)
def test_scope_hides_other_people(scope, seen):
    requests = [ended("ana"), ended("ben"), ended("portal/carl", owner="key-portal/carl")]
    assert people_of(requests, scope=scope).keys() == seen


def test_last_keys_of_a_person_are_known_and_bounded():
    requests = [ended("ana", owner=f"key-{number}") for number in range(KEYS_AT_MOST + 2)]
    keys = people_of(requests)["ana"].keys
    assert (len(keys), keys[-1]) == (KEYS_AT_MOST, f"key-{KEYS_AT_MOST + 1}")


def test_number_of_people_is_bounded():
    found = people_of([ended(f"t{number}") for number in range(PEOPLE_AT_MOST + 5)])
    assert PEOPLE_AT_MOST - 5 <= len(found) <= PEOPLE_AT_MOST
    assert "t0" not in found


def test_who_has_used_nothing_for_a_day_is_absent():
    assert people_of([ended("ana", ended_at=NOW), ended("ben", ended_at=NOW)], now=NOW + 90_000) == {}
