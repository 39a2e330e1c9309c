"""Models that are loaded or unloaded without a job: load requests, unloading, closed nodes."""

import msgspec
import pytest

from fairlead.base.errors import Draining, LoadFailed, ModelLoading, ModelNotFound, ModelUnloaded, NoOtherNode
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.ticket import LoadRequest, Ticket, TicketState
from fairlead.router.swap.lru import LruPolicy
from fairlead.router.swap.policy import KeepEverything
from router.dispatch.recorded import FakeNode, job, limits, remote_limits, scheduler, submit
from router.dispatch.scheduler_machine import RELAY
from router.dispatch.test_scheduler_swaps import swapping, up


def test_load_request_waits_for_running_jobs_and_ends_when_the_model_is_loaded():
    subject, effects = swapping()
    up(subject, "x")
    (running,) = submit(subject, job(model="x"))
    request = LoadRequest("y")
    subject.request_load(request)
    assert effects.swaps == []
    subject.leave(running)
    assert [("y", frozenset("x"))] == effects.swaps
    assert effects.loads == {}
    up(subject, "y")
    assert {request: None} == effects.loads


def test_load_requests_and_jobs_are_ordered_by_arrival():
    subject, effects = swapping()
    up(subject, "x")
    (running,) = submit(subject, job(model="x"))
    subject.request_load(LoadRequest("y"))
    submit(subject, job(model="z"))
    subject.leave(running)
    assert [model for model, _ in effects.swaps] == ["y"]


def test_starving_load_request_comes_before_jobs_for_the_loaded_model():
    subject, effects = swapping()
    up(subject, "x")
    running, _later = submit(subject, job(model="x"), job(model="x"))
    request = LoadRequest("y")
    subject.request_load(request)
    subject.load_starved(request)
    subject.leave(running)
    assert [("y", frozenset("x"))] == effects.swaps


def test_load_of_a_loaded_model_succeeds_at_once_and_an_impossible_load_is_refused():
    subject, effects = swapping()
    up(subject, "x")
    there, unknown = LoadRequest("x"), LoadRequest("unknown")
    subject.request_load(there)
    subject.request_load(unknown)
    subject.drain()
    late = LoadRequest("y")
    subject.request_load(late)
    assert effects.loads[there] is None
    assert isinstance(effects.loads[unknown], ModelNotFound)
    assert isinstance(effects.loads[late], Draining)


def test_spare_load_request_evicts_nothing_until_it_is_strengthened():
    subject, effects = swapping()
    up(subject, "x")
    request = LoadRequest("y", only_if_free=True)
    subject.request_load(request)
    assert effects.swaps == []
    subject.allow_eviction(request)
    assert [("y", frozenset("x"))] == effects.swaps


def test_failed_load_ends_its_load_request():
    subject, effects = swapping()
    request = LoadRequest("x")
    subject.request_load(request)
    error = LoadFailed("no such file")
    subject.load_failed(FakeNode("node of x", "x").models, error)
    assert {request: error} == effects.loads
    subject.request_load(LoadRequest("x"))
    assert len(effects.swaps) == 2


def test_unloaded_model_finishes_its_jobs_and_is_reloaded_for_waiting_jobs():
    subject, effects = swapping()
    up(subject, "x")
    running, waiting = submit(subject, job(model="x"), job(model="x"))
    subject.unload("x")
    assert effects.stopped_models == []
    subject.leave(running)
    assert (effects.stopped_models, effects.swaps) == (["x"], [("x", frozenset())])
    assert TicketState.QUEUED is waiting.state
    up(subject, "x")
    assert [running, waiting] == effects.granted


def test_unload_with_an_error_ends_what_waits_for_the_model_and_not_what_runs():
    subject, effects = swapping()
    up(subject, "x")
    running, waiting, other = submit(subject, job(model="x"), job(model="x"), job(model="y"))
    error = ModelUnloaded("x was unloaded")
    subject.unload("x", error)
    assert {waiting: error} == effects.refused
    assert TicketState.GRANTED is running.state
    subject.leave(running)
    assert (effects.stopped_models, effects.swaps) == (["x"], [("y", frozenset("x"))])
    assert TicketState.QUEUED is other.state
    (later,) = submit(subject, job(model="x"))
    assert TicketState.QUEUED is later.state


def test_unload_with_an_error_ends_a_load_that_has_not_begun():
    subject, effects = swapping()
    up(subject, "x")
    submit(subject, job(model="x"))
    subject.request_load(request := LoadRequest("y"))
    error = ModelUnloaded("y was unloaded")
    subject.unload("y", error)
    assert {request: error} == effects.loads
    subject.leave(effects.granted[0])
    assert effects.swaps == []


