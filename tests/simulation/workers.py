"""Processes that run simulations: with time and chance under control from their first import on.

A function here is what a test submits to the pool; it returns plain values.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from typing import Any

from simulation.verdict import Verdict


@contextmanager
def pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of such processes. Their hashes do not differ from run to run."""
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
    """Make this process one that runs simulations."""
    import gc

    from simulation import entropy

    entropy.install()

    from simulation.parent import model_folder, text
    from simulation.run import idle_server
    from simulation.world import ENGINES

    text()
    for name in ENGINES:
        model_folder(name)
    idle_server(is_watched=True)
    # What is there now stays: to look at it after each run would take longer than the run.
    gc.collect()
    gc.freeze()


def run_hour(
    seed: int, *, broken: str | None = None, kinds: tuple[str, ...] | None = None, keeps_trace: bool = False
) -> Verdict:
    """Run the seed's hour, with the product as it is or broken in one way; `kinds` of trouble, or all."""
    from simulation.hour import Hour

    return Hour(seed, kinds=kinds, broken=_broken(broken), keeps_trace=keeps_trace).run()


def run_errand(sweep: str, at: int, *, broken: str | None = None, keeps_trace: bool = False) -> Verdict:
    """Run an errand whose fault strikes at that place; see `errand`."""
    from simulation.errand import Errand

    return Errand(sweep, at, broken=_broken(broken), keeps_trace=keeps_trace).run()


def run_turns(seed: int) -> Verdict:
    """Run the seed's turns."""
    from simulation.turns import Turns

    return Turns(seed).run()


def what_lies_change(seed: int) -> list[str]:
    """Run an hour with honest nodes and one with liars; return which requests ended otherwise, and how."""
    from simulation.hour import Hour

    told: list[list[str]] = []
    for lies in (False, True):
        hour = Hour(seed, kinds=(), lies=lies)
        problems = hour.run().problems
        told.append([*problems, *map(str, hour.drawer.visits)])
    honest, lied = told
    if len(honest) != len(lied):
        return [f"hour {seed}: {len(honest)} requests and problems became {len(lied)}"]
    return [
        f"hour {seed}: {one} became {other}" for one, other in zip(honest, lied, strict=True) if one != other
    ]


def caught_after(mistake: str, hours: int) -> int | None:
    """Return the hour in which a mistake showed, with the troubles that bring it out; None if it did not."""
    from simulation.broken_products import WHERE

    for seed in range(hours):
        if run_hour(seed, broken=mistake, kinds=WHERE[mistake]).problems:
            return seed + 1
    return None


def places_of(sweep: str) -> int:
    """Return at how many places a sweep's fault can strike."""
    from simulation.errand import FRAMES, SWEEPS

    return (
        FRAMES
        if sweep not in SWEEPS
        else sum(run_errand(sweep, 0).calls[call] for call in SWEEPS[sweep].calls)
    )


def _broken(name: str | None) -> Any:
    from simulation.broken_products import BROKEN

    return nullcontext if name is None else BROKEN[name]
