"""Fronts, dispatchers and engines are killed, stopped and cut off at every step of the protocol.

No seat is lost or given twice, no request stays unanswered, and nothing is left over. `strikes.py` has the
runs and their checks, `protocol_mutants.py` mistakes that they must find. A failure is repeated with
`run(draw_plan(seed), strikes)`.
"""

from collections import Counter
from itertools import chain, islice

import pytest

from distributed.frontends.protocol_mutants import MUTANTS
from distributed.frontends.strike_layers import directed, every_frame, every_task_step, storms
from distributed.frontends.strikes import FAULTS, draw_plan, run
from settings.mutants import Mutant, broken

RUNS_TO_CATCH = 60
STRIKES_OF_A_NIGHT = 100_000
SEEDS_AT_EVERY_FRAME = 1
SEEDS_AT_EVERY_TASK_STEP = 2


def failures(runs):
    """Return the first run with a problem, if there is one: its plan's seed, its strikes, what was found."""
    found = ((done.plan.seed, done.strikes, done.problems) for done in runs if done.problems)
    return list(islice(found, 1))


@pytest.mark.parametrize("seed", range(2))
def test_same_plan_and_strikes_always_take_the_same_steps(seed):
    struck = list(islice(every_frame(seed, stride=97), 4))
    again = [run(done.plan, done.strikes) for done in struck]
    assert [done.frames for done in struck] == [done.frames for done in again]
    assert [done.outcomes for done in struck] == [done.outcomes for done in again]


def test_strike_at_any_frame_leaves_nothing_behind():
    assert failures(islice(every_frame(1, stride=101), 20)) == []


def test_strike_between_any_two_task_steps_leaves_nothing_behind():
    assert failures(islice(every_task_step(2, stride=37), 12)) == []


def test_many_strikes_leave_nothing_behind():
    assert failures(islice(chain.from_iterable(map(storms, range(2))), 2)) == []


def test_every_kind_of_frame_and_every_fault_is_part_of_the_runs():
    kinds = {kind for seed in range(6) for kind, _ in run(draw_plan(seed, is_busy=True)).frames}
    assert {"submit", "begin", "requeue", "end", "declared", "progress", "ask"} <= kinds
    assert {"welcome", "queued", "granted", "stopped", "answered", "heartbeat"} <= kinds
    assert {"attach", "submit to engine", "first", "over"} <= kinds
    struck = {strike.fault for done in islice(every_frame(3, stride=7), 26) for strike in done.strikes}
    assert struck == set(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    mutant = MUTANTS[name]
    with broken(Mutant(mutant.function, mutant.old, mutant.new, "behaviour", name)):
        runs = directed(*mutant.conditions, **mutant.changes)
        assert len(failures(islice(runs, RUNS_TO_CATCH))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_strikes_that_reveal_a_mutant_leave_nothing_behind(name):
    mutant = MUTANTS[name]
    assert failures(islice(directed(*mutant.conditions, **mutant.changes), 3)) == []


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_100000_strikes_leave_nothing_behind():
    struck = Counter()

    def counted(layer, runs):
        for done in runs:
            struck[layer] += done.struck
            yield done

    every = chain.from_iterable(map(every_frame, range(SEEDS_AT_EVERY_FRAME)))
    assert failures(counted("frame", every)) == []
    every = chain.from_iterable(map(every_task_step, range(SEEDS_AT_EVERY_TASK_STEP)))
    assert failures(counted("task", every)) == []
    seed = 0
    while struck.total() < STRIKES_OF_A_NIGHT:
        assert failures(counted("storm", storms(seed))) == []
        seed += 1
    print(dict(struck))  # noqa: T201  shown with `-s`
