"""The log's writer: callers never wait, lines keep their order, and every line is written or counted."""

import os
import re
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairlead.base.telemetry.log_writer import LogBuffer, LogWriter

TIMEOUT_S = 20.0
NOTICE = re.compile(r"<(\d+) dropped>")


def notice(lines: int) -> str:
    return f"<{lines} dropped>\n"


def buffer(max_lines: int = 1000, max_bytes: int = 100_000) -> LogBuffer:
    return LogBuffer(max_lines=max_lines, max_bytes=max_bytes, notice=notice)


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class File:
    """A sink. Each of `faults` applies to one call: write at most that many bytes, or raise that error.

    While `gate` is closed, calls block. `written` has all bytes that were written.
    """

    def __init__(self, *faults: int | Exception) -> None:
        self.faults = list(faults)
        self.gate = threading.Event()
        self.gate.set()
        self.blocked = threading.Event()
        self.written = b""
        self.calls = 0

    def write(self, data: memoryview) -> int:
        self.calls += 1
        if not self.gate.is_set():
            self.blocked.set()
            self.gate.wait(TIMEOUT_S)
        fault = self.faults.pop(0) if self.faults else len(data)
        if isinstance(fault, Exception):
            raise fault
        self.written += bytes(data[:fault])
        return min(fault, len(data))

    @property
    def lines(self) -> list[str]:
        return self.written.decode().splitlines()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("fairlead.base.telemetry.log_writer.RETRY_S", 0.001)
    monkeypatch.setattr("fairlead.base.telemetry.log_writer.PAUSE_S", 0.001)


# The buffer ------------------------------------------------------------------------------------------


class BufferMachine(RuleBasedStateMachine):
    """Put and remove lines in any order; the oracle is the list of expected output, including notices."""

    def __init__(self) -> None:
        super().__init__()
        self.tested = buffer(max_lines=5, max_bytes=40)
        self.expected: list[str] = []  # the output if everything were removed now
        self.waiting: list[str] = []
        self.gap = 0
        self.dropped = 0
        self.written = b""

    @rule(text=st.sampled_from(["a\n", "some words\n", "one\ntwo\nthree\n", "frame", "é\n", "x" * 41 + "\n"]))
    def put(self, text: str) -> None:
        lines = max(1, text.count("\n"))
        lines_waiting = sum(max(1, entry.count("\n")) for entry in self.waiting)
        size = sum(len(entry.encode()) for entry in [*self.waiting, text])
        if lines_waiting + lines > 5 or size > 40:
            self.gap += lines
            self.dropped += lines
        else:
            if self.gap:
                self.expected.append(notice(self.gap))
                self.gap = 0
            self.expected.append(text)
            self.waiting.append(text)
        self.tested.put(text)

    @rule()
    def write(self) -> None:
        batch = self.tested.peek()
        if batch is None:
            assert not self.waiting
            assert not self.gap
            return
        self.written += batch.data
        self.tested.remove(batch)
        del self.waiting[: batch.entries]
        if not self.waiting and self.gap:
            self.expected.append(notice(self.gap))
            self.gap = 0

    @rule()
    def peek_twice(self) -> None:
        assert self.tested.peek() == self.tested.peek()

    @invariant()
    def each_missing_line_is_counted(self) -> None:
        assert self.dropped == self.tested.dropped
        assert "".join(self.expected).encode().startswith(self.written)

    def teardown(self) -> None:
        while self.tested.peek() is not None:
            self.write()
        assert "".join(self.expected).encode() == self.written
        assert self.dropped == sum(map(int, NOTICE.findall(self.written.decode())))


TestBuffer = BufferMachine.TestCase


def test_line_put_while_another_is_being_put_does_not_deadlock():
    tested = buffer()
    with tested._lock:  # as when the garbage collector runs a destructor that prints
        tested.put("from a destructor\n")
    batch = tested.peek()
    assert batch is not None
    assert batch.data == b"from a destructor\n"


# The thread ------------------------------------------------------------------------------------------

FAULTS = st.lists(
    st.one_of(
        st.integers(1, 30),
        st.sampled_from(
            [OSError(28, "full"), OSError(32, "pipe"), ValueError("closed"), BlockingIOError(11)]
        ),
    ),
    max_size=8,
)


@given(faults=FAULTS, pieces=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8))
def test_output_is_the_input_in_order_except_for_counted_dropped_lines(faults, pieces):
    """The stream blocks, fails, writes partially and recovers at random."""
    file = File(*faults)
    tested = LogWriter(file.write, buffer(max_lines=20, max_bytes=150))
    put: list[str] = []
    for lines, is_open in pieces:
        if is_open:
            file.gate.set()
        else:
            file.gate.clear()
        for _ in range(lines):
            put.append(f"line {len(put)}")
            tested.put(f"{put[-1]}\n")
    file.gate.set()
    wait_for(lambda: tested._buffer.peek() is None)
    assert tested.close(TIMEOUT_S)
    written = [line for line in file.lines if not NOTICE.fullmatch(line)]
    noticed = sum(int(match[1]) for match in map(NOTICE.fullmatch, file.lines) if match)
    assert [line for line in put if line in set(written)] == written
    assert len(put) - len(written) == tested.dropped == noticed


