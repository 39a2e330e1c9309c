"""Output fits a terminal of eighty columns: no line is wider, and no row is wrapped."""

import itertools
import json
import re
from pathlib import Path

import pytest

from fairlead.server.console.status import ServerView
from fairlead.server.console.top import remember
from server.cli.terminal import Terminal
from server.cli.test_looking import MODELS, QUEUE, SNAPSHOT

COLUMNS = 80
LONG = "a-model-with-a-name-as-long-as-they-are-these-days"
REASON = "it was given up after three tries, each of which ended in the same way: there is not enough memory"
HOME = "\x1b[H"  # each snapshot in `top` begins with it
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[=>])")


def shown(text: str) -> list[str]:
    """Return all lines that a program wrote to a terminal, without escape codes; also overwritten ones."""
    return [line.rstrip() for line in re.split("\r*\n|\r", ESCAPES.sub("", text))]


def run(*arguments: str, code: int = 0) -> list[str]:
    with Terminal(arguments, COLUMNS=str(COLUMNS), LINES="40") as terminal:
        assert code == terminal.wait()
        return shown(terminal.shown)


def assert_fits(lines: list[str]) -> None:
    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.fixture
def reporting_server(server):
    """Return a server with a long model name and a long reason for a failed load."""
    models = [*MODELS, {"model": LONG, "kind": "engine", "state": "failed", "problem": REASON}]
    snapshots = [SNAPSHOT | {"models": models, "at_s": at_s} for at_s in range(200)]
    server.events = [("snapshot", snapshot) for snapshot in snapshots]
    return server


def assert_is_a_table_with_reasons_below(lines: list[str]) -> None:
    assert_fits(lines)
    rows = [line for line in lines if line.startswith((" small", " large", f" {LONG[:12]}", " big"))]
    states = [line.split()[1] for line in rows[:4]]
    assert states == ["ready", "loading", "failed", "down"]
    text = " ".join(line.strip() for line in lines)
    assert f"{LONG}: {REASON}" in text


def test_ps_fits_with_the_reasons_below_its_table(reporting_server):
    lines = run("ps", "--url", reporting_server.url)
    assert_is_a_table_with_reasons_below(lines)
    assert "3 running on 4 seats, 5 waiting of 100" in lines[0]


def test_top_fits_and_fills_its_lines_with_history(reporting_server):
    reporting_server.event_rounds = itertools.count()
    with Terminal(["top", "--url", reporting_server.url], COLUMNS=str(COLUMNS), LINES="40") as terminal:
        for _ in range(150):
            terminal.expect(HOME)
        page = shown(terminal.expect(HOME))
        terminal.type("q")
        reporting_server.released.set()
        assert terminal.wait() == 0
    assert_is_a_table_with_reasons_below(page)
    (waiting,) = [line for line in page if line.startswith("waiting")]
    assert len(waiting) == COLUMNS  # as much history as fits


def test_doctor_fits_with_its_findings_in_a_column(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the lines are those of a path of this length
    file = Path("a-name-that-is-long-" * 5 + ".yaml")
    file.write_text("port: 0\nmodels: {m: {cmd: 'x ${PORT}'}}\nlogToStdout: both\n")
    lines = run("doctor", "--config", str(file))
    assert_fits(lines)
    assert lines[-2] == "A server will run here."
    names = [line[2:16].strip() for line in lines[:-2]]
    assert {"Python", "torch", "memory", "port", "configuration"} < set(names), lines
    found = {line[17:18] for line in lines[:-2]}  # the findings are aligned in a column
    assert " " not in found


def test_config_check_wraps_no_line(tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("models: {m: {cmd: 'x ${PORT}'}}\n")
    lines = run("config", "check", str(file))
    assert f"{file} is good." == lines[0]
    assert lines[1] == "  models: m"
    file.write_text("models:\n  m: {cmd: 'x ${PORT}', tll: 3}\n")
    assert [f"{file}:2: models.m.tll: is not a setting; did you mean ttl?"] == run(
        "config", "check", str(file), code=2
    )[:-1]


def test_run_fits(server):
    with Terminal(["run", "--url", server.url], COLUMNS=str(COLUMNS)) as terminal:
        head = terminal.expect("> ")
        assert_fits(shown(head))
        terminal.type("well?\r")
        answer = shown(terminal.expect("> "))
        assert_fits(answer)
        assert answer[-2] == "Hello there"
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_history_keeps_the_last_snapshot_of_each_second():
    past: list[ServerView] = []
    for at_s in (1.0, 1.3, 1.9, 2.0, 4.5):
        remember(past, ServerView(at_s=at_s))
    assert [snapshot.at_s for snapshot in past] == [1.9, 2.0, 4.5]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["ps", "--jsn"], " ps"),
        (["top", "now"], " top"),
        (["run", "--json"], " run"),
        (["doctor", "--port", "x"], " doctor"),
        (["config", "check"], " config check"),
        (["sevre"], ""),
    ],
)
def test_bad_usage_is_reported_with_the_commands_own_help_and_exits_with_2(arguments, command):
    lines = run(*arguments, code=2)
    assert lines[0].startswith("fairlead: ")
    assert f"Try 'fairlead{command} --help'." in lines


def test_json_is_json_on_a_terminal_too(reporting_server, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("port: 1\n")
    assert json.loads("\n".join(run("ps", "--url", reporting_server.url, "--json")))["queue"] == QUEUE
    assert json.loads("\n".join(run("config", "check", str(file), "--json")))["port"] == 1
