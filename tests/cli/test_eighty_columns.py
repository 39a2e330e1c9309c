"""What people look at fits a terminal of eighty columns: nothing is wider, and no row is broken."""

import itertools
import json
import re

import pytest

from cli.terminal import Terminal
from cli.test_looking import MODELS, PICTURE, QUEUE
from fairlead.console.top import Picture, remember

COLUMNS = 80
LONG = "a-model-with-a-name-as-long-as-they-are-these-days"
REASON = "it was given up after three tries, each of which ended in the same way: there is not enough memory"
HOME = "\x1b[H"  # where each picture of `top` begins
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[=>])")


def shown(text: str) -> list[str]:
    """The lines of what a program wrote on a terminal, also those written over others, without colours."""
    return [line.rstrip() for line in re.split("\r*\n|\r", ESCAPES.sub("", text))]


def look(*arguments: str, code: int = 0) -> list[str]:
    with Terminal(arguments, COLUMNS=str(COLUMNS), LINES="40") as terminal:
        assert code == terminal.wait()
        return shown(terminal.shown)


def assert_fits(lines: list[str]) -> None:
    assert [] == [line for line in lines if len(line) > COLUMNS]


@pytest.fixture
def telling(server):
    """A server with long names, and a reason that no column can hold."""
    models = [*MODELS, {"model": LONG, "kind": "engine", "state": "failed", "problem": REASON}]
    pictures = [PICTURE | {"models": models, "at_s": at_s} for at_s in range(200)]
    server.events = [("snapshot", picture) for picture in pictures]
    return server


def assert_is_a_table_with_reasons_below(lines: list[str]) -> None:
    assert_fits(lines)
    rows = [line for line in lines if line.startswith((" small", " large", f" {LONG[:12]}", " big"))]
    states = [line.split()[1] for line in rows[:4]]
    assert ["ready", "loading", "failed", "down"] == states
    text = " ".join(line.strip() for line in lines)
    assert f"{LONG}: {REASON}" in text


def test_ps(telling):
    lines = look("ps", "--url", telling.url)
    assert_is_a_table_with_reasons_below(lines)
    assert "3 running on 4 seats, 5 waiting of 100" in lines[0]


def test_top(telling):
    telling.rounds = itertools.count()
    with Terminal(["top", "--url", telling.url], COLUMNS=str(COLUMNS), LINES="40") as terminal:
        for _ in range(150):
            terminal.expect(HOME)
        page = shown(terminal.expect(HOME))
        terminal.type("q")
        telling.released.set()
        assert 0 == terminal.wait()
    assert_is_a_table_with_reasons_below(page)
    (waiting,) = [line for line in page if line.startswith("waiting")]
    assert COLUMNS == len(waiting)  # as much of the past as there is room for


def test_doctor(tmp_path):
    file = tmp_path / ("a-name-that-is-long-" * 5 + ".yaml")
    file.write_text("port: 0\nmodels: {m: {cmd: 'x ${PORT}'}}\nlogToStdout: both\n")
    lines = look("doctor", "--config", str(file))
    assert_fits(lines)
    assert "A server will run here." == lines[-2]
    names = [line[2:16].strip() for line in lines[:-2]]
    assert {"Python", "torch", "memory", "port", "configuration"} < set(names), lines
    found = {line[17:18] for line in lines[:-2]}  # all that is found is below each other
    assert " " not in found


def test_config_check(tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("models: {m: {cmd: 'x ${PORT}'}}\n")
    lines = look("config", "check", str(file))
    assert f"{file} is good." == lines[0]
    assert "  models: m" == lines[1]
    file.write_text("models:\n  m: {cmd: 'x ${PORT}', tll: 3}\n")
    assert [f"{file}:2: models.m.tll: is no setting; did you mean ttl?"] == look(
        "config", "check", str(file), code=2
    )[:-1]


def test_run(server):
    with Terminal(["run", "--url", server.url], COLUMNS=str(COLUMNS)) as terminal:
        head = terminal.expect("> ")
        assert_fits(shown(head))
        terminal.type("well?\r")
        answer = shown(terminal.expect("> "))
        assert_fits(answer)
        assert "Hello there" == answer[-2]
        terminal.type("\x04")
        assert 0 == terminal.wait()


def test_the_past_has_a_place_a_second_and_the_last_picture_of_it_is_kept():
    past: list[Picture] = []
    for at_s in (1.0, 1.3, 1.9, 2.0, 4.5):
        remember(past, Picture(at_s=at_s))
    assert [1.9, 2.0, 4.5] == [picture.at_s for picture in past]


@pytest.mark.parametrize(
    "arguments",
    [["ps", "--jsn"], ["top", "now"], ["run", "--json"], ["doctor", "--port", "x"], ["config", "check"]],
)
def test_usage_that_is_wrong_is_told_and_exits_with_2(arguments):
    lines = look(*arguments, code=2)
    assert lines[0].startswith("fairlead: ")
    assert "Try 'fairlead --help'." in lines


def test_json_is_json_on_a_terminal_too(telling, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("port: 1\n")
    assert QUEUE == json.loads("\n".join(look("ps", "--url", telling.url, "--json")))["queue"]
    assert 1 == json.loads("\n".join(look("config", "check", str(file), "--json")))["port"]
