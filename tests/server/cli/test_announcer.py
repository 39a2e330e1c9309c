"""The output of `serve`, on a terminal and elsewhere."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.telemetry.logs import log_streams
from fairlead.server.console.announcer import (
    LoadingLine,
    PlainAnnouncer,
    ReadyLine,
    open_announcer,
    read_line,
    report_error,
    report_warning,
)
from server.cli.terminal import Terminal

# Waits for a line of input, so that the test can first read the bar.
LOAD_AND_SERVE = """
import sys
from fairlead.server.console.announcer import open_announcer
from fairlead.base.telemetry.logs import log_streams
with log_streams(), open_announcer(key_needed=True) as announcer:
    announcer.loading("small", 0.25, "weights")
    sys.stdin.readline()
    announcer.loading("small", 1.0, "warm-up")
    announcer.ready("http://127.0.0.1:8000", ["small"])
    announcer.stopping()
"""
COLOR = re.compile(r"\x1b\[[\d;]*3[\d;]*m")


def test_log_gets_one_line_of_progress_for_each_load(capsys):
    announcer = open_announcer(key_needed=False)
    for model in ("small", "other", "small"):
        for percent in range(101):
            announcer.loading(model, percent / 100, "weights" if percent < 90 else "warm-up")
    lines = ["Loading small: 0 % weights", "Loading other: 0 % weights", "Loading small: 0 % weights"]
    assert capsys.readouterr().err.splitlines() == lines


def test_output_for_programs_has_a_line_for_each_stage_and_each_tenth(capsys):
    announcer = open_announcer(key_needed=False, in_detail=True)
    for percent in range(21):
        announcer.loading("small", percent / 100, "weights")
    announcer.loading("small", 0.2, "warm-up")
    expected = ["0 % weights", "10 % weights", "20 % weights", "20 % warm-up"]
    assert [f"Loading small: {line}" for line in expected] == capsys.readouterr().err.splitlines()


def test_only_the_ready_line_is_on_standard_output(capsys):
    announcer = open_announcer(key_needed=False)
    announcer.loading("small", 1.0, "weights")
    announcer.ready("http://127.0.0.1:8000", ["small", "other"])
    announcer.stopping()
    assert capsys.readouterr().out == (
        "Fairlead is ready: http://127.0.0.1:8000  serving small, other  "
        "(dashboard: http://127.0.0.1:8000/  API: http://127.0.0.1:8000/v1  "
        "chat: fairlead run  stop: Ctrl-C)\n"
    )


def test_ready_line_has_the_address_for_the_chat_unless_it_is_the_default(capsys):
    open_announcer(key_needed=False).ready("http://127.0.0.1:9000", ["small"])
    assert "chat: fairlead run --url http://127.0.0.1:9000  stop: Ctrl-C)" in capsys.readouterr().out


def test_with_a_json_log_all_output_is_events_on_standard_error(capfd):
    with log_streams(json=True), open_announcer(key_needed=False) as announcer:
        announcer.loading("small", 0.26, "weights")
        announcer.ready("http://127.0.0.1:8000", ["small"])
        announcer.failed("small", "no config.json")
        report_warning("a warning")
        report_error("an error")
    out, err = capfd.readouterr()
    events = [json.loads(line) for line in err.splitlines()]
    for event in events:
        del event["timestamp"]
    assert out == ""
    assert events == [
        {"event": "loading", "level": "info", "model": "small", "percent": 20, "stage": "weights"},
        {
            "event": "ready",
            "level": "info",
            "url": "http://127.0.0.1:8000",
            "models": ["small"],
            "dashboard": "http://127.0.0.1:8000/",
            "api": "http://127.0.0.1:8000/v1",
        },
        {"event": "cannot serve", "level": "error", "models": "small", "reason": "no config.json"},
        {"event": "a warning", "level": "warning"},
        {"event": "an error", "level": "error"},
    ]


def test_failure_is_printed_with_the_model_and_the_reason(capsys):
    open_announcer(key_needed=False).failed("small", "no config.json")
    assert capsys.readouterr().err == "fairlead: cannot serve small: no config.json\n"


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_printed_lines_can_be_parsed(capsys, fraction):
    announcer = PlainAnnouncer(key_needed=False)
    announcer.loading("a: 5 % model", fraction, "reading weights")
    announcer.ready("http://[::1]:8000", ["a model"])
    printed = capsys.readouterr()
    assert LoadingLine("a: 5 % model", fraction, "reading weights") == read_line(printed.err.rstrip("\n"))
    assert ReadyLine("http://[::1]:8000") == read_line(printed.out.rstrip("\n"))


def test_load_of_unknown_progress_has_a_line_without_a_percentage(capsys):
    announcer = open_announcer(key_needed=False)
    announcer.loading("small", None, "waiting for /health")
    announcer.loading("small", None, "waiting for /health")
    assert capsys.readouterr().err == "Loading small: waiting for /health\n"
    assert read_line("Loading small: waiting for /health") == LoadingLine(
        "small", None, "waiting for /health"
    )


def test_load_of_unknown_progress_is_an_event_without_a_percentage(capfd):
    with log_streams(json=True), open_announcer(key_needed=False) as announcer:
        announcer.loading("small", None, "waiting for /health")
    event = json.loads(capfd.readouterr().err)
    del event["timestamp"]
    assert event == {"event": "loading", "level": "info", "model": "small", "stage": "waiting for /health"}


@given(st.text())
def test_any_other_line_is_not_parsed(line):
    assert read_line(line) is None


def test_terminal_gets_a_bar_and_then_a_hint():
    with Terminal([], code=LOAD_AND_SERVE) as terminal:
        assert COLOR.search(terminal.expect("25%") + terminal.shown)
        terminal.type("\n")
        terminal.expect("Fairlead is ready: http://127.0.0.1:8000  serving small")
        terminal.expect(
            'curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer $FAIRLEAD_API_KEY"'
        )
        terminal.expect("Fairlead is stopping.")
        assert terminal.wait() == 0


def test_bar_has_no_percentage_until_the_progress_is_known():
    code = LOAD_AND_SERVE.replace("0.25", "None", 1).replace("1.0", "0.5", 1)
    code = code.replace("announcer.ready", "sys.stdin.readline()\n    announcer.ready")
    with Terminal([], code=code) as terminal:
        shown = terminal.expect("weights")
        terminal.type("\n")
        shown += terminal.expect("50%")
        assert set(re.findall(r"\d+%", shown)) <= {"50%"}
        terminal.type("\n")
        assert terminal.wait() == 0


def test_no_color_removes_colors():
    with Terminal([], code=LOAD_AND_SERVE, NO_COLOR="1") as terminal:
        shown = terminal.expect("25%")
        terminal.type("\n")
        shown += terminal.expect("Fairlead is ready")
        assert not COLOR.search(shown)
