"""Remembered prefixes of prompts, and how much they count when a job is placed."""

from random import Random

import pytest

from fairlead.base.job import Job, Relay, Sampling
from fairlead.generation.gateway import spec_of
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch import prefixes as module
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.prefixes import KEPT, LENGTHS, RecentPrefixes, prefix_hashes, shares
from fairlead.router.dispatch.ticket import Ticket
from router.dispatch.recorded import FakeNode, job, limits, scheduler, submit


def job_with(tokens, owner="") -> JobSpec:
    return JobSpec(request_id="r", tenant="A", model="m", prefixes=prefix_hashes(list(tokens), owner))


@pytest.mark.parametrize(("length", "hashes"), [(0, 0), (63, 0), (64, 1), (255, 1), (256, 2), (5000, 3)])
def test_prompt_has_a_hash_for_each_length_that_it_reaches(length, hashes):
    assert hashes == len(prefix_hashes(range(length)))
    assert hashes == len(prefix_hashes(b"x" * 4 * length))


@pytest.mark.parametrize("prompts", [(), ([1] * 70, [2] * 500)])
def test_job_is_hashed_by_its_first_prompt_or_else_by_the_request_that_is_relayed(prompts):
    relay = Relay("/v1/completions", b"x" * 5000)
    first = prompts[0] if prompts else relay.body
    for owner in ("", "A", "B"):
        request = Job("r", "A", "m", prompts, Sampling(max_tokens=1), relay=relay, cache_owner=owner)
        assert spec_of(request, with_prefixes=True).prefixes == prefix_hashes(first, owner)
        assert spec_of(request).prefixes == ()


@pytest.mark.parametrize("prompt", [range(2000), b"x" * 8000])
def test_owners_share_no_hash_of_a_prompt(prompt):
    hashes = [prefix_hashes(prompt, owner) for owner in ("", "A", "B", "\ud800")]
    assert len(set().union(*hashes)) == 4 * len(LENGTHS)


def test_prompts_share_hashes_as_far_as_they_are_equal():
    same, other = list(range(300)), list(range(300))
    other[100] = -5
    of_first, of_other = prefix_hashes(same), prefix_hashes(other)
    assert of_first[0] == of_other[0]
    assert of_first[1] != of_other[1]
    assert of_first == prefix_hashes([*same, 7])


def test_difference_at_the_beginning_changes_the_hash_of_every_length():
    of_first, of_other = prefix_hashes(range(2000)), prefix_hashes([9, *range(1, 2000)])
    assert not set(of_first) & set(of_other)


def test_share_is_that_of_the_prefix_in_the_hashed_prompt():
    assert [share for _, share in shares(prefix_hashes(range(300)))] == [1.0, 64 / 256]
    assert [share for _, share in shares(prefix_hashes(range(1024)))] == [1.0, 256 / 1024, 64 / 1024]
    assert list(shares(())) == []


def test_least_recently_added_prefix_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    remembered = RecentPrefixes()
    for prefix in (1, 2, 1, 3):
        remembered.add("node", (prefix,))
    assert [remembered.holders(prefix) for prefix in (1, 2, 3)] == [("node",), (), ("node",)]
    assert len(LENGTHS) <= KEPT


def test_prefix_has_the_nodes_that_are_up_and_have_had_it():
    remembered = RecentPrefixes()
    for node in "abc":
        remembered.add(node, (1, 2))
    remembered.remove("b")
    remembered.remove("never used")
    assert remembered.holders(1) == ("a", "c")
    for node in "ac":
        remembered.remove(node)
    assert not remembered._holders
    assert not remembered._seen


def pool_with(*nodes: tuple[int, bool], owner: str = "", seed: int = 0) -> NodePool:
    """Return a pool of nodes: the number of jobs of each, and whether it has had the owner's prompt."""
    pool = NodePool(Random(seed))
    for number, (busy, has_had) in enumerate(nodes):
        limits = NodeLimits(seats=10, max_model_len=9)
        node = pool.add(*FakeNode(str(number)), limits)
        for _ in range(busy):
            node.acquire(0)
        if has_had:
            pool._prefixes.add(node, prefix_hashes(range(100), owner))
    return pool


def chosen_by(pool: NodePool, spec: JobSpec) -> int:
    ticket = Ticket(spec)
    pool.assign(ticket)
    return int(ticket.node.id)


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        (((3, False), (4, True)), 1),  # slightly busier, but it has had the prompt
        (((3, False), (6, True)), 0),  # too much busier
        (((0, False), (1, True)), 0),  # an idle node always comes first
        (((0, False), (0, True)), 1),  # of two idle nodes, the one that has had the prompt
    ],
)
def test_prompt_returns_to_its_node_while_that_costs_little(nodes, chosen):
    new = job_with(range(100))
    assert {chosen} == {chosen_by(pool_with(*nodes, seed=seed), new) for seed in range(20)}


def test_where_tenants_are_isolated_the_prompt_of_another_tenant_does_not_count():
    new = job_with(range(100), owner="B")
    for owner in ("A", "B"):
        assert chosen_by(pool_with((3, False), (4, True), owner=owner), new) == (owner == "B")


def test_scheduler_stores_which_node_had_which_prompt():
    subject, effects = scheduler()
    for name in "abc":
        subject.node_up(*FakeNode(name), limits(4))
    subject.seats_changed(*FakeNode("a"), limits(4, longest=500))
    prompts = [list(range(start, start + 80)) for start in (0, 1000, 2000)]
    tickets = [job(prompt=80) for _ in prompts]
    for ticket, prompt in zip(tickets, prompts, strict=True):
        ticket.job = job_with(prompt)
        submit(subject, ticket)
    at = {prompt[0]: ticket.node for prompt, ticket in zip(prompts, tickets, strict=True)}
    assert len(set(at.values())) == 3
    for start in (2000, 0, 1000):
        again = job()
        again.job = job_with(range(start, start + 80))
        submit(subject, again)
        assert at[start] is again.node
    assert len(effects.granted) == 6
