"""Clients disconnect, and nodes die or swap, at every step of the scheduler, without effect on others."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, islice
from multiprocessing import get_context

import pytest

from fairlead.base.errors import QueueTimeout
from fuzz.cancellation import REAL, Parts, Run, Strike, run
from fuzz.layers import ENDS, LAYERS, count_strikes, every_cut, every_fault, every_return, every_swap
from fuzz.mutants import FOUR, MORE, OF_FAILOVER, OF_SWAPS, CorrectHandOff
from fuzz.plan import ClientPlan, Plan, draw_plan

SHARE = 0.15  # of the time for all fuzz tests, for each layer
# One mutant is caught by run 368, the others by run 108, and those of `FOUR` by run 9.
RUNS_TO_CATCH = 500
RUNS_TO_CATCH_FOUR = 100
SEEDS_AT_ONCE = 20
REPORT_EVERY = 10_000


def all_runs(layer: Callable[[int], Iterator[Run]], first_seed: int = 0) -> Iterator[Run]:
    """Return the runs of a layer for all seeds, without end."""
    return chain.from_iterable(map(layer, count(first_seed)))


def until(deadline: float, runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the runs that begin before the deadline, at least one."""
    for done in runs:
        yield done
        if time.monotonic() > deadline:
            return


def failures(runs: Iterable[Run]) -> list[Run]:
    """Return the first run with a problem, if there is one. Its plan and strikes suffice to repeat it."""
    return list(islice((done for done in runs if done.problems), 1))


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_same_seed_always_takes_the_same_steps(seed, tight):
    plan = draw_plan(seed, tight=tight)
    first, second = (run(plan, traced=True) for _ in range(2))
    assert first.trace == second.trace
    assert first.client_steps == second.client_steps


def test_steps_before_a_strike_are_the_same_as_without_it():
    plan = draw_plan(1)
    unstruck = run(plan, traced=True)
    for cut in islice(every_cut(1), 1, None, 10):
        (strike,) = cut.strikes
        struck = run(plan, cut.strikes, traced=True)
        assert unstruck.trace[: strike.step] == struck.trace[: strike.step]


def test_cancellation_at_any_step_releases_everything(fuzz_seconds):
    deadline = time.monotonic() + SHARE * fuzz_seconds
    assert failures(until(deadline, all_runs(every_cut))) == []


def test_node_that_crashes_or_swaps_at_any_step_frees_everything(fuzz_seconds):
    deadline = time.monotonic() + SHARE * fuzz_seconds
    assert failures(until(deadline, all_runs(every_fault))) == []


def test_failures_and_disconnects_during_model_swaps_leave_nothing_behind(fuzz_seconds):
    deadline = time.monotonic() + SHARE * fuzz_seconds
    assert failures(until(deadline, all_runs(every_swap))) == []


def test_dropped_or_refused_jobs_run_again_and_leave_nothing_behind(fuzz_seconds):
    deadline = time.monotonic() + SHARE * fuzz_seconds
    assert failures(until(deadline, all_runs(every_return))) == []


@pytest.mark.parametrize("stream", [False, True])
def test_queue_deadline_at_the_seat_or_first_delta_gives_only_a_queue_timeout(stream):
    client_plans = [
        ClientPlan(f"{n}", "A", stream=stream, arrives_s=0, first_s=0, rest_s=n) for n in range(2)
    ]
    plan = Plan(0, tuple(client_plans), seats=(1,), queue_timeout_s=1)
    runs = (run(plan, (Strike(step, "pause", "1"),)) for step in range(1, run(plan).steps))
    assert {QueueTimeout} == plan.refusals
    assert failures(runs) == []


@pytest.mark.parametrize("mutant", [*FOUR, *MORE])
def test_hand_off_mutant_is_caught_within_a_few_hundred_runs(mutant):
    # Mutants that hand over from another task cannot cancel by id, which would catch them too easily.
    ends = ("leave",) if mutant in FOUR else ENDS
    cuts = partial(every_cut, parts={**FOUR, **MORE}[mutant], ends=ends)
    runs = RUNS_TO_CATCH_FOUR if mutant in FOUR else RUNS_TO_CATCH
    assert len(failures(islice(all_runs(cuts), runs))) == 1


@pytest.mark.parametrize("mutant", OF_SWAPS)
def test_swap_mutant_is_caught_within_a_few_hundred_runs(mutant):
    runs = islice(all_runs(partial(every_swap, parts=OF_SWAPS[mutant])), RUNS_TO_CATCH)
    assert len(failures(runs)) == 1


@pytest.mark.parametrize("mutant", OF_FAILOVER)
def test_failover_mutant_is_caught_within_a_few_hundred_runs(mutant):
    runs = islice(all_runs(partial(every_return, parts=OF_FAILOVER[mutant])), RUNS_TO_CATCH)
    assert len(failures(runs)) == 1


@pytest.mark.parametrize("mutant", FOUR)
def test_hand_off_mutant_passes_when_no_client_disconnects(mutant):
    assert run(draw_plan(0), parts=FOUR[mutant]).problems == []


@pytest.mark.parametrize(
    ("parts", "ends", "runs"),
    [(REAL, ENDS, RUNS_TO_CATCH), (Parts(CorrectHandOff), ("leave",), RUNS_TO_CATCH_FOUR)],
    ids=["real", "honest"],
)
def test_correct_hand_off_passes_the_runs_that_catch_the_mutants(parts, ends, runs):
    cuts = partial(every_cut, parts=parts, ends=ends)
    assert failures(islice(all_runs(cuts), runs)) == []


@pytest.mark.timeout(0)
def test_cancellation_releases_everything_over_the_requested_number_of_steps(pytestconfig, capsys):
    requested_steps = pytestconfig.getoption("--fuzz-steps")
    if not requested_steps:
        pytest.skip("give --fuzz-steps")
    first_seed = pytestconfig.getoption("--fuzz-seed")
    tasks = ((layer, seed) for seed in count(first_seed) for layer in range(len(LAYERS)))
    struck = runs = steps = reported_steps = 0
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        # In batches, because the tasks have no end.
        while struck < requested_steps:
            for done in pool.imap_unordered(count_strikes, islice(tasks, SEEDS_AT_ONCE * len(LAYERS))):
                assert done.failure is None
                struck, runs, steps = struck + done.struck, runs + done.runs, steps + done.steps
                if struck - reported_steps >= REPORT_EVERY:
                    reported_steps = struck
                    with capsys.disabled():
                        print(f"\nstruck at {struck} steps, in {runs} runs of {steps} steps together", end="")  # noqa: T201