def test_unload_with_an_error_leaves_jobs_waiting_that_another_node_can_run():
    subject, effects = swapping()
    subject.node_up(*FakeNode("far", "x"), NodeLimits(seats=1, max_model_len=100, evictable=False))
    up(subject, "x")
    _, _, waiting = submit(subject, job(model="x"), job(model="x"), job(model="x"))
    subject.unload("x", ModelUnloaded("x was unloaded"))
    assert effects.refused == {}
    subject.leave(next(ticket for ticket in effects.granted if ticket.node.id == "far"))
    assert TicketState.GRANTED is waiting.state


def test_stopping_model_uses_memory_until_its_process_ends():
    subject, effects = swapping()
    up(subject, "x")
    subject.unload("x")
    submit(subject, job(model="y"))
    assert [("y", frozenset("x"))] == effects.swaps  # the load of y waits for the end of x
    other, others = scheduler(policy=LruPolicy(max_loaded=1), loadable=frozenset("xy"))
    up(other, "x")
    other.unload("x")
    other.stopped(frozenset("x"))
    submit(other, job(model="y"))
    assert others.swaps == [("y", frozenset())]


def test_unloading_stops_a_running_load_at_once():
    subject, effects = swapping()
    request = LoadRequest("x")
    subject.request_load(request)
    subject.unload("x")
    assert effects.stopped_models == ["x"]
    assert isinstance(effects.loads[request], LoadFailed)
    subject.unload("x")
    assert effects.stopped_models == ["x"]


def test_model_expires_only_if_it_had_no_job_since():
    subject, effects = swapping()
    up(subject, "x")
    ((node, used),) = effects.idle_nodes
    (ticket,) = submit(subject, job(model="x"))
    subject.leave(ticket)
    assert [each for each, _ in effects.idle_nodes] == [node, node]
    subject.expired(node, used)
    assert effects.stopped_models == []
    subject.expired(*effects.idle_nodes[-1])
    assert effects.stopped_models == ["x"]
    assert subject.statistics().seats == 0


def test_model_that_is_not_loadable_is_never_reported_as_idle():
    subject, effects = scheduler()
    up(subject, "x")
    submit(subject, job(model="x"))
    subject.leave(effects.granted[0])
    assert effects.idle_nodes == []


def test_remote_model_is_neither_evicted_nor_loaded_here_except_on_request():
    subject, effects = swapping()
    far = FakeNode("far", "x")
    subject.node_up(*far, NodeLimits(seats=1, max_model_len=100, evictable=False))
    up(subject, "y")
    submit(subject, job(model="x"), job(model="x"), job(model="z"))
    assert [("z", frozenset("y"))] == effects.swaps
    subject.stopped(frozenset("y"))
    up(subject, "z")
    subject.leave(effects.granted[-1])
    subject.request_load(LoadRequest("x"))
    assert [("z", frozenset("y")), ("x", frozenset("z"))] == effects.swaps


def test_closed_node_finishes_its_jobs_and_gets_no_more_after_a_restart_either():
    subject, effects = scheduler()
    far, at = FakeNode("far"), NodeLimits(seats=2, max_model_len=100, evictable=False)
    subject.node_up(*far, at)
    running, *_ = submit(subject, job())
    subject.close_node("far")
    (waiting,) = submit(subject, job())
    assert (waiting.state, effects.closed_nodes) == (TicketState.QUEUED, [])
    subject.leave(running)
    assert effects.closed_nodes == ["far"]
    subject.node_up(*far, at)
    assert TicketState.QUEUED is waiting.state
    subject.node_down(far.id)
    subject.reopen_node("far")
    subject.node_up(*far, at)
    assert TicketState.GRANTED is waiting.state


def test_node_that_is_down_is_closed_at_once():
    subject, effects = scheduler()
    subject.close_node("far")
    assert effects.closed_nodes == ["far"]


def test_waiters_for_a_removed_model_fail():
    subject, effects = swapping()
    up(subject, "x")
    _running, waiting = submit(subject, job(model="x"), job(model="x"))
    subject.configure_models(KeepEverything(), frozenset("yz"))
    subject.unload("x")
    subject.remove_model("x")
    assert [waiting] == list(effects.refused)
    assert isinstance(effects.refused[waiting], ModelNotFound)


@pytest.mark.parametrize("loads", [True, False])
def test_rejects_loading_applies_only_to_loadable_models(loads):
    subject, effects = scheduler(
        policy=KeepEverything(), loadable=frozenset("x" if loads else "y"), rejects_loading=True
    )
    (ticket,) = submit(subject, job(model="x"))
    assert loads == isinstance(effects.refused.get(ticket), ModelLoading)
    up(subject, "x")
    (there,) = submit(subject, job("B", model="x"))
    assert loads == (TicketState.GRANTED is there.state)


