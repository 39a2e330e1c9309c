"""Makes and compiles grammars of strangers, each in a forked process that is ended at its limits. A program.

A compilation cannot be interrupted: two `multipleOf` can make llguidance run for hours and take gigabytes.
This process has the libraries loaded and only one thread, so that a fork takes a millisecond, and nothing of
a trial is left when it is over. `trials.py` starts it, and sends it one request after another.
"""

import contextlib
import ctypes
import math
import os
import random
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.language.structured.compiler import MOST_ALTERNATIVES, GrammarRefused, compile_grammar
from fairlead.language.structured.constraint import error_of
from fairlead.language.structured.filling import STACK_BYTES, large_stack
from fairlead.language.structured.form_values import decode_values, encode_values
from fairlead.language.structured.forming import divide_answer, form_answer
from fairlead.language.structured.trial_messages import Trial, TrialResult
from fairlead.language.structured.vocabulary import token_vocabulary

CALLS: dict[str, Callable[..., Any]] = {"form": form_answer, "divide": divide_answer}
NICENESS = 10  # the steps of models come first
LONG_S = 0.01
"""After this processor time a trial runs only while a processor is idle (`IDLE_S`). Most trials take 5 ms.

The lowest priority would not do: a step that wakes up waits for the end of a running process's time slice, of
some milliseconds, whatever its priority. It does not wait for one that is scheduled as idle.
"""

IDLE_S = 10.0
"""How long a trial may wait for an idle processor.

While models keep all processors busy, none is idle. Then the trial begins again at `NICENESS`.
"""

_MOST_EXITING = 8
_LOOK_S = 0.005  # how often a trial is measured
_SPARE_BYTES = STACK_BYTES + 1024 * 1024 * 1024  # of address space, which an allocator takes in advance
_SPECIAL_TOKENS = re.compile(r"<\[[\d,^-]*\]>")
_ID = re.compile(r"\d+")
_MOST_TOKENS = 512
_BYTE_S = 0.02  # the CPU time that finding a byte of an answer may take
_TOO_MANY = f"an answer may go on in more than {MOST_ALTERNATIVES} ways"
_MORE_TIMES = 4
_WALKS = 4
_BYTES_A_WALK = 8
_PR_SET_PDEATHSIG = 1
# What llguidance says, and what that means to somebody who has written a schema.
_PLAIN = {
    "Regex is empty": "no text has all of its patterns and lengths",
    "Unsatisfiable schema": "no value is valid",
    "Unimplemented keys": "it has a keyword that is not supported",
    "Invalid URI reference": "a reference is not valid",
    "oneOf constraints are not supported": (
        "oneOf needs alternatives that exclude each other by a type, a constant or a required property;"
        " anyOf does not"
    ),
    "circular references with sibling keys": (
        "$ref to a schema that has itself in it is not supported beside other keywords"
    ),
    "are not disjoint": "patternProperties of which two may match one name are not supported",
    "min/maxProperties only supported": "minProperties and maxProperties need required properties only",
    "lookarounds not supported": "a regular expression has a lookahead or an anchor that is not supported",
    "regex parse error": "a regular expression is not valid, or has a lookaround, which is not supported",
}


