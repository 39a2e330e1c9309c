"""Every exception at every step of the life of a model, a command or a node is its failure, and no other's.

After each strike the server lives, another model serves, what was struck can be used again, and nothing is
left over. In the short form each step is struck once, in the long one (`--nightly`) by every exception.
"""

import gc
import warnings
from collections.abc import Iterator
from itertools import cycle
from unittest.mock import patch

import pytest
import structlog

from fairlead.errors import LoadFailed, NodeFailed
from fairlead.supervision import FailureBoundary
from nodes import command_scenario, model_scenario, node_scenario
from nodes.fault_points import EXCEPTIONS, FaultPoints, run_once, strikes

SCENARIOS = {
    "model": (model_scenario.model_scenario, model_scenario.STEPS),
    "command": (command_scenario.command_scenario, command_scenario.STEPS),
    "node": (node_scenario.node_scenario, node_scenario.STEPS),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep no log, which would keep exceptions and all that they refer to, and have little to collect.

    What is struck when it is to be closed is left to the collector, and that is no fault here.
    """
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
    gc.unfreeze()
    structlog.configure(**before)


def _drop(*_event: object) -> None:
    raise structlog.DropEvent


@pytest.mark.parametrize("what", SCENARIOS)
def test_the_steps_that_are_struck_are_all_of_a_life(what):
    scenario, steps = SCENARIOS[what]
    points = FaultPoints()
    assert run_once(scenario, points) == []
    assert steps - points.seen.keys() == set()


@pytest.mark.parametrize("what", SCENARIOS)
def test_a_failure_at_any_step_ends_nothing_else(what):
    scenario, _ = SCENARIOS[what]
    assert list(strikes(scenario, list(EXCEPTIONS), each=1)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXCEPTIONS)
@pytest.mark.parametrize("what", SCENARIOS)
def test_every_failure_at_every_step_ends_nothing_else(what, name):
    scenario, _ = SCENARIOS[what]
    assert list(strikes(scenario, [name], each=1)) == []


@pytest.mark.parametrize("what", SCENARIOS)
def test_what_is_to_end_the_program_ends_it_from_any_step(what):
    scenario, steps = SCENARIOS[what]
    for step, kind in zip(sorted(steps), cycle((KeyboardInterrupt, SystemExit)), strict=False):
        (problem, *_) = run_once(scenario, FaultPoints(step, kind))
        assert "the server ends" in problem, step
        assert kind.__name__ in problem, step


class _OnlyExpected(FailureBoundary):
    """As it was before: for two types of errors."""

    def __exit__(self, _kind, error, _traceback) -> bool:
        if isinstance(error, LoadFailed | NodeFailed):
            self.failure = error
        return self.failure is not None


async def _not_contained(_name, run, *arguments) -> None:
    await run(*arguments)


async def _end_carelessly(process) -> None:
    process.terminate()
    await process.wait()
    await process.stdin.aclose()
    await process.stdout.aclose()


MUTANTS = {
    "a model's life expects only two errors": ("model", "nodes.resident.FailureBoundary", _OnlyExpected),
    "what the fleet does beside is not contained": ("model", "nodes.fleet.contain", _not_contained),
    "a child is ended without a second try": ("model", "worker.client._end", _end_carelessly),
    "a node that could not report its end keeps its seats": (
        "model",
        "dispatch.dispatcher.Dispatcher.counts",
        lambda _desk, _node_id: None,
    ),
    "a command's life expects only two errors": ("command", "nodes.resident.FailureBoundary", _OnlyExpected),
    "relaying expects only two errors": ("node", "nodes.remote_node.FailureBoundary", _OnlyExpected),
    "probing expects only two errors": ("node", "nodes.elsewhere.FailureBoundary", _OnlyExpected),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_guard_that_is_missing_is_found(mutant):
    what, name, value = MUTANTS[mutant]
    with patch(f"fairlead.{name}", value):
        assert any(strikes(SCENARIOS[what][0], list(EXCEPTIONS), each=1))
