"""`fairlead ps`, `top` and `stop`: their output on a terminal and in a pipe."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from fairlead.server.cli import main
from fairlead.server.console.top import sparkline
from server.cli.terminal import Terminal

QUEUE = {
    "waiting": 5,
    "running": 3,
    "capacity": 100,
    "seats": 4,
    "mean_wait_s": 1.25,
    "oldest_wait_s": 1.25,
    "mean_service_s": 2.5,
}
MODELS = [
    {
        "model": "small",
        "kind": "engine",
        "state": "ready",
        "seats": 4,
        "busy": 3,
        "memory_bytes": 512 * 1024 * 1024,
        "engine": {"cache_usage": 0.25},
        "something_newer": [1, 2],
    },
    {"model": "large", "kind": "command", "state": "loading", "load": {"progress": 0.4, "stage": "weights"}},
]
NODES = [
    {"id": "engine:small", "kind": "engine", "remote": None, "state": "up", "seats": 4, "busy": 3},
    {
        "id": "big",
        "kind": "remote",
        "remote": {"url": "http://192.0.2.1"},
        "state": "down",
        "problem": "[red]no\x1b[2J answer",
    },
]
SNAPSHOT = {
    "queue": QUEUE,
    "tokens": {"generated_per_s": 41.7},
    "rejected": {"queue_full": 2, "displaced": 1},
    "cache_usage": 0.25,
    "models": MODELS,
    "nodes": NODES,
}


@pytest.fixture
def reporting_server(server):
    server.events = [("history", []), ("snapshot", SNAPSHOT), ("snapshot", SNAPSHOT)]
    return server


def test_ps_shows_what_top_shows(reporting_server, capsys):
    assert main(["ps", "--url", reporting_server.url]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:2] == [
        "3 running on 4 seats, 5 waiting of 100, 42 tokens/s",
        "oldest wait 1.2 s   mean service 2.5 s   rejected 3   cache 25%",
    ]
    small, large = (next(line for line in shown.splitlines() if name in line) for name in ("small", "large"))
    assert small.split() == ["small", "ready", "engine", "3/4", "512", "MiB", "25%"]
    assert large.split() == ["large", "loading", "40%", "weights", "command", "0/0", "-", "-"]
    assert "engine:small" not in shown


TENANTS = [
    {
        "tenant": "ana[red]\x1b[2J",
        "team": "red",
        "waiting": 2,
        "running": 1,
        "oldest_wait_s": 4.25,
        "minute": {"part": 0.5, "fair": 0.25},
        "day": {"part": 0.75, "fair": 0.5},
        "limits": [
            {"kind": "tokens_per_day", "subject": "user:ana", "limit": 100, "used": 90},
            {"kind": "concurrent", "subject": "key-1", "limit": 8, "used": 1},
        ],
        "something_newer": 1,
    }
]
REQUESTS = [
    {"id": "r-1", "state": "waiting", "tenant": "ana", "model": "small", "position": 3, "took_s": 4.25},
    {
        "id": "r-2",
        "state": "running",
        "tenant": "ana",
        "tokens": 40,
        "tokens_per_s": 19.7,
        "first_token_s": 0.5,
    },
    {"id": "r-3", "state": "ended", "tenant": "ben", "outcome": "node_failed", "problem": "it\x1b fell over"},
]


def test_ps_shows_the_tenants_and_requests_that_the_key_may_see(reporting_server, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    reporting_server.json_answers |= {
        "/tenants": {"data": TENANTS},
        "/v1/requests?limit=15": {"data": REQUESTS, "waiting": 1, "running": 1},
    }
    assert main(["ps", "--url", reporting_server.url, "--api-key", "sk-1"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    tenant = next(line for line in shown.splitlines() if "ana[red]" in line)
    assert tenant.split()[-11:] == [
        *("red", "2", "1", "4.2", "s", "50%", "0%", "75%", "50%", "tokens_per_day", "90%")
    ]
    first, second, third = (next(line for line in shown.splitlines() if f"r-{n}" in line) for n in (1, 2, 3))
    assert "waiting 3" in first
    assert second.split()[-6:] == ["0.0", "s", "0.5", "s", "40", "20"]
    assert "node_failed: it  fell over" in third
    assert reporting_server.keys == {"Bearer sk-1"}


def test_json_of_ps_has_tenants_and_requests(reporting_server, capsys):
    reporting_server.json_answers["/tenants"] = {"data": TENANTS}
    assert main(["ps", "--json", "--url", reporting_server.url]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tenants"][0]["waiting"] == 2
    assert document["requests"] == []  # the server does not have this route


def test_markup_and_control_characters_of_a_server_have_no_effect(reporting_server, capsys):
    assert main(["ps", "--url", reporting_server.url]) == 0
    shown = capsys.readouterr().out
    assert "[red]no [2J answer" in shown
    assert "\x1b" not in shown


def test_ps_shows_no_percentage_where_the_progress_of_a_load_is_not_known(reporting_server, capsys):
    loading = MODELS[1] | {"load": {"progress": None, "stage": "waiting for /health"}}
    reporting_server.events = [("snapshot", SNAPSHOT | {"models": [loading]})]
    assert main(["ps", "--url", reporting_server.url]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "large" in line)
    assert line.split() == ["large", "loading", "waiting", "for", "/health", "command", "0/0", "-", "-"]


def test_ps_prints_the_same_figures_as_json(reporting_server, capsys):
    assert main(["ps", "--url", reporting_server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**SNAPSHOT, "tenants": [], "requests": []}


@pytest.mark.parametrize("command", [["ps"], ["top"], ["stop", "small"]])
def test_unreachable_server_is_reported_in_one_line(command, unreachable_url, capsys):
    assert main([*command, "--url", unreachable_url]) == 1
    assert [f"fairlead: no server answers at {unreachable_url}"] == capsys.readouterr().err.splitlines()


def test_server_other_than_fairlead_is_reported(server, capsys):
    server.events = [("snapshot", ["nothing", "we", "know"])]
    assert main(["ps", "--url", server.url]) == 1
    assert "the server sent something that is not a snapshot" in capsys.readouterr().err
    server.events, server.event_rounds = [("something", {})], range(1)
    assert main(["ps", "--url", server.url]) == 1
    assert "/events did not answer as a Fairlead server does" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["ps"], ["top"], ["stop", "small"], ["run", "small", "hello"]])
def test_invalid_address_is_bad_usage(command, capsys):
    assert main([*command, "--url", "localhost:8000"]) == 2
    assert "--url" in capsys.readouterr().err.partition("\n")[0]


@pytest.mark.parametrize("force", [False, True])
def test_stop_unloads_the_model(reporting_server, capsys, force):
    assert main(["stop", "first", "--url", reporting_server.url, *(["--force"] if force else [])]) == 0
    assert [("/models/unload", {"model": "first", "force": force})] == reporting_server.posted
    assert capsys.readouterr().out == "first is unloaded.\n"


def test_stop_of_an_unknown_model_fails_with_the_servers_message(reporting_server, capsys):
    assert main(["stop", "third", "--url", reporting_server.url]) == 1
    assert capsys.readouterr().err == "fairlead: there is no such model\n"


COMMANDS = [["ps"], ["ps", "--json"], ["top", "--json"], ["stop", "first"], ["run", "first", "hello"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_options_for_the_address_and_the_key(reporting_server, command):
    reporting_server.event_rounds = range(1)
    main([*command, "--url", reporting_server.url, "--api-key", "sk-1"])
    assert reporting_server.keys == {"Bearer sk-1"}


@pytest.mark.parametrize("command", COMMANDS)
def test_server_and_its_key_may_come_from_the_environment(reporting_server, command, monkeypatch):
    reporting_server.event_rounds = range(1)
    monkeypatch.setenv("FAIRLEAD_URL", reporting_server.url)
    monkeypatch.setenv("FAIRLEAD_API_KEY", "ana=sk-2 sk-3")
    main(command)
    assert reporting_server.keys == {"Bearer sk-2"}


def test_top_redraws_in_place_until_q_is_typed(reporting_server):
    reporting_server.event_rounds = itertools.count()
    with Terminal(["top", "--url", reporting_server.url]) as terminal:
        shown = terminal.expect("small") + terminal.shown
        assert "5 of 100" in shown
        assert "3 of 4" in shown
        assert "42" in shown
        assert "rejected 3" in shown
        terminal.type("xq")
        reporting_server.released.set()  # `top` handles q with one of the next snapshots
        assert terminal.wait() == 0


def test_top_exits_with_0_on_ctrl_c(reporting_server):
    reporting_server.event_rounds = itertools.count()
    with Terminal(["top", "--url", reporting_server.url]) as terminal:
        terminal.expect("small")
        terminal.type("\x03")
        reporting_server.released.set()  # a Ctrl-C before the wait for input is handled with a snapshot
        assert terminal.wait() == 0


def lines_of(reporting_server, *arguments: str) -> list[str]:
    """Return what `top` writes into a pipe for four snapshots, after which the server ends the stream."""
    reporting_server.released.set()
    code = "import sys; from fairlead.server.cli import main; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, "top", "--url", reporting_server.url, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "has ended the stream" in ran.stderr
    return ran.stdout.splitlines()


def test_top_in_a_pipe_writes_a_line_for_each_snapshot(reporting_server):
    expected = "waiting 5  running 3/4  tokens/s 42  oldest wait 1.2 s  rejected 3"
    assert [expected] * 4 == lines_of(reporting_server)


def test_top_writes_each_snapshot_as_a_line_of_json(reporting_server):
    assert [json.loads(line) for line in lines_of(reporting_server, "--json")] == [SNAPSHOT] * 4


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([0, 0], "  "), ([0, 1, 4, 8], " ▁▄█"), ([0.001, 1], "▁█"), ([-1, 2], " █")],
)
def test_sparkline_has_a_bar_for_each_value(values, bars):
    assert bars == sparkline(values)
