"""Remembered prefixes of prompts, and how much they count when a job is placed."""

from random import Random

import pytest

from dispatch.recorded import FakeNode, job, limits, scheduler, submit
from fairlead.dispatch import prefixes as module
from fairlead.dispatch.node_state import NodeState, choose
from fairlead.dispatch.prefixes import KEPT, LENGTHS, Remembered, prefixes_of
from fairlead.job import Job, Relay, Sampling
from fairlead.nodes.node import NodeLimits


def asking(tokens=(), tenant="A", body=None) -> Job:
    relay = None if body is None else Relay("/v1/completions", body)
    prompts = (list(tokens),) if tokens else ()
    return Job("r", tenant, "m", prompts, Sampling(max_tokens=1), relay=relay)


@pytest.mark.parametrize(("length", "hashes"), [(0, 0), (63, 0), (64, 1), (255, 1), (256, 2), (5000, 3)])
def test_a_prompt_has_a_hash_for_each_length_that_it_reaches(length, hashes):
    assert hashes == len(prefixes_of(asking(range(length))))
    assert hashes == len(prefixes_of(asking(body=b"x" * 4 * length)))


def test_prompts_share_hashes_as_far_as_they_are_equal():
    same, other = list(range(300)), list(range(300))
    other[100] = -5
    ours, theirs = prefixes_of(asking(same)), prefixes_of(asking(other))
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
    assert ours == prefixes_of(asking([*same, 7]))


def test_a_difference_at_the_beginning_changes_the_hash_of_every_length():
    ours, theirs = prefixes_of(asking(range(2000))), prefixes_of(asking([9, *range(1, 2000)]))
    assert not set(ours) & set(theirs)


def test_the_share_is_the_longest_known_prefix_over_the_hashed_length():
    remembered = Remembered()
    remembered.add(prefixes_of(asking(range(300))))
    assert remembered.share(prefixes_of(asking(range(300)))) == 1.0
    assert remembered.share(prefixes_of(asking(range(1024)))) == 256 / 1024
    assert remembered.share(prefixes_of(asking(range(1, 1024)))) == 0.0
    assert remembered.share(()) == 0.0


def test_the_least_recently_added_prefix_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    remembered = Remembered()
    for prefix in (1, 2, 1, 3):
        remembered.add((prefix,))
    assert [remembered.share((prefix,)) for prefix in (1, 2, 3)] == [1.0, 0.0, 1.0]
    assert len(LENGTHS) <= KEPT


def placed(
    *nodes: tuple[int, bool], tenant: str = "A", isolates: bool = False, seats: int = 10
) -> list[NodeState]:
    """Return a place for each node: the number of its jobs, and whether it has had tenant A's prompt."""
    places = []
    for number, (busy, has_had) in enumerate(nodes):
        place = NodeState(
            FakeNode(str(number)), NodeLimits(seats=10, max_model_len=9, isolates_tenants=isolates)
        )
        place.busy = busy
        if has_had:
            place.remember(asking(range(100)), prefixes_of(asking(range(100))))
        places.append(place)
    return places


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        (((3, False), (4, True)), 1),  # slightly busier, but it has had the prompt
        (((3, False), (6, True)), 0),  # too much busier
        (((0, False), (1, True)), 0),  # an idle node always comes first
        (((0, False), (0, True)), 1),  # of two idle nodes, the one that has had the prompt
    ],
)
def test_a_prompt_goes_back_to_its_node_as_long_as_that_costs_little(nodes, chosen):
    new = asking(range(100))
    places = placed(*nodes)
    assert {places[chosen]} == {choose(places, Random(seed), new, prefixes_of(new)) for seed in range(20)}


def test_where_tenants_are_isolated_the_prompt_of_another_tenant_does_not_count():
    new = asking(range(100), tenant="B")
    for isolates in (False, True):
        places = placed((3, False), (4, True), isolates=isolates)
        assert places[not isolates] is choose(places, Random(0), new, prefixes_of(new))


def test_the_scheduler_remembers_which_node_had_which_prompt():
    subject, effects = scheduler()
    for name in "abc":
        subject.node_up(FakeNode(name), limits(4))
    subject.seats_changed(FakeNode("a"), limits(4, longest=500))
    prompts = [list(range(start, start + 80)) for start in (0, 1000, 2000)]
    tickets = [job(prompt=80) for _ in prompts]
    for ticket, prompt in zip(tickets, prompts, strict=True):
        ticket.job = asking(prompt)
        submit(subject, ticket)
    at = {ticket.job.prompts[0][0]: ticket.place for ticket in tickets}
    assert len(set(at.values())) == 3
    for start in (2000, 0, 1000):
        again = job()
        again.job = asking(range(start, start + 80))
        submit(subject, again)
        assert at[start] is again.place
    assert len(effects.granted) == 6