def test_node_that_reports_the_least_load_is_chosen():
    subject, effects = scheduler()
    for name, load in (("busy", 0.9), ("calm", 0.1)):
        subject.node_up(*FakeNode(name), NodeLimits(seats=4, max_model_len=100, load=load))
    submit(subject, *map(job, "AB"))
    assert [ticket.node.id for ticket in effects.granted] == ["calm", "busy"]
    submit(subject, job("C"))
    assert effects.granted[-1].node.id == "calm"
    assert limits(1).load is None


def test_job_that_cannot_be_relayed_never_gets_a_seat_on_a_remote_node():
    subject, effects = scheduler()
    subject.node_up(*FakeNode("far"), remote_limits(2))
    own, relayed = submit(subject, job(), job(relay=RELAY))
    assert [relayed] == effects.granted
    subject.node_up(*FakeNode("near"), limits(1))
    assert [relayed, own] == effects.granted
    assert own.node is not None
    assert own.node.id == "near"


def test_relayed_job_without_prompts_never_gets_a_seat_of_an_engine():
    subject, effects = scheduler()
    subject.node_up(*FakeNode("near"), limits(1))
    ticket = job(relay=RELAY)
    (relayed,) = submit(
        subject, Ticket(msgspec.structs.replace(ticket.job, must_be_relayed=True), cost=1.0, tokens=0)
    )
    assert effects.granted == []
    subject.node_up(*FakeNode("far"), remote_limits(1))
    assert [relayed] == effects.granted


def test_remote_model_is_loaded_here_for_a_job_that_cannot_be_relayed():
    subject, effects = swapping()
    subject.node_up(*FakeNode("far", "x"), remote_limits(1))
    submit(subject, *(job(model="x", relay=RELAY) for _ in range(2)))
    assert effects.swaps == []
    (own,) = submit(subject, job(model="x"))
    assert effects.swaps == [("x", frozenset())]
    subject.load_failed(FakeNode("x", "x").models, LoadFailed("no such file"))
    assert [own] == list(effects.refused), "the other may still have the seat elsewhere"


def test_where_loading_is_rejected_a_remote_model_does_not_help_a_job_that_cannot_be_relayed():
    subject, effects = scheduler(policy=KeepEverything(), loadable=frozenset("x"), rejects_loading=True)
    subject.node_up(*FakeNode("far", "x"), remote_limits(1))
    own, relayed = submit(subject, job(model="x"), job(model="x", relay=RELAY))
    assert isinstance(effects.refused[own], ModelLoading)
    assert TicketState.GRANTED is relayed.state


def test_prompt_too_long_for_the_local_node_is_refused_if_it_cannot_be_relayed():
    subject, effects = scheduler()
    subject.node_up(*FakeNode("near"), limits(1, longest=5))
    subject.node_up(*FakeNode("far"), remote_limits(1, longest=1000))
    own, relayed = submit(subject, job(prompt=9), job(prompt=9, relay=RELAY))
    assert [own] == list(effects.refused)
    assert TicketState.GRANTED is relayed.state


# Jobs that remote servers refuse ---------------------------------------------------------------------


@pytest.mark.parametrize("loads", [True, False])
def test_model_is_loaded_for_a_job_that_all_remote_servers_have_refused(loads):
    subject, effects = swapping()
    subject.node_up(*FakeNode("far", "x"), remote_limits(1))
    (ticket,) = submit(subject, job(model="x", relay=RELAY))
    assert (ticket.state, effects.swaps) == (TicketState.GRANTED, [])
    subject.unsuited(ticket)
    assert (ticket.state, effects.swaps) == (TicketState.QUEUED, [("x", frozenset())])
    error = LoadFailed("no such file")
    if loads:
        up(subject, "x")
        assert (ticket.state, ticket.node.id) == (TicketState.GRANTED, "node of x")
        subject.unsuited(ticket)
        assert isinstance(effects.refused[ticket], NoOtherNode)
    else:
        subject.load_failed(frozenset("x"), error)
        assert effects.refused[ticket] is error
    assert len(effects.swaps) == 1


@pytest.mark.parametrize(
    ("rejects_loading", "asked"), [(True, {}), (False, {"no_queue": True}), (False, {"model": "far only"})]
)
def test_refused_job_that_may_not_wait_for_a_load_ends_at_once(rejects_loading, asked):
    subject, effects = scheduler(loadable=frozenset("x"), rejects_loading=rejects_loading)
    subject.node_up(*FakeNode("far", "x", "far only"), remote_limits(1))
    (ticket,) = submit(subject, job(**{"model": "x", "relay": RELAY, **asked}))
    subject.unsuited(ticket)
    assert isinstance(effects.refused[ticket], NoOtherNode)
    assert effects.swaps == []
