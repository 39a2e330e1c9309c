"""The parent process on a simulated machine: random hours, a fault at every place, and broken servers.

The long form, over as many processes as there are processors:

    python -m pytest tests/simulation --simulation-hours 10000 --simulation-thorough -s
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice

import pytest

from simulation import workers
from simulation.verdict import Verdict

SWEEPS = ("descriptors", "full disk", "broken disk", "no memory", "no memory in Python")
OF_CHILDREN = ("die", "exit", "stop", "garbage", "half", "huge", "close", "unknown", "error")
OF_NODES = (
    *("500", "502", "503", "429", "loading", "draining", "html", "reset", "silent", "garbage", "big head"),
    *("cut", "stuck", "no end", "bad chunk", "error event", "long length", "short length", "not json"),
)
# The short form tests one in this many places of a sweep, from an offset that differs between sweeps.
# Memory can be missing at a thousand places.
STEP_OF_SWEEP = 19
STEP_OF_LONG_SWEEP = 53
FAILURES_SHOWN = 5
REPORT_EVERY = 250
HOURS_TO_CATCH = 30

HOURS_WITH_FALSE_USAGE = range(2)

# Mistakes, and with which hour their search begins: the one that showed them when this was written.
MISTAKES = {
    "seat_of_a_failed_node_is_kept": 3,
    "deadlines_follow_the_wall_clock": 6,
    "reload_ends_models_in_use": 15,
    "stuck_child_is_not_detected": 0,
    "full_disk_fails_requests": 0,
    "broken_connections_stay_open": 0,
    "failed_job_still_counts": 4,
    "node_never_comes_back": 6,
    "listener_stops_after_an_error": 0,
    "replay_restarts_the_answer": 0,
}


@pytest.mark.timeout(0)
def test_random_hours_leave_the_server_healthy(simulators, pytestconfig, capsys):
    hours = pytestconfig.getoption("--simulation-hours")
    first = pytestconfig.getoption("--simulation-seed") or 0
    verdicts = in_parallel(simulators, hours, first)
    assert failures(printed_progress(verdicts, hours, capsys)) == []


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "sweep", [*SWEEPS, *(f"child {fate}" for fate in OF_CHILDREN), *(f"node {fate}" for fate in OF_NODES)]
)
def test_fault_at_any_place_leaves_the_server_healthy(sweep, simulators, pytestconfig):
    indices = simulators.submit(workers.calls_in, sweep).result()
    short = STEP_OF_SWEEP if indices < 1000 else STEP_OF_LONG_SWEEP
    step = 1 if pytestconfig.getoption("--simulation-thorough") else min(short, indices)
    chosen = range(1 + len(sweep) % step, indices + 1, step)
    assert chosen
    runs = [simulators.submit(workers.run_scenario, sweep, place) for place in chosen]
    assert failures(run.result() for run in runs) == []


def test_same_seed_gives_the_same_hour(simulators):
    runs = [simulators.submit(workers.run_hour, seed) for seed in (3, 3, 4, 4)]
    first, first_repeated, second, second_repeated = (run.result().trace for run in runs)
    assert (first, second) == (first_repeated, second_repeated)
    assert first != second


def test_turns_stay_fair_while_the_disk_is_full_and_the_clock_jumps(simulators, pytestconfig):
    first = pytestconfig.getoption("--simulation-seed") or 0
    runs = [simulators.submit(workers.run_turns, seed) for seed in range(first, first + 6)]
    assert failures(run.result() for run in runs) == []


def test_usage_reported_by_nodes_changes_no_outcome(simulators):
    runs = [
        simulators.submit(workers.outcomes_changed_by_false_usage, seed) for seed in HOURS_WITH_FALSE_USAGE
    ]
    assert [change for run in runs for change in run.result()][:FAILURES_SHOWN] == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_broken_server_is_caught(mistake, simulators):
    hours = range(MISTAKES[mistake], MISTAKES[mistake] + HOURS_TO_CATCH)
    assert simulators.submit(workers.is_caught, mistake, hours).result()


def test_replay(simulators, pytestconfig, capsys):
    seed, place = (pytestconfig.getoption(f"--simulation-{option}") for option in ("seed", "sweep"))
    if seed is None and not place:
        pytest.skip("give --simulation-seed or --simulation-sweep")
    if place:
        sweep, _, at = place.rpartition(":")
        verdict = simulators.submit(workers.run_scenario, sweep, int(at), keeps_trace=True).result()
    else:
        verdict = simulators.submit(workers.run_hour, seed, keeps_trace=True).result()
    with capsys.disabled():
        print("\n" + "\n".join(verdict.recent))  # noqa: T201
    assert failures([verdict]) == []


def in_parallel(simulators: ProcessPoolExecutor, hours: int, first: int) -> Iterator[Verdict]:
    """Yield the verdicts of `hours` runs as they complete; at most 8 are submitted at the same time."""
    seeds = iter(range(first, first + hours))
    running = {simulators.submit(workers.run_hour, seed) for seed in islice(seeds, 8)}
    while running:
        done = next(as_completed(running))
        running.discard(done)
        for seed in seeds:
            running.add(simulators.submit(workers.run_hour, seed))
            break
        yield done.result()


def printed_progress(
    verdicts: Iterable[Verdict], hours: int, capsys: pytest.CaptureFixture[str]
) -> Iterator[Verdict]:
    """Yield the verdicts; print each one with problems at once, and the progress at intervals."""
    outcomes: Counter[str] = Counter()
    cpu_s = 0.0
    for number, verdict in enumerate(verdicts, 1):
        outcomes += verdict.outcomes
        cpu_s += verdict.cpu_s
        if verdict.problems:
            with capsys.disabled():
                print(f"\n{verdict}", end="")  # noqa: T201
        if number % REPORT_EVERY == 0 or number == hours >= REPORT_EVERY:
            with capsys.disabled():
                shown = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
                print(f"\n{number} hours, {cpu_s / number:.2f} s each; {shown}", end="")  # noqa: T201
        yield verdict


def failures(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the first few verdicts with problems, each with the command that repeats its run."""
    found = []
    for verdict in verdicts:
        if verdict.problems:
            found.append(str(verdict))
        if len(found) == FAILURES_SHOWN:
            break
    return found
