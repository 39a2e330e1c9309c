"""The node pool by itself: where a job fits, which jobs hold seats, and which nodes are closed."""

from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.node_state import NodeState
from router.dispatch.recorded import FakeNode, job, limits, remote_limits


def pool(**limits_by_id: NodeLimits) -> NodePool:
    filled = NodePool(Random(0))
    for name, its in limits_by_id.items():
        filled.add(*FakeNode(name), its)
    return filled


def test_job_fits_where_a_seat_and_its_memory_are_free():
    subject = pool(one=limits(1, cache_tokens=10))
    large = job(tokens=50)
    assert subject.fits(job(model="another")) is None
    assert subject.fits(large), "an admitted job always fits alone"
    subject.assign(large)
    assert subject.fits(job()) is None
    subject["one"].limits = limits(2, cache_tokens=10)
    assert subject.fits(job(tokens=1)) is False
    subject.release(large)
    assert subject.fits(job(tokens=1))


def test_one_node_that_has_both_seat_and_memory_is_enough():
    subject = pool(small=limits(2, cache_tokens=10), large=limits(2, cache_tokens=100))
    for name, taken in (("small", 9), ("large", 50)):
        subject[name].acquire(taken)
    spec = job(tokens=20)
    assert subject.fits(spec)
    subject.assign(spec)
    assert subject["large"] is spec.node


@pytest.mark.parametrize(
    ("load_of_first", "busy_of_first", "expected"),
    [
        # 0.3·load + 0.7·busy/seats, with the other node at 0.3·0.5 + 0.7·5/10 = 0.5
        (0.99, 2, "first"),  # 0.437
        (1.0, 2, "first"),  # 0.44
        (0.7, 4, "first"),  # 0.49
        (0.8, 4, "other"),  # 0.52
        (0.0, 7, "first"),  # 0.49
        (0.04, 7, "other"),  # 0.502
        (0.49, 5, "first"),
        (0.51, 5, "other"),
    ],
)
def test_score_weighs_reported_load_by_three_tenths_and_our_own_count_by_seven(
    load_of_first, busy_of_first, expected
):
    subject = pool(
        first=replace(limits(10), load=load_of_first),
        other=replace(limits(10), load=0.5),
    )
    for name, busy in (("first", busy_of_first), ("other", 5)):
        for _ in range(busy):
            subject[name].acquire(0)
    assert subject[expected] is assigned(subject)


def test_idle_node_is_chosen_before_any_score_counts():
    subject = pool(idle=replace(limits(1), load=1.0), busy=replace(limits(100), load=0.0))
    subject["busy"].acquire(0)
    assert subject["idle"] is assigned(subject)


def assigned(subject: NodePool) -> NodeState | None:
    """Return the node that the pool gives a job."""
    ticket = job()
    subject.assign(ticket)
    return ticket.node


def test_ties_are_broken_at_random_among_nodes_of_different_models():
    subject = NodePool(Random(0))
    for name, models in (("a", "m"), ("b", "mn"), ("c", "mn")):
        subject.add(*FakeNode(name, *models), limits(1000))
    chosen = Counter()
    for _ in range(300):
        ticket = job()
        subject.assign(ticket)
        chosen[ticket.node.id] += 1
        subject.release(ticket)
    assert all(80 < count < 120 for count in chosen.values()), chosen
    assert len(chosen) == 3


def test_job_goes_back_where_it_failed_only_if_there_is_nothing_else():
    subject = pool(one=limits(1), two=limits(1))
    failed = job()
    failed.failed_at = subject["one"]
    assert {subject["one"]} == subject.avoided(failed)
    subject["two"].acquire(0)
    assert subject.fits(failed) is None
    subject.remove("two")
    assert not subject.avoided(failed)
    assert subject.fits(failed)


def test_seat_of_a_node_before_its_restart_is_not_freed_on_the_restarted_node():
    subject = pool(one=limits(1))
    sitting = job()
    subject.assign(sitting)
    earlier = subject["one"]
    later = subject.add(*FakeNode("one"), limits(1))
    assert (subject.is_current(earlier), subject.is_current(later)) == (False, True)
    assert earlier is subject.release(sitting)
    assert later.free == 1


def test_closed_node_stays_closed_when_it_is_added_again_until_it_is_reopened():
    subject = pool(one=limits(1))
    assert subject.close("one")
    assert not subject.close("two")
    assert not subject.has_seat_for(job().job)
    assert [subject["one"]] == subject.idle_and_leaving()
    for name in ("one", "two"):
        assert subject.add(*FakeNode(name), limits(1)).leaving
        subject.reopen(name)
        assert not subject.add(*FakeNode(name), limits(1)).leaving


def test_busy_node_is_not_released_and_uses_are_numbered_in_order():
    subject = pool(one=limits(2), two=limits(2))
    first, second = job(), job()
    subject.assign(first)
    subject.assign(second)
    assert {node.used for node in subject.values()} == {1, 2}
    assert second.node is not None
    assert second.node.used == 2
    subject.close("one")
    assert subject.idle_and_leaving() == []


@pytest.mark.parametrize(("prompt", "is_too_long"), [(49, False), (50, True)])
def test_job_is_too_long_only_if_the_longest_model_is_too_short(prompt, is_too_long):
    subject = pool(one=limits(1, longest=20), two=limits(1, longest=50))
    error = subject.length_error(job(prompt=prompt).job)
    assert is_too_long == (error is not None)
    assert error is None or (error.param, "length is 50 tokens" in error.message) == ("prompt", True)
    assert subject.length_error(job(prompt=prompt, model="not up").job) is None


def test_node_that_a_swap_loads_is_local_and_a_remote_node_is_not():
    subject = pool(far=remote_limits(1), near=limits(1))
    assert [subject["near"]] == subject.local()
    assert subject["near"] is subject.local_with("m")
    assert [subject["far"], subject["near"]] == subject.with_model("m")
    assert [subject["near"]] == subject.accepting(job().job), "a job without a body cannot be relayed"
    subject.remove("near")
    assert subject.local_with("m") is None
