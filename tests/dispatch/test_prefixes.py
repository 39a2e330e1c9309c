"""What is remembered of the beginnings of prompts, and what that is worth when a job is placed."""

from random import Random

import pytest

from dispatch.recorded import FakeNode, job, limits, scheduler, submit
from fairlead.dispatch import prefixes as module
from fairlead.dispatch.placement import Place, choose
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


def test_prompts_are_alike_as_far_as_they_are_the_same():
    same, other = list(range(300)), list(range(300))
    other[100] = -5
    ours, theirs = prefixes_of(asking(same)), prefixes_of(asking(other))
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
    assert ours == prefixes_of(asking([*same, 7]))


def test_a_difference_at_the_beginning_is_one_in_every_length():
    ours, theirs = prefixes_of(asking(range(2000))), prefixes_of(asking([9, *range(1, 2000)]))
    assert not set(ours) & set(theirs)


def test_the_share_is_that_of_the_longest_beginning_in_what_was_looked_at():
    remembered = Remembered()
    remembered.add(prefixes_of(asking(range(300))))
    assert 1.0 == remembered.share(prefixes_of(asking(range(300))))
    assert 256 / 1024 == remembered.share(prefixes_of(asking(range(1024))))
    assert 0.0 == remembered.share(prefixes_of(asking(range(1, 1024))))
    assert 0.0 == remembered.share(())


def test_what_was_not_given_for_longest_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    remembered = Remembered()
    for prefix in (1, 2, 1, 3):
        remembered.add((prefix,))
    assert [1.0, 0.0, 1.0] == [remembered.share((prefix,)) for prefix in (1, 2, 3)]
    assert KEPT >= len(LENGTHS)


def placed(
    *nodes: tuple[int, bool], tenant: str = "A", isolates: bool = False, seats: int = 10
) -> list[Place]:
    """Places with so many jobs, and whether each has had tenant A's prompt."""
    places = []
    for number, (busy, has_had) in enumerate(nodes):
        place = Place(FakeNode(str(number)), NodeLimits(seats=10, max_model_len=9, isolates_tenants=isolates))
        place.busy = busy
        if has_had:
            place.remember(asking(range(100)), prefixes_of(asking(range(100))))
        places.append(place)
    return places


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        (((3, False), (4, True)), 1),  # a little more to do, and the prompt
        (((3, False), (6, True)), 0),  # too much more
        (((0, False), (1, True)), 0),  # nothing goes before an idle one
        (((0, False), (0, True)), 1),  # of two idle ones, that which has it
    ],
)
def test_a_prompt_goes_back_to_its_node_as_long_as_that_costs_little(nodes, chosen):
    new = asking(range(100))
    places = placed(*nodes)
    assert {places[chosen]} == {choose(places, Random(seed), new, prefixes_of(new)) for seed in range(20)}


def test_where_tenants_are_kept_apart_another_ones_prompt_is_worth_nothing():
    new = asking(range(100), tenant="B")
    for isolates in (False, True):
        places = placed((3, False), (4, True), isolates=isolates)
        assert places[not isolates] is choose(places, Random(0), new, prefixes_of(new))


def test_the_scheduler_remembers_what_it_granted_where():
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
    assert 3 == len(set(at.values()))
    for start in (2000, 0, 1000):
        again = job()
        again.job = asking(range(start, start + 80))
        submit(subject, again)
        assert at[start] is again.place
    assert 6 == len(effects.granted)
