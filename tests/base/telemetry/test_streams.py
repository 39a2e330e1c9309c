"""Standard output and standard error while a server runs: everything printed is written by a thread."""

import io
import json
import os
import subprocess
import sys

import pytest
import structlog

from fairlead.base.runtime import child_output
from fairlead.base.telemetry import logs, streams
from fairlead.base.telemetry.log_writer import LogBuffer, LogWriter


@pytest.fixture(autouse=True)
def _restore_structlog():
    earlier = structlog.get_config()
    yield
    structlog.reset_defaults()
    structlog.configure(**earlier)


class Printed:
    """A `LogStream` that appends to a list."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.stream = streams.LogStream(self, None)

    def put(self, text: str) -> None:
        self.texts.append(text)


def test_stream_forwards_complete_lines():
    printed = Printed()
    print("a", 1, file=printed.stream)
    print("b\nc", end="\n", file=printed.stream)
    assert printed.texts == ["a 1\n", "b\n", "c\n"]


def test_flush_forwards_a_partial_line_for_progress_bars():
    printed = Printed()
    printed.stream.write("\r 10 %")
    assert printed.texts == []
    printed.stream.flush()
    assert printed.texts == ["\r 10 %"]


def test_partial_line_is_kept_until_its_end_if_lines_are_wrapped():
    printed = Printed()
    printed.stream.wrap = lambda line: f"<{line}>"
    printed.stream.write("\n10")
    printed.stream.flush()
    printed.stream.write(" %\n20 %\n30")
    assert printed.texts == ["<10 %>\n", "<20 %>\n"]
    printed.stream.finish()
    assert printed.texts[-1] == "<30>\n"


def test_long_line_without_an_end_is_written_in_parts():
    printed = Printed()
    for _ in range(100):
        printed.stream.write("x" * 1000)
    assert len("".join(printed.texts)) > 80_000


def test_stream_without_a_file_has_no_descriptor_and_is_not_a_terminal():
    printed = Printed()
    assert not printed.stream.isatty()
    with pytest.raises(OSError):
        printed.stream.fileno()


def test_characters_that_cannot_be_encoded_are_escaped():
    written = io.BytesIO()
    writer = LogWriter(written.write, LogBuffer(max_lines=9, max_bytes=99, notice=str))
    print("half a character: \ud800", file=streams.LogStream(writer, None))
    assert writer.close(30)
    assert written.getvalue() == b"half a character: \\ud800\n"


# The process's streams -------------------------------------------------------------------------------


def test_everything_printed_is_written_and_the_streams_are_restored(capfd):
    before = sys.stdout, sys.stderr
    with logs.log_streams():
        structlog.get_logger("test").warning("an event")
        sys.stderr.write("a line\n")
        sys.stdout.write("on standard output\n")
        child_output.relay("qwen", "of a child")
        assert before != (sys.stdout, sys.stderr)
    assert before == (sys.stdout, sys.stderr)
    printed = capfd.readouterr()
    assert printed.out == "on standard output\n"
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
    assert [(event["source"], event["line"]) for event in map(json.loads, out.splitlines())] == [
        ("stdout", "on standard output")
    ]
    events = [json.loads(line) for line in err.splitlines()]
    assert all({"event", "level", "timestamp"} <= set(event) for event in events)
    assert (events[0]["event"], events[0]["number"]) == ("an event", 1)
    assert [(event["source"], event["line"]) for event in events[1:]] == [
        ("stderr", "a line"),
        ("qwen", "of a child"),
    ]


def test_lines_that_python_itself_prints_are_json_objects():
    code = """if True:
        import logging, threading, warnings
        from fairlead.base.telemetry.logs import log_streams

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
    assert ran.stdout == ""
    lines = [json.loads(line)["line"] for line in ran.stderr.splitlines()]
    for expected in (
        *("UserWarning: a warning", "an error of a library", "ZeroDivisionError: division by zero"),
        "KeyError: 'in a destructor'",
    ):
        assert any(expected in line for line in lines), expected


def test_logger_used_before_json_is_configured_writes_json_afterwards(capfd):
    with logs.log_streams():
        logger = structlog.get_logger("test")
        logger.warning("early")
        logs.configure(json=True)
        logger.warning("late")
    early, late = capfd.readouterr().err.splitlines()
    assert "early" in early
    assert json.loads(late)["event"] == "late"


def test_dropped_lines_are_reported_in_the_format_of_the_log(capfd, monkeypatch):
    monkeypatch.setattr(streams, "MAX_BYTES", 300)
    with logs.log_streams():
        sys.stderr.write("x" * 300 + "\n")
        assert streams.lines_dropped() == 1
        sys.stderr.write("fits\n")
        logs.configure(json=True)
    assert streams.lines_dropped() == 0
    plain, fits = capfd.readouterr().err.splitlines()
    assert fits == "fits"
    assert "log lines dropped" in plain
    with logs.log_streams(json=True):
        sys.stderr.write("x" * 300 + "\n")
    event = json.loads(capfd.readouterr().err)
    assert (event["event"], event["lines"], event["level"]) == ("log lines dropped", 1, "warning")


def test_streams_that_are_the_same_file_keep_the_order_of_all_lines(tmp_path):
    code = (
        "import sys; from fairlead.base.telemetry.logs import log_streams\n"
        "with log_streams():\n"
        "    for n in range(500): print(n, file=(sys.stdout, sys.stderr)[n % 2])\n"
    )
    file = tmp_path / "both"
    with file.open("w") as both:
        subprocess.run([sys.executable, "-c", code], stdout=both, stderr=both, check=True)
    assert list(map(str, range(500))) == file.read_text().splitlines()


def test_blocked_terminal_gets_all_lines_when_it_is_read_again():
    ours, theirs = os.openpty()
    stream = os.fdopen(theirs, "w")
    redirected = streams.LogStreams(None, stream, notice=lambda lines: f"{lines} dropped\n")
    assert redirected.stderr.isatty()
    for number in range(3000):  # more than a terminal buffers while nothing reads it
        print(f"line {number:04}", file=redirected.stderr)
    received = b""
    while received.count(b"\n") < 3000:
        received += os.read(ours, 65536)
    assert redirected.close()
    assert b"line 2999" in received
    assert redirected.dropped == 0
    stream.close()
    os.close(ours)


def test_closed_standard_streams_do_not_become_sockets():
    code = (
        "import os, socket; from fairlead.base.telemetry.logs import log_streams\n"
        "with log_streams(): pass\n"
        "with socket.socket() as one: os._exit(0 if one.fileno() > 2 else 3)\n"
    )
    command = f'exec "{sys.executable}" -c "$0" <&- >&- 2>&-'
    assert subprocess.run(["/bin/sh", "-c", command, code], check=False).returncode == 0
