"""When the scheduler loads a model, and which models it evicts for that."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.base.errors import LoadFailed
from fairlead.base.job import Passthrough, Relay
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.swaps import Swaps
from fairlead.router.dispatch.ticket import LoadRequest, TicketState
from fairlead.router.swap.policy import EvictionPolicy
from router.dispatch.recorded import FakeNode, RecordedEffects, job, limits, remote_limits, scheduler, submit


class OneAtATime(EvictionPolicy):
    """A policy of two lines: every running model is evicted."""

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        return frozenset(running)


def swapping() -> tuple[Scheduler, RecordedEffects]:
    return scheduler(policy=OneAtATime(), loadable=frozenset("wxyz"))


def up(subject: Scheduler, model: str, *, seats: int = 1) -> FakeNode:
    node = FakeNode(f"node of {model}", model)
    subject.node_up(*node, limits(seats))
    return node


def test_first_job_for_a_model_loads_it_and_others_join_that_swap():
    subject, effects = swapping()
    first, second = submit(subject, job(model="x"), job(model="x"))
    assert effects.swaps == [("x", frozenset())]
    up(subject, "x", seats=2)
    assert [first, second] == effects.granted


def test_idle_model_makes_room():
    subject, effects = swapping()
    up(subject, "x")
    submit(subject, job(model="y"))
    assert [("y", frozenset("x"))] == effects.swaps
    assert subject.statistics().seats == 0


def test_model_with_work_in_flight_is_never_evicted():
    subject, effects = swapping()
    up(subject, "x")
    running, _waiting = submit(subject, job(model="x"), job(model="y"))
    assert effects.swaps == []
    subject.leave(running)
    assert [("y", frozenset("x"))] == effects.swaps


def test_jobs_of_the_loaded_model_go_first_so_that_swaps_are_few():
    subject, effects = swapping()
    up(subject, "x")
    submit(subject, job(model="x"), job("B", model="y"), job("C", model="x"), job("D", model="x"))
    subject.leave(effects.granted[-1])
    subject.leave(effects.granted[-1])
    assert [ticket.job.model for ticket in effects.granted] == ["x", "x", "x"]
    assert effects.swaps == []
    subject.leave(effects.granted[-1])
    assert [("y", frozenset("x"))] == effects.swaps


def test_starving_job_gets_its_model_before_later_jobs():
    subject, effects = swapping()
    up(subject, "x")
    _running, starving, later = submit(subject, job(model="x"), job("B", model="y"), job("C", model="x"))
    subject.starved(starving)
    subject.leave(effects.granted[-1])
    assert [("y", frozenset("x"))] == effects.swaps
    assert TicketState.QUEUED is later.state
    up(subject, "y")
    subject.leave(starving)
    assert [("y", frozenset("x")), ("x", frozenset("y"))] == effects.swaps


def test_of_models_that_are_waited_for_the_one_with_the_highest_priority_is_loaded_first():
    subject, effects = swapping()
    subject.prioritize({"z": 5, "w": -1})
    up(subject, "x")
    running, _, _, last = submit(subject, *(job(tenant, model=tenant.lower()) for tenant in "XWYZ"))
    subject.leave(running)
    assert [("z", frozenset("x"))] == effects.swaps
    subject.stopped(frozenset("x"))
    up(subject, "z")
    subject.leave(last)
    assert [("z", frozenset("x")), ("y", frozenset("z"))] == effects.swaps  # 0 comes before -1


def test_of_models_with_one_priority_the_one_that_is_waited_for_longest_is_loaded_first():
    subject, effects = swapping()
    subject.prioritize({"z": 5, "y": 5})
    up(subject, "x")
    running, *_ = submit(subject, job(model="x"), job("B", model="z"), job("C", model="y"))
    subject.leave(running)
    assert [("z", frozenset("x"))] == effects.swaps


def test_starving_job_comes_before_every_priority():
    subject, effects = swapping()
    subject.prioritize({"z": 5})
    up(subject, "x")
    running, starving, _ = submit(subject, job(model="x"), job("B", model="y"), job("C", model="z"))
    subject.starved(starving)
    subject.leave(running)
    assert [("y", frozenset("x"))] == effects.swaps


def test_priority_stops_no_running_job_and_delays_no_job_for_a_loaded_model():
    subject, effects = swapping()
    subject.prioritize({"z": 5})
    up(subject, "x", seats=2)
    _, _, beside = submit(subject, job(model="x"), job("B", model="z"), job("C", model="x"))
    assert beside in effects.granted
    assert effects.swaps == []


def test_load_request_has_the_priority_of_its_model():
    subject, effects = swapping()
    subject.prioritize({"z": 5})
    up(subject, "x")
    running, _ = submit(subject, job(model="x"), job("B", model="y"))
    subject.request_load(LoadRequest("z"))
    subject.leave(running)
    assert [("z", frozenset("x"))] == effects.swaps


@settings(max_examples=60)
@given(
    arrivals=st.permutations("wyz"),
    starving=st.lists(st.sampled_from("wyz"), unique=True),
    priorities=st.dictionaries(st.sampled_from("wyz"), st.integers(-1, 1)),
)
def test_models_are_loaded_in_the_order_of_a_plain_account(arrivals, starving, priorities):
    subject, effects = swapping()
    subject.prioritize(priorities)
    up(subject, "x")
    (leaving,) = submit(subject, job(model="x"))
    waiting = {model: submit(subject, job(model, model=model))[0] for model in arrivals}
    for model in starving:
        subject.starved(waiting[model])
    others = [model for model in arrivals if model not in starving]
    others.sort(key=lambda model: priorities.get(model, 0), reverse=True)  # a stable sort
    loaded = []
    for _ in arrivals:
        subject.leave(leaving)
        model, _ = effects.swaps[-1]
        loaded.append(model)
        up(subject, model)
        leaving = waiting[model]
    assert [*starving, *others] == loaded


def ignores_priorities(self: Swaps, priorities: Mapping[str, int]) -> None:
    return None


def loads_the_lowest_first(self: Swaps, priorities: Mapping[str, int]) -> None:
    self._priorities = {model: -priority for model, priority in priorities.items()}


def treats_zero_as_unset(self: Swaps, priorities: Mapping[str, int]) -> None:
    self._priorities = {model: abs(priority) for model, priority in priorities.items()}


@pytest.mark.parametrize("mutant", [ignores_priorities, loads_the_lowest_first, treats_zero_as_unset])
def test_comparison_of_load_orders_catches(monkeypatch: pytest.MonkeyPatch, mutant):
    monkeypatch.setattr(Swaps, "prioritize", mutant)
    with pytest.raises((AssertionError, ExceptionGroup)):
        test_models_are_loaded_in_the_order_of_a_plain_account()


def test_starving_job_that_leaves_delays_no_other_job():
    subject, effects = swapping()
    up(subject, "x")
    running, starving, later = submit(subject, job(model="x"), job("B", model="y"), job("C", model="x"))
    subject.starved(starving)
    subject.leave(starving)
    subject.leave(running)
    assert [running, later] == effects.granted
    assert effects.swaps == []


def test_when_a_starving_job_leaves_the_draining_model_has_its_seats_again_at_once():
    subject, effects = swapping()
    up(subject, "x", seats=2)
    running, starving = submit(subject, job(model="x"), job("B", model="y"))
    subject.starved(starving)
    (waiting,) = submit(subject, job("C", model="x"))
    assert [running] == effects.granted
    subject.leave(starving)
    assert [running, waiting] == effects.granted
    assert effects.swaps == []


def test_model_that_is_being_loaded_is_not_evicted_again():
    subject, effects = swapping()
    submit(subject, job(model="x"), job("B", model="y"))
    assert effects.swaps == [("x", frozenset())]


def test_failed_load_fails_its_waiters_and_the_next_job_retries():
    subject, effects = swapping()
    (waiting,) = submit(subject, job(model="x"))
    error = LoadFailed("no such file")
    subject.load_failed(FakeNode("node of x", "x").models, error)
    assert {waiting: error} == effects.refused
    submit(subject, job(model="x"))
    assert effects.swaps == [("x", frozenset()), ("x", frozenset())]


def test_no_swap_is_started_for_a_job_that_has_left():
    subject, effects = swapping()
    up(subject, "x")
    running, waiting = submit(subject, job(model="x"), job(model="y"))
    subject.leave(waiting)
    subject.leave(running)
    assert effects.swaps == []


def test_new_policy_is_a_few_lines_and_touches_nothing_else():
    class KeepX(EvictionPolicy):
        def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
            return frozenset(running) - {"x"}

    subject, effects = scheduler(policy=KeepX(), loadable=frozenset("xyz"))
    up(subject, "x")
    up(subject, "y")
    submit(subject, job(model="z"))
    assert [("z", frozenset("y"))] == effects.swaps
    assert subject.statistics().seats == 1


def test_policy_receives_the_least_recently_used_and_the_busy_models():
    calls = []

    class Watching(EvictionPolicy):
        def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
            calls.append((target, list(running)))
            return frozenset()

    subject, _ = scheduler(policy=Watching(), loadable=frozenset("wxyz"))
    for model in "xyz":
        up(subject, model)
    for model in "zxy":
        ticket, *_ = submit(subject, job(model=model))
        if model != "x":
            subject.leave(ticket)
    submit(subject, job(model="w"))
    assert calls[0] == ("w", ["z", "y", "x"])


def test_node_has_seats_again_after_its_starving_job_is_refused_at_shutdown():
    subject, effects = swapping()
    up(subject, "x", seats=2)
    failed, working, starving = submit(subject, job(model="x"), job(model="x"), job(model="y"))
    subject.starved(starving)
    subject.requeued(failed)
    assert TicketState.QUEUED is failed.state, "its node unloads the model for another"
    subject.drain()
    assert starving in effects.refused
    assert [failed.state, working.state] == [TicketState.GRANTED] * 2


PASSTHROUGH = Relay("/x", b"", passthrough=Passthrough("GET", ()))


def test_request_for_a_commands_server_waits_for_it_though_a_remote_server_has_the_model():
    subject, effects = swapping()
    subject.node_up(*FakeNode("far", "x"), remote_limits(2))
    ordinary, passed = submit(
        subject, job(model="x", relay=Relay("/x", b"{}")), job(model="x", relay=PASSTHROUGH)
    )
    assert effects.granted == [ordinary]
    assert effects.swaps == [("x", frozenset())]
    up(subject, "x")
    assert effects.granted == [ordinary, passed]


@pytest.mark.parametrize("is_evicted", [True, False])
def test_job_runs_again_where_it_failed_once_the_only_other_node_is_gone(is_evicted):
    subject, _ = swapping()
    up(subject, "x")
    subject.node_up(*FakeNode("far", "x"), remote_limits(1))
    (failed,) = submit(subject, job(model="x", relay=Relay("/v1/completions", b"{}")))
    assert failed.node is not None
    if failed.node.id != "far":
        subject.requeued(failed)
    subject.requeued(failed)
    assert (failed.failed_at.id, failed.node.id) == ("far", "node of x")
    if is_evicted:
        subject.request_load(LoadRequest("y"))
    else:
        subject.unload("x")
    subject.rejected_by_node(failed)
    assert failed.node is not None
    assert failed.node.id == "far"
