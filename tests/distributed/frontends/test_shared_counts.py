"""The totals of several fronts: equal at each of them, and never lower than before."""

import msgspec
import pytest
import trio

from distributed.frontends.system import System, settle
from fairlead.base.job import Job, Sampling
from fairlead.distributed.supervisor.shared_counts import CountsView, SharedCounts
from fairlead.generation.metrics.job_metrics import FrontCounts, JobMetrics, merged
from fairlead.generation.timeline import SUCCESS, RequestTimeline


def counts(jobs, *, model="m", tenant="A", **refusals):
    metrics = JobMetrics()
    for _ in range(jobs):
        job = Job(id="x", tenant=tenant, model=model, prompts=(b"",), sampling=Sampling(max_tokens=10))
        timeline = RequestTimeline(job, arrived_s=0.0, began_at_ns=0)
        timeline.granted_s, timeline.first_delta_s, timeline.ended_s = 0.5, 1.0, 2.0
        timeline.outcome, timeline.tokens = SUCCESS, 10
        metrics.add(timeline)
    return FrontCounts(metrics.statistics(), refusals)


def outcome(found):
    return dict(found.jobs.outcomes), found.refusals


async def view(system, number, own):
    found = CountsView(system.start_front(number))
    found.own = lambda: own
    await settle()
    await found.refresh()
    return found


@pytest.fixture
async def system(nursery):
    system = System(nursery)
    system.start_dispatcher()
    return system


def test_sums_of_counts_are_those_of_one_process():
    one, two = JobMetrics(), JobMetrics()
    both = merged((FrontCounts(one.statistics()), FrontCounts(two.statistics())))
    assert both == FrontCounts(one.statistics())
    assert merged((counts(2), counts(3))).jobs == counts(5).jobs
    different = merged((counts(2, model="a", tenant="X"), counts(3, model="b", tenant="Y")))
    assert different.jobs.models["b"] == counts(3, model="b").jobs.models["b"]
    assert different.jobs.tenants["X"] == counts(2, tenant="X").jobs.tenants["X"]


def test_dropped_answers_of_all_fronts_are_counted_by_tenant():
    one = FrontCounts(dropped_answers={"a": 1, "b": 2})
    two = FrontCounts(dropped_answers={"b": 3, "c": 4})
    assert merged((one, two)).dropped_answers == {"a": 1, "b": 5, "c": 4}
    assert merged((one, two), labels_at_most=2).dropped_answers == {"a": 1, "b": 5, "other": 4}


def test_models_beyond_the_limit_are_counted_together():
    parts = [counts(1, model=name) for name in "abcd"]
    found = merged(parts, labels_at_most=2).jobs.models
    assert {name: model.outcomes[SUCCESS] for name, model in found.items()} == {"a": 1, "b": 1, "other": 2}


def test_counts_can_be_sent():
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(counts(3, queue_full=2)))
    assert msgspec.convert(sent, FrontCounts) == counts(3, queue_full=2)


async def test_each_front_has_the_totals_of_all(autojump_clock, system):
    one = await view(system, 1, counts(3, queue_full=1))
    two = await view(system, 2, counts(5, queue_full=2, not_found=1))
    await one.refresh()
    expected = ({SUCCESS: 8}, {"queue_full": 3, "not_found": 1})
    assert outcome(one.totals()) == outcome(two.totals()) == expected


async def test_counts_of_a_front_that_has_ended_stay_also_with_a_new_dispatcher(autojump_clock, system):
    one = await view(system, 1, counts(3))
    await view(system, 2, counts(5))
    system.kill_front(2)
    await trio.sleep(11)
    assert "front 2" not in system.counts._counts
    await one.refresh()
    assert outcome(one.totals()) == ({SUCCESS: 8}, {})
    system.kill_dispatcher()
    await settle()
    await one.refresh()
    assert outcome(one.totals()) == ({SUCCESS: 8}, {})  # the last ones
    system.start_dispatcher(expected=("front 1",))
    await trio.sleep(1)
    await one.refresh()
    assert outcome(one.totals()) == ({SUCCESS: 8}, {})


def test_front_that_returns_is_not_counted_twice():
    shared = SharedCounts()
    shared.report("one", counts(3))
    shared.end_front("one")
    assert outcome(shared.report("two", counts(1)).all) == ({SUCCESS: 4}, {})
    assert outcome(shared.report("one", counts(4)).all) == ({SUCCESS: 5}, {})


def test_counts_of_any_number_of_ended_fronts_stay_in_bounded_memory():
    shared = SharedCounts()
    for number in range(300):
        shared.report(f"front {number}", counts(1))
        shared.end_front(f"front {number}")
    assert len(shared._absent) == 100
    assert outcome(shared.report("last", counts(1)).all) == ({SUCCESS: 301}, {})


def test_jobs_of_an_ended_front_are_not_counted_as_running():
    shared = SharedCounts()
    running = counts(1)
    model = msgspec.structs.replace(running.jobs.models["m"], running=3, waiting=2)
    jobs = msgspec.structs.replace(running.jobs, models={"m": model})
    shared.report("one", msgspec.structs.replace(running, jobs=jobs))
    shared.end_front("one")
    total = shared.report("two", FrontCounts()).all.jobs.models["m"]
    assert (total.running, total.waiting, total.outcomes) == (0, 0, {SUCCESS: 1})


async def test_counts_of_ended_fronts_are_added_once_however_often_a_front_reconnects(autojump_clock, system):
    one = await view(system, 1, counts(3))
    await view(system, 2, counts(5))
    system.kill_front(2)
    await trio.sleep(11)
    await one.refresh()
    for _ in range(3):
        system.cut(system.fronts[1])
        await trio.sleep(1)
        await one.refresh()
    assert outcome(one.totals()) == ({SUCCESS: 8}, {})
    system.kill_dispatcher()
    await settle()
    system.start_dispatcher(expected=("front 1",))
    for _ in range(3):
        await trio.sleep(1)
        await one.refresh()
        system.cut(system.fronts[1])
    assert outcome(one.totals()) == ({SUCCESS: 8}, {})
