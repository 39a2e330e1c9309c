"""Lets all applications of a process try grammars in the same processes.

To start such a process takes 0.2 s, which each test of a grammar would do. A trial brings its own limits, and
nothing of it is left in the process when it is over.
"""

import atexit

import pytest

from fairlead.language.structured import trials

_TrialProcess, _end_all = trials._TrialProcess, trials._end_all
_idle: list[trials._TrialProcess] = []
atexit.register(_end_all, _idle)


def _take() -> trials._TrialProcess:
    while _idle:
        process = _idle.pop()
        if process.is_alive:
            return process
        process.end()
    return _TrialProcess()


def _keep(processes: list[trials._TrialProcess]) -> None:
    _idle.extend(processes)
    processes.clear()


def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share them among the `GrammarTrials` that are made until this is undone."""
    monkeypatch.setattr(trials, "_TrialProcess", _take)
    monkeypatch.setattr(trials, "_end_all", _keep)
