"""The states of a managed model: every pair of them, and what an instance's end leaves."""

from typing import get_args

import pytest
import trio

from fairlead.base.config import HealthConfig
from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.nodes.node import ModelState
from fairlead.router.fleet.instance import (
    FIRST_BACKOFF_S,
    HEALTHY_AFTER_S,
    LONGEST_BACKOFF_S,
    Instance,
    Restarts,
)
from fairlead.router.fleet.managed_model import TRANSITIONS, ManagedModel
from router.fleet.running_fleet import running_fleet, sleeper

# A model that is draining is "ready" here: only the dispatcher tracks that it gets no more jobs.
STATES = tuple(state for state in get_args(ModelState) if state != "draining")


def model_in(state: ModelState) -> ManagedModel:
    model = ManagedModel(
        sleeper("m"),
        None,
        scheduler=None,
        nodes=None,
        on_loaded=lambda _model: None,
        on_died=lambda _model: None,
        on_progress=lambda *_progress: None,
        health=HealthConfig(),
    )
    model._state = state
    return model


@pytest.mark.parametrize("after", STATES)
@pytest.mark.parametrize("before", STATES)
def test_only_transitions_of_the_table_are_allowed(before: ModelState, after: ModelState):
    model = model_in(before)
    if (before, after) in TRANSITIONS:
        model._become(after)
        assert model.state == after
    else:
        with pytest.raises(AssertionError, match=f"model m cannot go from {before} to {after}"):
            model._become(after)
        assert model.state == before


def test_every_state_is_reached_and_left():
    assert {before for before, _ in TRANSITIONS} == {after for _, after in TRANSITIONS} == set(STATES)


async def test_model_that_is_loading_or_ready_cannot_be_started_again():
    for state in ("loading", "ready"):
        with pytest.raises(AssertionError, match=f"cannot go from {state} to loading"):
            model_in(state).begin(lambda *_task: None)


async def test_states_of_a_model_from_its_load_to_its_unload(monkeypatch):
    seen: list[ModelState] = []
    become = ManagedModel._become

    def recorded(model: ManagedModel, state: ModelState) -> None:
        become(model, state)
        seen.append(state)

    monkeypatch.setattr(ManagedModel, "_become", recorded)
    async with running_fleet(sleeper("m"), sleeper("broken", cmd=("/no/such/file",))) as opened:
        await opened.fleet.load("m")
        assert opened.status().load.duration_s >= 0
        await opened.fleet.unload("m")
        assert seen == ["loading", "ready", "stopping", "stopped"]
        seen.clear()
        with pytest.raises(LoadFailed):
            await opened.fleet.load("broken")
        assert opened.status("broken").state == "failed"
        assert seen == ["loading", "stopping", "failed"]


def test_pauses_between_restarts_double_until_an_instance_stays_up():
    restarts = Restarts()
    pauses = [restarts.next_backoff_s() for _ in range(9)]
    assert pauses == [min(FIRST_BACKOFF_S * 2**number, LONGEST_BACKOFF_S) for number in range(9)]
    restarts.ran(HEALTHY_AFTER_S)
    assert restarts.next_backoff_s() == LONGEST_BACKOFF_S
    restarts.ran(HEALTHY_AFTER_S + 1)
    assert restarts.next_backoff_s() == FIRST_BACKOFF_S


@pytest.mark.parametrize(
    ("ready_s", "pause_s"), [(HEALTHY_AFTER_S + 1, FIRST_BACKOFF_S), (HEALTHY_AFTER_S - 1, LONGEST_BACKOFF_S)]
)
async def test_pause_before_the_restart_of_a_model_depends_on_how_long_it_was_ready(
    mock_clock, ready_s, pause_s
):
    model, instance = model_in("ready"), Instance()
    for _ in range(9):
        model.restarts.next_backoff_s()
    instance.was_ready, instance.ready_at = True, trio.current_time()
    mock_clock.jump(ready_s)
    model._failed(instance, NodeFailed("its process ended"))
    assert model.restarts.is_due
    assert model.restarts.next_backoff_s() == pause_s


def test_model_is_missing_while_its_restart_is_due_and_its_room_is_free():
    restarts = Restarts()
    restarts.give_up()
    assert not restarts.is_missing
    restarts.is_due = True
    assert restarts.is_missing
    restarts.give_up()
    assert (restarts.is_due, restarts.is_missing) == (True, False)
    restarts.cancel()
    assert (restarts.is_due, restarts.is_missing) == (False, False)