def test_put_does_not_wait_for_a_blocked_stream():
    file = File()
    file.gate.clear()
    tested = LogWriter(file.write, buffer(max_lines=10))
    tested.put("first\n")
    assert file.blocked.wait(TIMEOUT_S)
    for number in range(1000):  # would block forever if `put` waited
        tested.put(f"{number}\n")
    assert tested.dropped == 1000 - 9
    file.gate.set()
    assert tested.close(TIMEOUT_S)
    assert file.lines == ["first", *map(str, range(9)), "<991 dropped>"]


def test_notice_is_written_where_lines_are_missing():
    file = File()
    file.gate.clear()
    tested = LogWriter(file.write, buffer(max_lines=2))
    tested.put("first\n")
    assert file.blocked.wait(TIMEOUT_S)
    for line in ("second\n", "lost\n", "lost\n"):
        tested.put(line)
    file.gate.set()
    wait_for(lambda: "<2 dropped>" in file.lines)
    tested.put("later\n")
    assert tested.close(TIMEOUT_S)
    assert file.lines == ["first", "second", "<2 dropped>", "later"]


def test_line_truncated_by_a_full_disk_is_completed_later():
    file = File(3, OSError(28, "no space left"), OSError(28, "no space left"))
    tested = LogWriter(file.write, buffer())
    tested.put("a whole line\n")
    wait_for(lambda: file.lines == ["a whole line"])
    assert tested.close(TIMEOUT_S)
    assert tested.dropped == 0


def test_close_does_not_wait_for_a_failing_stream():
    file = File(*[OSError(28, "no space left")] * 100_000)
    tested = LogWriter(file.write, buffer())
    tested.put("lost\n")
    assert not tested.close(TIMEOUT_S)
    assert not tested._thread.is_alive()
    assert file.faults  # it returned before the stream recovered


def test_close_does_not_wait_for_a_blocked_stream():
    file = File()
    file.gate.clear()
    tested = LogWriter(file.write, buffer())
    tested.put("lost\n")
    assert file.blocked.wait(TIMEOUT_S)
    assert not tested.close(0.01)
    file.gate.set()
    tested._thread.join(TIMEOUT_S)


def test_close_waits_for_a_pipe_that_is_temporarily_full():
    file = File(*[BlockingIOError(11, "try again")] * 5)
    tested = LogWriter(file.write, buffer())
    tested.put("written\n")
    assert tested.close(TIMEOUT_S)
    assert file.lines == ["written"]


def test_line_put_after_the_thread_found_none_is_written_without_another():
    late: list[Callable[[], None]] = []

    class Buffer(LogBuffer):
        def peek(self):
            batch = super().peek()
            if batch is None and late:
                late.pop()()
            return batch

    file = File()
    tested = LogWriter(file.write, Buffer(max_lines=10, max_bytes=100, notice=notice))
    late.append(lambda: tested.put("late\n"))
    tested.put("first\n")
    wait_for(lambda: file.lines == ["first", "late"])
    assert tested.close(TIMEOUT_S)


def test_close_writes_the_lines_put_before():
    file = File()
    tested = LogWriter(file.write, buffer())
    for number in range(100):
        tested.put(f"{number}\n")
    assert tested.close(TIMEOUT_S)
    assert list(map(str, range(100))) == file.lines


def test_lines_queued_while_the_stream_blocks_are_written_in_one_call():
    file = File()
    file.gate.clear()
    tested = LogWriter(file.write, buffer())
    tested.put("first\n")
    assert file.blocked.wait(TIMEOUT_S)
    for number in range(500):
        tested.put(f"{number}\n")
    file.gate.set()
    assert tested.close(TIMEOUT_S)
    assert (len(file.lines), file.calls) == (501, 2)


def test_writer_waits_for_a_full_non_blocking_pipe():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    tested = LogWriter(lambda data: os.write(writing, data), buffer(max_lines=10_000, max_bytes=1_000_000))
    for _ in range(2000):
        tested.put("x" * 99 + "\n")  # three times what a pipe holds
    received = b""
    while len(received) < 200_000:
        received += os.read(reading, 65536)
    assert tested.close(TIMEOUT_S)
    assert (tested.dropped, received.count(b"\n")) == (0, 2000)
    os.close(reading)
    os.close(writing)


def test_lines_of_each_thread_keep_their_order():
    file = File()
    tested = LogWriter(file.write, buffer(max_lines=100_000, max_bytes=10_000_000))
    threads = [
        threading.Thread(target=lambda name=name: [tested.put(f"{name} {n}\n") for n in range(500)])
        for name in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tested.close(TIMEOUT_S)
    for name in range(4):
        assert [f"{name} {n}" for n in range(500)] == [line for line in file.lines if line[0] == str(name)]
    assert tested.dropped == 0
