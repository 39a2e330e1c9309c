"""Trials of grammars: what a hostile one may take, and what is left of it."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from socket import socketpair

import msgspec
import pytest

from fairlead.base.frames import FrameSocket
from fairlead.language.structured import trial_process
from fairlead.language.structured import trials as module
from fairlead.language.structured.compiler import GrammarRefused, compile_grammar
from fairlead.language.structured.forming import form_answer
from fairlead.language.structured.grammar import PLAIN, ChoiceAnswer, JsonAnswer, answer_grammar
from fairlead.language.structured.request import AnswerSpec
from fairlead.language.structured.trial_messages import Trial, TrialResult
from fairlead.language.structured.trials import GrammarTrials, TrialFailed, TrialRefused
from language.structured.words import lark

BOMB = answer_grammar(
    JsonAnswer({"allOf": [{"type": "integer", "multipleOf": multiple} for multiple in (9973, 9967)]})
)
GOOD = lark('start: "a"')


@pytest.fixture
def trials():
    with_limits = GrammarTrials()
    yield with_limits
    with_limits.close()


def suppressed(run):
    def call(grammar):
        with contextlib.suppress(TrialFailed):
            run(grammar)

    return call


def children(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_grammar_that_compiles_has_no_fault_and_a_size(trials):
    result = trials.run(GOOD)
    assert (result.fault, result.is_busy) == (None, False)
    assert 0 < result.memory_bytes < module.MEMORY_BYTES


def test_fault_is_one_line_without_the_grammar(trials):
    overlapping = {"oneOf": [{"minimum": 1}, {"maximum": 2}]}
    fault = trials.run(answer_grammar(JsonAnswer(overlapping))).fault
    assert "oneOf" in fault
    assert "%json" not in fault
    assert "\n" not in fault


def test_grammar_that_would_fail_at_the_first_character_of_an_answer_is_refused(trials):
    def optional(count):
        fields = {f"k{index}": {"type": "string"} for index in range(count)}
        return answer_grammar(JsonAnswer({"type": "object", "properties": fields}))

    assert trials.run(optional(1000)).fault is None
    assert trials.run(optional(2500)).fault == "an answer may go on in more than 5000 ways"


def test_grammar_with_characters_that_take_long_to_find_is_refused(monkeypatch):
    monkeypatch.setattr(trial_process, "_BYTE_S", 0.0)
    compiled, _ = compile_grammar(trial_process._vocabulary(), GOOD)
    with pytest.raises(GrammarRefused, match="a character of its answer takes longer than 0 ms"):
        trial_process._write_beginnings(compiled)


def test_form_becomes_a_grammar_there(trials):
    schema = {"type": "integer", "maximum": 2**80, "description": "\ud800"}
    spec = AnswerSpec(answer=JsonAnswer(schema))
    formed = trials.call("form", spec, PLAIN, None, "closed")
    assert formed == form_answer(spec, PLAIN, None, "closed")
    assert formed.grammar is not None


def test_large_result_arrives_whole(trials):
    spec = AnswerSpec(answer=ChoiceAnswer([f"{number:01000}" for number in range(500)]))
    assert len(trials.call("form", spec, PLAIN, None, "closed").grammar) > 500_000


def test_form_that_takes_too_long_to_write_is_refused():
    trials = GrammarTrials(cpu_s=0.001, most_s=60)
    spec = AnswerSpec(answer=ChoiceAnswer([f"{number:0100}" for number in range(8000)]))
    with pytest.raises(TrialRefused, match=r"more than 0\.001 s"):
        trials.call("form", spec, PLAIN, None, "closed")
    trials.cpu_s = 2.0
    assert trials.run(GOOD).fault is None, "the next one was affected"
    trials.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"memory_bytes": 16 << 20}, "more than 16 MB"),
        ({"cpu_s": 0.1, "memory_bytes": 1 << 40, "most_s": 60}, "more than 0.1 s"),
    ],
    ids=["memory", "processor time"],
)
def test_grammar_that_never_compiles_is_ended_at_its_limit(limits, reason):
    trials = GrammarTrials(**limits)
    assert reason in trials.run(BOMB).fault
    (process,) = trials._idle
    assert children(process._process.pid) == [], "the compilation goes on"
    assert trials.run(GOOD).fault is None, "the next one was affected"
    assert trials._idle == [process]
    trials.close()


def test_long_trial_runs_only_while_a_processor_is_idle():
    trials = GrammarTrials(memory_bytes=1 << 40, cpu_s=100)
    trials.run(GOOD)
    process = trials._idle[0]._process
    thread = threading.Thread(target=suppressed(trials.run), args=(BOMB,))
    thread.start()

    def policies():
        for fork in children(process.pid):
            yield {os.sched_getscheduler(int(task.name)) for task in Path(f"/proc/{fork}/task").iterdir()}

    until_s = time.monotonic() + 20
    while {os.SCHED_IDLE} not in policies():
        assert time.monotonic() < until_s, "it has an ordinary share of the processors"
        time.sleep(0.01)
    process.kill()
    thread.join()


def test_trial_that_gets_no_idle_processor_begins_again_with_an_ordinary_share(monkeypatch):
    attempts = []

    def watch(trial, _pid, _results, _connection, *, yields):
        attempts.append((trial.most_s, trial.is_idle, yields))
        return (TrialResult("no time", is_busy=True) if yields else TrialResult()), False

    monkeypatch.setattr(trial_process, "_watch", watch)
    asked, connection = socketpair()
    trial = Trial(GOOD, cpu_s=10, memory_bytes=1 << 40, most_s=60, is_idle=True)
    with asked, contextlib.closing(FrameSocket(connection, msgspec.msgpack.Decoder(Trial))) as frames:
        assert trial_process._run(trial, frames, []) == TrialResult()
    assert attempts == [(10, True, True), (50, False, False)]


def test_result_does_not_wait_until_its_fork_is_gone(monkeypatch):
    asked, connection = socketpair()
    ours, theirs = os.pipe()  # a fork is gone when this is closed

    def answer_and_linger(_trial, results):
        os.close(theirs)
        os.write(results, msgspec.msgpack.encode(TrialResult("refused")))
        os.close(results)
        os.read(ours, 1)
        os._exit(0)

    monkeypatch.setattr(trial_process, "_compile_and_exit", answer_and_linger)
    trial = Trial(GOOD, cpu_s=10, memory_bytes=1 << 40, most_s=60)
    exiting = []
    with asked, contextlib.closing(FrameSocket(connection, msgspec.msgpack.Decoder(Trial))) as frames:
        for _ in range(3):
            assert trial_process._run(trial, frames, exiting).fault == "refused"
        assert len(exiting) == 3
    os.close(theirs)
    for pid in exiting:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    trial_process._reap(exiting)
    os.close(ours)
    assert exiting == []


def test_grammar_that_takes_long_is_reported(trials):
    assert trials.run(answer_grammar(ChoiceAnswer([f"{number:050}" for number in range(3000)]))).was_long


def test_owner_of_a_grammar_that_took_long_gets_the_next_one_tried_while_a_processor_is_idle(
    trials, monkeypatch
):
    asked = []

    def answer(_process, trial, *, timeout_s):
        assert timeout_s > trial.cpu_s
        asked.append(trial.is_idle)
        return TrialResult(was_long=trial.grammar == "long")

    monkeypatch.setattr(module._TrialProcess, "ask", answer)
    for grammar, owner in (("long", "ana"), ("short", "bob"), ("short", "ana"), ("short", "ana")):
        trials.run(grammar, owner)
    assert asked == [False, False, True, False]


@pytest.mark.parametrize("tokens", ["<[151644]>", "<[300-151644]>", "<[^1,999999]>", "<[9,151643-151645]>"])
def test_special_token_of_a_large_vocabulary_is_known(trials, tokens):
    assert trials.run(lark(f"start: {tokens}")).fault is None


def test_calls_of_several_threads_have_a_process_each(trials):
    barrier, faults = threading.Barrier(2), []

    def call():
        barrier.wait(20)
        faults.append(trials.run(GOOD).fault)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [None, None]
    assert 1 <= len(trials._idle) <= 2


def test_process_that_was_killed_is_replaced(trials):
    trials.run(GOOD)
    os.kill(trials._idle[0]._process.pid, signal.SIGKILL)
    trials._idle[0]._process.wait()
    assert trials.run(GOOD).fault is None


def test_process_that_is_killed_during_a_trial_says_nothing_of_the_grammar(trials):
    trials.run(GOOD)
    process, failures = trials._idle[0], []
    ended = set(children(process._process.pid))  # the fork of the first trial, which may not be gone yet

    def call():
        try:
            trials.run(BOMB)
        except TrialFailed as failure:
            failures.append(failure)

    thread = threading.Thread(target=call)
    thread.start()
    while not (forks := [fork for fork in children(process._process.pid) if fork not in ended]):
        time.sleep(0.001)
    os.kill(process._process.pid, signal.SIGKILL)
    thread.join()
    assert len(failures) == 1
    for _ in range(500):
        if not Path(f"/proc/{forks[0]}").exists() or "zombie" in Path(f"/proc/{forks[0]}/status").read_text():
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the compilation has outlived its process")
    assert trials.run(GOOD).fault is None


def test_machine_without_time_says_nothing_of_the_grammar():
    trials = GrammarTrials(cpu_s=100, memory_bytes=1 << 40, most_s=0.05)
    with pytest.raises(TrialFailed, match="busy"):
        trials.run(BOMB)
    (process,) = trials._idle
    assert children(process._process.pid) == []
    trials.close()


def test_processes_end_when_they_are_closed(trials):
    trials.run(GOOD)
    pid = trials._idle[0]._process.pid
    trials.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "oneOf"),
        ({"type": "string", "pattern": "^(?=a)b"}, "regular expression"),
        ({"type": "string", "pattern": "(a"}, "regular expression"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {"type": "null"}}}, "patternProperties"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "maxProperties"),
    ],
)
def test_fault_names_the_keyword_and_shows_no_grammar(trials, schema, word):
    fault = trials.run(answer_grammar(JsonAnswer(schema))).fault
    assert word in fault
    assert not any(shown in fault for shown in ("\n", "%json", "TERMINAL", "x-guidance", "llguidance"))