def main() -> int:
    """Serve the socket at stdin until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.nice(NICENESS)
    _vocabulary()  # which all forks have then
    with (
        socket.socket(fileno=os.dup(sys.stdin.fileno())) as inherited,
        contextlib.suppress(PeerGone),
    ):
        connection = FrameSocket(inherited, msgspec.msgpack.Decoder(Trial))
        exiting: list[int] = []
        while (result := _run(connection.receive(), connection, exiting)) is not None:
            connection.send(result)
    return 0


def _run(trial: Trial, connection: FrameSocket[Trial], exiting: list[int]) -> TrialResult | None:
    """Compile a grammar within its limits. Return None if the parent has gone."""
    first_s = min(IDLE_S, trial.most_s / 2)
    result = _attempt(msgspec.structs.replace(trial, most_s=first_s), connection, exiting, yields=True)
    if result is not None and result.is_busy:
        rest = msgspec.structs.replace(trial, most_s=trial.most_s - first_s, is_idle=False)
        result = _attempt(rest, connection, exiting, yields=False)
    return result


def _attempt(
    trial: Trial, connection: FrameSocket[Trial], exiting: list[int], *, yields: bool
) -> TrialResult | None:
    """Compile a grammar in a fork, and end that at its limits. Return None if the parent has gone.

    `yields`: from `LONG_S` on, only while a processor is idle.

    The result does not wait for the exit of the fork, which may take half a second on a busy machine. The
    fork is added to `exiting`, and `_reap` removes it later.
    """
    _reap(exiting)
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ours)
        connection.close()
        _compile_and_exit(trial, theirs)
    os.close(theirs)
    has_ended = False
    try:
        result, has_ended = _watch(trial, pid, ours, connection, yields=yields)
        return result
    finally:
        os.close(ours)
        if has_ended:
            exiting.append(pid)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _reap(exiting: list[int]) -> None:
    """Remove the forks that are gone; wait for the oldest one where there are too many."""
    exiting[:] = [pid for pid in exiting if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    if len(exiting) >= _MOST_EXITING:
        os.waitpid(exiting.pop(0), 0)


def _watch(
    trial: Trial, pid: int, results: int, connection: FrameSocket[Trial], *, yields: bool
) -> tuple[TrialResult | None, bool]:
    """Return the result of a fork, None if the parent has gone, and whether the fork has ended by itself."""
    began_s = time.monotonic()
    before_bytes = _memory_bytes(pid)
    poll = select.poll()
    poll.register(results, select.POLLIN)
    poll.register(connection, 0)  # only that it is closed
    received = b""
    while True:
        ready = dict(poll.poll(1000 * _LOOK_S))
        if connection.fileno() in ready:
            return None, False
        if results in ready:
            if found := os.read(results, 65536):
                received += found
                continue
            if not received:
                return _crash(trial, pid), True
            return msgspec.msgpack.decode(received, type=TrialResult), True
        cpu_s = _cpu_s(pid)
        if cpu_s > trial.cpu_s:
            return _too_slow(trial), False
        if cpu_s > LONG_S and yields:
            yields = False
            _run_while_idle(pid)
        if _memory_bytes(pid) - before_bytes > trial.memory_bytes:
            return _too_large(trial), False
        if time.monotonic() - began_s > trial.most_s:
            return TrialResult("there was no time to compile it", is_busy=True), False


def _run_while_idle(pid: int) -> None:
    """Let all threads of a process run only while a processor has nothing else to do, where that can be."""
    with contextlib.suppress(OSError, AttributeError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def _crash(trial: Trial, pid: int) -> TrialResult:
    """Return the result of a trial that has ended without one."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    number = 0 if info is None else info.si_status
    if number == signal.SIGXCPU:
        return _too_slow(trial)
    if number == signal.SIGABRT:  # what Rust does without memory
        return _too_large(trial)
    return TrialResult(f"the compiler of grammars failed with it (signal {number})", was_long=True)


def _too_slow(trial: Trial) -> TrialResult:
    return TrialResult(f"it takes more than {trial.cpu_s:g} s to compile", was_long=True)


def _too_large(trial: Trial) -> TrialResult:
    fault = f"it takes more than {trial.memory_bytes / 1024 / 1024:.0f} MB to compile"
    return TrialResult(fault, was_long=True)


# In the fork ---------------------------------------------------------------------------------------


def _compile_and_exit(trial: Trial, results: int) -> None:
    """Compile the grammar, write the result, and end this process, which has its limits also by itself."""
    if trial.is_idle:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(AttributeError, OSError):  # Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        cpu_s = math.ceil(trial.cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError, OSError):  # macOS refuses it
            most_bytes = _address_space_bytes() + trial.memory_bytes + _SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())  # what Rust prints when it ends the process
        with large_stack():
            thread = threading.Thread(target=_call if trial.call else _compile, args=(trial, results))
            thread.start()
        thread.join()
    finally:
        os._exit(0)


