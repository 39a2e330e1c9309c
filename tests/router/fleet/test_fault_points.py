"""Any exception at any step in the lifecycle of a model, command or node affects nothing else.

After each fault the server runs, another model serves, the affected one can be used again, and nothing is
left over. The short form raises one exception at each step, the long one (`--nightly`) every exception.
"""

import gc
import warnings
from collections.abc import Iterator
from itertools import cycle
from unittest.mock import patch

import pytest
import structlog

from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.base.supervision import FailureBoundary
from router.fleet import command_scenario, model_scenario, node_scenario
from router.fleet.fault_points import EXCEPTIONS, FaultPoints, run_once, strikes

SCENARIOS = {
    "model": (model_scenario.model_scenario, model_scenario.STEPS),
    "command": (command_scenario.command_scenario, command_scenario.STEPS),
    "node": (node_scenario.node_scenario, node_scenario.STEPS),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Drop logs, which would keep exceptions and their references, and freeze objects for fast collections.

    They stay frozen: to unfreeze them would unfreeze those of all modules. If the close of an object fails,
    the garbage collector frees it, which is no fault here.
    """
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
    structlog.configure(**before)


def _drop(*_event: object) -> None:
    raise structlog.DropEvent


@pytest.mark.parametrize("what", SCENARIOS)
def test_scenario_reaches_every_required_step(what):
    scenario, steps = SCENARIOS[what]
    points = FaultPoints()
    assert run_once(scenario, points) == []
    assert steps - points.seen.keys() == set()


@pytest.mark.parametrize("what", SCENARIOS)
def test_fault_at_any_step_affects_nothing_else(what):
    scenario, _ = SCENARIOS[what]
    assert list(strikes(scenario, list(EXCEPTIONS), each=1)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXCEPTIONS)
@pytest.mark.parametrize("what", SCENARIOS)
def test_every_exception_at_every_step_affects_nothing_else(what, name):
    scenario, _ = SCENARIOS[what]
    assert list(strikes(scenario, [name], each=1)) == []


@pytest.mark.parametrize("what", SCENARIOS)
def test_interrupt_or_exit_at_any_step_ends_the_program(what):
    scenario, steps = SCENARIOS[what]
    for step, kind in zip(sorted(steps), cycle((KeyboardInterrupt, SystemExit)), strict=False):
        (problem, *_) = run_once(scenario, FaultPoints(step, kind))
        assert "the server ends" in problem, step
        assert kind.__name__ in problem, step


class _OnlyExpected(FailureBoundary):
    """A boundary that contains only two types of errors."""

    def __exit__(self, _kind, error, _traceback) -> bool:
        if isinstance(error, LoadFailed | NodeFailed):
            self.failure = error
        return self.failure is not None


async def _not_contained(_name, run, *arguments) -> None:
    await run(*arguments)


async def _end_carelessly(child, **_limits) -> None:
    await child.terminate()
    await child.wait()
    child._reading.cancel()
    await child._process.stdin.aclose()
    await child._process.stdout.aclose()


MUTANTS = {
    "a model's life expects only two errors": (
        "model",
        "router.fleet.managed_model.FailureBoundary",
        _OnlyExpected,
    ),
    "what the fleet does beside is not contained": ("model", "router.fleet.fleet.contain", _not_contained),
    "a child is ended without a second try": ("model", "nodes.processes.child.Child.end", _end_carelessly),
    "a node that could not report its end keeps its seats": (
        "model",
        "router.dispatch.scheduler.Scheduler.node_counts",
        lambda _self, _node_id: None,
    ),
    "a command's life expects only two errors": (
        "command",
        "router.fleet.managed_model.FailureBoundary",
        _OnlyExpected,
    ),
    "relaying expects only two errors": ("node", "nodes.running_relays.FailureBoundary", _OnlyExpected),
    "probing expects only two errors": ("node", "router.fleet.remote_nodes.FailureBoundary", _OnlyExpected),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_missing_error_boundary_is_detected(mutant):
    what, name, value = MUTANTS[mutant]
    with patch(f"fairlead.{name}", value):
        assert any(strikes(SCENARIOS[what][0], list(EXCEPTIONS), each=1))
