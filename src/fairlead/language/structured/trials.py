"""Makes and tries grammars before their jobs are queued, in a few processes that can be ended.

They are forks of `trial_process`, of low priority: to write the grammar of a large schema takes a tenth of a
second, in which no stream should wait for this process's lock or for a processor.
"""

import contextlib
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from socket import socketpair
from typing import Any

import msgspec

from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.language.structured.form_values import decode_values, encode_values
from fairlead.language.structured.trial_messages import Trial, TrialResult

COMMAND = (sys.executable, "-P", "-m", "fairlead.language.structured.trial_process")
CPU_S = 2.0
MEMORY_BYTES = 48 * 1024 * 1024
"""Bounds on one grammar. 1,000 optional properties take 0.2 s and 24 MB."""

MOST_OWNERS = 1000  # of whom it is remembered that their last grammar took long
BUSY_FACTOR = 15
"""A trial may last this many times its processor time, because the machine may have other work."""

_REPLY_SLACK_S = 5.0  # the process may have to be started first


class TrialFailed(RuntimeError):
    """A grammar could not be tried, which says nothing of it."""


class TrialRefused(ValueError):
    """A call has reached a bound."""


class GrammarTrials:
    """Processes that try grammars, started when they are needed. Threads may call `run` at the same time.

    There are as many processes as calls at once, which the caller bounds. `cpu_s` and `memory_bytes` are the
    bounds on one grammar, and `most_s` is how long its trial may last, `BUSY_FACTOR` times `cpu_s` if None.
    The processes end when this object is not used any more.

    After a grammar that took long (`LONG_S`), its owner's next one is tried only while a processor is idle,
    for `IDLE_S` at most. Otherwise one of a storm would run at ordinary priority at any moment.
    """

    def __init__(
        self, *, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES, most_s: float | None = None
    ) -> None:
        self.cpu_s = cpu_s
        self._most_s = BUSY_FACTOR * cpu_s if most_s is None else most_s
        self._memory_bytes = memory_bytes
        self._idle: list[_TrialProcess] = []
        self._long: OrderedDict[str, None] = OrderedDict()  # the owners of the last trials that took long
        self._lock = threading.Lock()
        # Unlike `__del__`, this is called before the processes' own finalizers, also in a reference cycle.
        weakref.finalize(self, _end_all, self._idle)

    def run(self, grammar: str, owner: str = "") -> TrialResult:
        """Compile a grammar within the bounds, to see what comes of it. Blocks. Raises `TrialFailed`."""
        return self._ask(owner, grammar)

    def call(self, name: str, *arguments: Any, owner: str = "") -> Any:
        """Return what a function of `CALLS` returns there, within the bounds. Blocks.

        Raises `TrialFailed`, and `TrialRefused` at a bound.
        """
        result = self._ask(owner, call=name, arguments=encode_values(arguments))
        if result.fault is not None:
            raise TrialRefused(result.fault)
        return decode_values(result.value)

    def _ask(self, owner: str, grammar: str = "", *, call: str = "", arguments: bytes = b"") -> TrialResult:
        is_idle = owner in self._long
        trial = Trial(grammar, self.cpu_s, self._memory_bytes, self._most_s, call, arguments, is_idle)
        process = self._take()
        try:
            result = process.ask(trial, timeout_s=self._most_s + _REPLY_SLACK_S)
        except PeerGone as gone:
            process.end()
            raise TrialFailed(f"the process that tries grammars has failed: {gone}") from gone
        except BaseException:
            process.end()
            raise
        with self._lock:
            self._idle.append(process)
            self._note(owner, result)
        if result.is_busy:
            raise TrialFailed("the machine is too busy to compile a grammar")
        return result

    def _note(self, owner: str, result: TrialResult) -> None:
        if not result.was_long:
            self._long.pop(owner, None)
        elif owner:
            self._long[owner] = None
            if len(self._long) > MOST_OWNERS:
                self._long.popitem(last=False)

    def close(self) -> None:
        """End the processes that are idle."""
        with self._lock:
            _end_all(self._idle)

    def _take(self) -> "_TrialProcess":
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        try:
            return _TrialProcess()
        except OSError as error:
            raise TrialFailed(f"no process to try grammars can be started: {error}") from error


def _end_all(processes: "list[_TrialProcess]") -> None:
    while processes:
        processes.pop().end()


class _TrialProcess:
    """A running `trial_process`. It ends when its socket is closed."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(COMMAND, stdin=theirs.fileno())  # noqa: S603  our own program
            except BaseException:
                ours.close()
                raise
        self._socket = ours
        self._connection = FrameSocket(ours, msgspec.msgpack.Decoder(TrialResult))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, trial: Trial, *, timeout_s: float) -> TrialResult:
        """Return the result. Raises `PeerGone` if there is none in time."""
        self._socket.settimeout(timeout_s)
        self._connection.send(trial)
        return self._connection.receive()

    def end(self) -> None:
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
