"""Standard output and standard error while a server runs: everything printed is written by a thread."""

import io
import json
import os
import subprocess
import sys

import pytest
import structlog

from fairlead import child_output
from fairlead.telemetry import logs, streams
from fairlead.telemetry.log_writer import LogBuffer, LogWriter


@pytest.fixture(autouse=True)
def _structlog_as_before():
    earlier = structlog.get_config()
    yield
    structlog.reset_defaults()
    structlog.configure(**earlier)


class Printed:
    """A stream over a list."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.stream = streams.LogStream(self, None)

    def put(self, text: str) -> None:
        self.texts.append(text)


def test_a_stream_passes_whole_lines_on():
    printed = Printed()
    print("a", 1, file=printed.stream)
    print("b\nc", end="\n", file=printed.stream)
    assert ["a 1\n", "b\n", "c\n"] == printed.texts


def test_flushing_passes_on_the_beginning_of_a_line_as_a_progress_bar_needs_it():
    printed = Printed()
    printed.stream.write("\r 10 %")
    assert [] == printed.texts
    printed.stream.flush()
    assert ["\r 10 %"] == printed.texts


def test_where_lines_are_wrapped_the_beginning_of_one_waits_for_its_end():
    printed = Printed()
    printed.stream.wrap = lambda line: f"<{line}>"
    printed.stream.write("\n10")
    printed.stream.flush()
    printed.stream.write(" %\n20 %\n30")
    assert ["<10 %>\n", "<20 %>\n"] == printed.texts
    printed.stream.finish()
    assert "<30>\n" == printed.texts[-1]


def test_a_line_without_an_end_takes_no_memory():
    printed = Printed()
    for _ in range(100):
        printed.stream.write("x" * 1000)
    assert len("".join(printed.texts)) > 80_000


def test_a_stream_without_a_file_has_no_descriptor_and_is_no_terminal():
    printed = Printed()
    assert not printed.stream.isatty()
    with pytest.raises(OSError):
        printed.stream.fileno()


def test_what_cannot_be_encoded_is_escaped():
    written = io.BytesIO()
    writer = LogWriter(written.write, LogBuffer(max_lines=9, max_bytes=99, notice=str))
    print("half a character: \ud800", file=streams.LogStream(writer, None))
    assert writer.close(30)
    assert b"half a character: \\ud800\n" == written.getvalue()


# The process's streams -------------------------------------------------------------------------------


def test_everything_printed_is_written_and_the_streams_are_as_before_afterwards(capfd):
    before = sys.stdout, sys.stderr
    with logs.log_streams():
        structlog.get_logger("test").warning("an event")
        sys.stderr.write("a line\n")
        sys.stdout.write("on standard output\n")
        child_output.relay("qwen", "of a child")
        assert before != (sys.stdout, sys.stderr)
    assert before == (sys.stdout, sys.stderr)
    printed = capfd.readouterr()
    assert "on standard output\n" == printed.out
    found = [printed.err.index(text) for text in ("an event", "a line", "[qwen] of a child")]
    assert sorted(found) == found


def test_in_json_every_line_is_an_object(capfd):
    with logs.log_streams(json=True):
        structlog.get_logger("test").warning("an event", number=1)
        sys.stderr.write("a line\n")
        sys.stdout.write("on standard output\n\n")
        child_output.relay("qwen", "of a child")
        child_output.relay("qwen", "")
    out, err = capfd.readouterr()
    assert [("stdout", "on standard output")] == [
        (event["source"], event["line"]) for event in map(json.loads, out.splitlines())
    ]
    events = [json.loads(line) for line in err.splitlines()]
    assert all({"event", "level", "timestamp"} <= set(event) for event in events)
    assert ("an event", 1) == (events[0]["event"], events[0]["number"])
    assert [("stderr", "a line"), ("qwen", "of a child")] == [
        (event["source"], event["line"]) for event in events[1:]
    ]


def test_what_python_itself_prints_is_an_object_too():
    code = """if True:
        import logging, threading, warnings
        from fairlead.telemetry.logs import log_streams

        class Broken:
            def __del__(self):
                raise KeyError("in a destructor")

        with log_streams(json=True):
            warnings.warn("a warning")
            logging.getLogger("a library").error("an error of a library")
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
            Broken()
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "" == ran.stdout
    lines = [json.loads(line)["line"] for line in ran.stderr.splitlines()]
    for expected in (
        *("UserWarning: a warning", "an error of a library", "ZeroDivisionError: division by zero"),
        "KeyError: 'in a destructor'",
    ):
        assert any(expected in line for line in lines), expected


def test_a_logger_that_was_used_before_json_was_asked_for_writes_json_from_then_on(capfd):
    with logs.log_streams():
        logger = structlog.get_logger("test")
        logger.warning("early")
        logs.configure(json=True)
        logger.warning("late")
    early, late = capfd.readouterr().err.splitlines()
    assert "early" in early
    assert "late" == json.loads(late)["event"]


def test_dropped_lines_are_reported_in_the_form_of_the_log(capfd, monkeypatch):
    monkeypatch.setattr(streams, "MAX_BYTES", 300)
    with logs.log_streams():
        sys.stderr.write("x" * 300 + "\n")
        assert 1 == streams.lines_dropped()
        sys.stderr.write("fits\n")
        logs.configure(json=True)
    assert 0 == streams.lines_dropped()
    plain, fits = capfd.readouterr().err.splitlines()
    assert "fits" == fits
    assert "log lines dropped" in plain
    with logs.log_streams(json=True):
        sys.stderr.write("x" * 300 + "\n")
    event = json.loads(capfd.readouterr().err)
    assert ("log lines dropped", 1, "warning") == (event["event"], event["lines"], event["level"])


def test_streams_that_are_the_same_file_keep_the_order_of_all_lines(tmp_path):
    code = (
        "import sys; from fairlead.telemetry.logs import log_streams\n"
        "with log_streams():\n"
        "    for n in range(500): print(n, file=(sys.stdout, sys.stderr)[n % 2])\n"
    )
    file = tmp_path / "both"
    with file.open("w") as both:
        subprocess.run([sys.executable, "-c", code], stdout=both, stderr=both, check=True)
    assert list(map(str, range(500))) == file.read_text().splitlines()


def test_a_blocked_terminal_gets_what_was_printed_when_it_is_read_again():
    ours, theirs = os.openpty()
    stream = os.fdopen(theirs, "w")
    redirected = streams.LogStreams(None, stream, notice=lambda lines: f"{lines} dropped\n")
    assert redirected.stderr.isatty()
    for number in range(3000):  # more than a terminal takes: nobody reads yet
        print(f"line {number:04}", file=redirected.stderr)
    received = b""
    while received.count(b"\n") < 3000:
        received += os.read(ours, 65536)
    assert redirected.close()
    assert b"line 2999" in received
    assert 0 == redirected.dropped
    stream.close()
    os.close(ours)


def test_closed_standard_streams_do_not_become_sockets():
    code = (
        "import os, socket; from fairlead.telemetry.logs import log_streams\n"
        "with log_streams(): pass\n"
        "with socket.socket() as one: os._exit(0 if one.fileno() > 2 else 3)\n"
    )
    command = f'exec "{sys.executable}" -c "$0" <&- >&- 2>&-'
    assert 0 == subprocess.run(["/bin/sh", "-c", command, code], check=False).returncode
