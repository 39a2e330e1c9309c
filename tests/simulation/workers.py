"""Processes in which time and randomness are controlled, and the functions that tests run in them."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from typing import Any

from simulation.verdict import Verdict


@contextmanager
def pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes that run simulations."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), initializer=prepare) as executor:
            yield executor
    finally:
        del os.environ["PYTHONHASHSEED"]
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def prepare() -> None:
    """Prepare this process for simulations."""
    import gc

    from simulation import entropy

    entropy.install()

    from simulation.deployment import ENGINES
    from simulation.parent import model_folder, text
    from simulation.run import idle_server

    text()
    for name in ENGINES:
        model_folder(name)
    idle_server(is_watched=True)
    # Later garbage collections do not visit what was imported.
    gc.collect()
    gc.freeze()


def run_hour(
    seed: int, *, broken: str | None = None, kinds: tuple[str, ...] | None = None, keeps_trace: bool = False
) -> Verdict:
    """Run the seed's hour, with the real or a broken product, and with these kinds of fault or all."""
    from simulation.hour import Hour

    return Hour(seed, kinds=kinds, broken=_broken(broken), keeps_trace=keeps_trace).run()


def run_scenario(sweep: str, at: int, *, broken: str | None = None, keeps_trace: bool = False) -> Verdict:
    """Run the scenario with its fault at this place; see `scenario`."""
    from simulation.scenario import Scenario

    return Scenario(sweep, at, broken=_broken(broken), keeps_trace=keeps_trace).run()


def run_turns(seed: int) -> Verdict:
    """Run the seed's turns."""
    from simulation.turns import Turns

    return Turns(seed).run()


def outcomes_changed_by_false_usage(seed: int) -> list[str]:
    """Run an hour with correctly and one with falsely reported usage; return the differences."""
    from simulation.hour import Hour

    outcomes: list[list[str]] = []
    for false_usage in (False, True):
        hour = Hour(seed, kinds=(), false_usage=false_usage)
        problems = hour.run().problems
        outcomes.append([*problems, *map(str, hour.drawer.exchanges)])
    with_real_usage, with_false_usage = outcomes
    if len(with_real_usage) != len(with_false_usage):
        return [f"hour {seed}: {len(with_real_usage)} requests and problems became {len(with_false_usage)}"]
    return [
        f"hour {seed}: {one} became {other}"
        for one, other in zip(with_real_usage, with_false_usage, strict=True)
        if one != other
    ]


def is_caught(mistake: str, seeds: Iterable[int]) -> bool:
    """Return whether one of the seeds' hours detects a mistake, with its own kinds of fault."""
    from simulation.broken_products import FAULTS_THAT_SHOW

    kinds = FAULTS_THAT_SHOW[mistake]
    return any(run_hour(seed, broken=mistake, kinds=kinds).problems for seed in seeds)


def calls_in(sweep: str) -> int:
    """Return at how many places the fault of a sweep can occur."""
    from simulation.scenario import FRAMES, REQUESTS, SWEEPS

    if sweep not in SWEEPS:
        return FRAMES if sweep.startswith("child") else REQUESTS
    calls = run_scenario(sweep, 0).calls
    return sum(calls[call] for call in SWEEPS[sweep].calls)


def _broken(name: str | None) -> Any:
    from simulation.broken_products import BROKEN

    return nullcontext if name is None else BROKEN[name]