def _call(trial: Trial, results: int) -> None:
    value = CALLS[trial.call](*decode_values(trial.arguments))
    _write(TrialResult(value=encode_values(value)), results)


def _write(result: TrialResult, results: int) -> None:
    """Write a result whole, which may be larger than the pipe, and close the pipe.

    After a long trial it stays open, so that the parent waits until this process's memory is free.
    """
    result = msgspec.structs.replace(result, was_long=time.process_time() > LONG_S)
    with open(results, "wb", closefd=not result.was_long) as pipe:
        pipe.write(msgspec.msgpack.encode(result))


def _compile(trial: Trial, results: int) -> None:
    before_bytes = _memory_bytes(os.getpid())
    try:
        compiled, _ = compile_grammar(_vocabulary(), _with_known_tokens(trial.grammar))
        _write_beginnings(compiled)
        result = TrialResult(memory_bytes=max(0, _memory_bytes(os.getpid()) - before_bytes))
        del compiled
    except GrammarRefused as refusal:
        result = TrialResult(_plain(str(refusal)))
    _write(result, results)


def _write_beginnings(compiled: LLMatcher) -> None:
    """Write the first bytes of a few answers. Raises `GrammarRefused` if one of them takes too long.

    It would take so long in the model's process, too: with thousands of optional properties or products of
    alternatives, the parser has ten thousands of states at each byte, and consumes it with the GIL.
    """
    draw = random.Random(0)  # noqa: S311  not for secrets
    for _ in range(_WALKS):
        matcher = compiled.deep_copy()
        for _ in range(_BYTES_A_WALK):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:256])
            if not len(allowed):
                break
            byte = int(draw.choice(allowed))
            took_s = _time_to_write(matcher.deep_copy(), byte)
            for _ in range(_MORE_TIMES):  # other work on the machine makes a measurement too long
                if took_s > _BYTE_S:
                    took_s = min(took_s, _time_to_write(matcher.deep_copy(), byte))
            _time_to_write(matcher, byte)
            if matcher.is_error():
                raise GrammarRefused(_TOO_MANY if "items; max is" in error_of(matcher) else error_of(matcher))
            if took_s > _BYTE_S:
                raise GrammarRefused(
                    f"a character of its answer takes longer than {_BYTE_S * 1000:g} ms to find"
                )


def _time_to_write(matcher: LLMatcher, byte: int) -> float:
    """Return the CPU time of consuming a byte and of finding what may follow."""
    began_s = time.thread_time()
    matcher.consume_token(byte)
    matcher.compute_bitmask()
    return time.thread_time() - began_s


def _plain(fault: str) -> str:
    """Return a fault in the words of schemas, without the grammar, which the client has not written."""
    line = fault.partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
    words = next((words for begin, words in _PLAIN.items() if begin in line), line)
    return "it cannot be compiled" if "%json" in words else words[:1000]


def _with_known_tokens(grammar: str) -> str:
    """Replace the ids of a model's special tokens, as in `<[151643]>`, by ids of our vocabulary."""
    return _SPECIAL_TOKENS.sub(lambda found: _ID.sub(_known_id, found[0]), grammar)


def _known_id(found: re.Match[str]) -> str:
    return str(min(int(found[0]), _MOST_TOKENS - 1))


@lru_cache
def _vocabulary() -> LLTokenizer:
    """Return a vocabulary of single bytes and of special tokens.

    What a compilation costs does not depend on a model's vocabulary, which takes seconds to read.
    """
    return token_vocabulary(
        lambda token_id: bytes([token_id]) if token_id < 256 else b"",
        vocab_size=_MOST_TOKENS + 1,
        special_ids=range(256, _MOST_TOKENS),
        eos_token_ids=[_MOST_TOKENS],
    )


# Measuring a process -------------------------------------------------------------------------------


def _memory_bytes(pid: int) -> int:
    """Return the memory of a process; 0 where that cannot be read, or when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process; 0 where that cannot be read. `RLIMIT_CPU` counts it, too.

    The scheduler's own statistics are exact; those in ticks of 10 ms stand in where there are none.
    """
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_bytes().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
