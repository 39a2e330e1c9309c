"""Runs scenarios, in a process in which time is virtual (see `simulation.workers`)."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast
from unittest.mock import patch

from fairlead.base.config import Config
from fairlead.base.errors import LoadFailed
from fairlead.server.console.options import ServeOptions
from settings.cases import FRONTS, NOT_WITH_FRONTS, Case
from settings.documents import Document, file_with, replaced, value_of, without_key
from settings.served import Served, serve

SCENARIO_S = 30.0  # of the real clock

T = TypeVar("T")


def played(simulators: ProcessPoolExecutor, function: Callable[..., T], *arguments: object) -> T:
    """Call one of the functions below in a process for simulations; return what it returns.

    What it raises is raised here as an `AssertionError` with the traceback of that process.
    """
    result, failure = simulators.submit(_reported, function, arguments).result()
    assert failure is None, failure
    return cast("T", result)


def _reported(function: Callable[..., object], arguments: Sequence[object]) -> tuple[object, str | None]:
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001  # not every exception can be sent to another process
        return None, "\n".join("".join(traceback.format_exception(leaf)) for leaf in _leaf_errors(error))


def play(key: str, fronts: int = 1) -> None:
    """Run the scenario of a key. Raises what the scenario raises."""
    from settings.all_cases import CASES

    case = CASES[key]
    serve(case.scenario, file_with(case.document), fronts=fronts)


def play_behaviour(name: str, fronts: int = 1) -> None:
    """Run one of the scenarios that belong to no setting. Raises what the scenario raises."""
    from settings.all_cases import BEHAVIOURS

    behaviour = BEHAVIOURS[name]
    serve(behaviour.scenario, file_with(behaviour.document), fronts=fronts)


def failure_of(play: Callable[..., object], *arguments: object) -> str | None:
    """Call one of these functions; return the first failure of its scenario, or None."""
    failures: list[str] = []
    try:
        play(*arguments)
    except* AssertionError as group:
        failures += map(repr, _leaf_errors(group))
    return failures[0] if failures else None


def play_without(key: str, fronts: int = 1) -> str | None:
    """Run the scenario of a key as if the key were ignored; return the first failure, or None."""
    from settings.all_cases import CASES

    case = CASES[key]
    return failure_of(partial(serve, case.scenario, _without(case), fronts=fronts))


def play_after_reload(key: str, fronts: int = 1) -> list[str]:
    """Run it on a server that starts without the key and then reads it; return what needs a restart.

    The scenario is skipped if a setting needs a restart.
    """
    from settings.all_cases import CASES

    case = CASES[key]
    needed: list[str] = []

    async def reloaded(server: Served) -> None:
        needed.extend(await server.reload(file_with(case.document)))
        if not needed:
            await case.scenario(server)

    serve(reloaded, _without(case), fronts=fronts)
    return needed


def play_with_option(key: str, option: str) -> None:
    """Run the scenario of a key with a configuration that has it from the command line alone."""
    from settings.all_cases import CASES

    case = CASES[key]
    value = str(value_of(file_with(case.document), key))
    serve(case.scenario, _without(case), arguments=_with_arguments(option, value))


def play_with_variable(key: str, variable: str) -> None:
    """Run the scenario of a key with a configuration that has it from the environment alone."""
    from settings.all_cases import CASES

    case = CASES[key]
    value = str(value_of(file_with(case.document), key))
    with patch.dict(os.environ, {variable: value}):
        serve(case.scenario, _without(case), arguments=_with_arguments())


def play_served_model_name() -> None:
    """Serve a model under another name, which the command line gives."""

    async def served_model_has_the_name(server: Served) -> None:
        assert (await server.complete(model="other").done()).status == 200

    serve(served_model_has_the_name, file_with({}), arguments=_with_arguments("--served-model-name", "other"))


def play_variable_in_a_file() -> None:
    """Serve with a file that refers to an environment variable."""

    async def variable_is_substituted(server: Served) -> None:
        assert (await server.complete(key="secret").done()).status == 200

    document = file_with({"apiKeys": [{"key": "${env.KEY}"}]})
    serve(variable_is_substituted, document, environment={"KEY": "secret"})


def play_start_that_fails(fronts: int) -> str:
    """Start a server whose only model cannot be loaded; return the error that ends it."""

    async def nothing(_server: Served) -> None:
        raise RuntimeError("it has started")

    reasons: list[str] = []
    try:
        serve(nothing, file_with({"models": {"m": {"device": "cuda:77"}}}), fronts=fronts)
    except* LoadFailed as group:
        reasons += map(str, _leaf_errors(group))
    return reasons[0]


def _with_arguments(*words: str) -> Callable[[Config], Config]:
    """Return how `fairlead serve` with these arguments changes a file's configuration."""
    from fairlead.server.cli.program import commands

    _, bound, _ = commands.parse_args(["serve", *words], exit_on_error=False, print_error=False)
    options = bound.arguments.get("options", ServeOptions())
    return lambda config: options.config(None, config)


def play_mutant(name: str) -> str | None:
    """Run the scenario that must fail with a mutant; return its first failure, or None."""
    from settings.all_cases import MUTANTS
    from settings.mutants import broken

    mutant = MUTANTS[name]
    play_scenario = {"play": play, "behaviour": play_behaviour, "reload": _apply_by_reload}[mutant.how]
    with broken(mutant):
        return failure_of(play_scenario, mutant.scenario, mutant.fronts)


def play_with_cut(name: str) -> str | None:
    """Run scenarios on a server without a wire until one fails; return its failure, or None.

    A server that does not start, or breaks off, has failed.
    """
    from settings.all_cases import BEHAVIOURS, CASES
    from settings.wires import cut, wires

    (wire,) = (each for each in wires() if each.name == name)
    fronts = FRONTS[-1] if wire.is_of_fronts else 1
    # Those with the most processes first: they fail for most wires.
    behaviours = sorted(
        (each for each, found in BEHAVIOURS.items() if fronts in found.fronts),
        key=lambda each: len(BEHAVIOURS[each].fronts),
    )
    keys = [key for key in CASES if fronts == 1 or key not in NOT_WITH_FRONTS]
    plays: list[Callable[[], object]] = [
        partial(_fail_to_start, fronts),
        *(partial(play_behaviour, each, fronts) for each in behaviours),
        *(partial(play, key, fronts) for key in keys),
        *(partial(_apply_by_reload, key, fronts) for key in keys),
    ]
    for play_scenario in plays:
        try:
            with cut(wire), _alarm():
                play_scenario()
        except Exception as error:  # noqa: BLE001  # whatever breaks when a part is missing
            return repr(error)
    return None


def _fail_to_start(fronts: int) -> None:
    assert "cuda:77" in play_start_that_fails(fronts)


@contextmanager
def _alarm() -> Iterator[None]:
    """Raise `TimeoutError` in a scenario that spins, again and again: a shield survives the first."""

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SCENARIO_S, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _apply_by_reload(key: str, fronts: int) -> None:
    assert play_after_reload(key, fronts) in ([], [key]), "it is not reported"


def _without(case: Case) -> Document:
    document = file_with(case.document)
    without = (
        without_key(document, case.key)
        if case.alternative is None
        else replaced(document, case.key, case.alternative)
    )
    if without == document:
        raise KeyError(case.key)
    return without


def _leaf_errors(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaf_errors(member)
    else:
        yield error
