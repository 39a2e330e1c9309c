"""`fairlead logs`: the earlier output of a model's processes, and with `--follow` their further output."""

import signal
from contextlib import suppress

import pytest

from fairlead.server.cli import main
from fairlead.server.console.client import Client
from server.cli.terminal import Terminal


def test_logs_prints_the_lines_that_the_server_has(server, capsys):
    server.texts = {"/models/small/logs": ["loading\n\nready\n"]}
    assert main(["logs", "small", "--url", server.url, "--api-key", "sk-1"]) == 0
    assert capsys.readouterr().out == "loading\n\nready\n"
    assert server.keys == {"Bearer sk-1"}


def test_name_with_a_slash_is_escaped(server, capsys):
    server.texts = {"/models/org%2Fsmall/logs": ["ready\n"]}
    assert main(["logs", "org/small", "--url", server.url]) == 0
    assert capsys.readouterr().out == "ready\n"


def test_control_characters_in_a_log_are_replaced(server, capsys):
    server.texts = {"/models/small/logs": ["a\x1b[2Jb\n"]}
    assert main(["logs", "small", "--url", server.url]) == 0
    assert capsys.readouterr().out == "a [2Jb\n"


def test_empty_log_is_reported(server, capsys):
    server.texts = {"/models/small/logs": [""]}
    assert main(["logs", "small", "--url", server.url]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "fairlead: the processes of small have printed nothing.\n")


def test_unknown_model_fails_with_the_servers_message(server, capsys):
    assert main(["logs", "none", "--url", server.url]) == 1
    assert capsys.readouterr().err == "fairlead: there is no model logs here\n"


@pytest.mark.parametrize("option", ["-f", "--follow"])
def test_follow_prints_new_lines_until_ctrl_c(server, option):
    server.texts = {"/models/small/logs?follow=true": ["old\n", "new\n", ""]}
    with Terminal(["logs", "small", option, "--url", server.url]) as terminal:
        terminal.expect("old")
        terminal.interrupt()
        assert terminal.wait() == 0


def test_follow_ends_at_ctrl_c_even_if_python_ignores_the_exception(server, monkeypatch, capsys):
    def interrupted(line: str, **_options: bool) -> str:
        with suppress(KeyboardInterrupt):  # as in a destructor
            signal.raise_signal(signal.SIGINT)
        return line

    server.texts = {
        "/models/small/logs?follow=true": ["old\n", "new\n"]
    }  # the second piece is sent when released
    monkeypatch.setattr("fairlead.server.console.status.printable", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main(["logs", "small", "-f", "--url", server.url]) == 0
    assert capsys.readouterr().out == "old\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_line_ends_follow(server, monkeypatch, capsys):
    class Interrupted(Client):
        def lines(self, path: str, *, endless: bool):
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return super().lines(path, endless=endless)

    server.texts = {"/models/small/logs?follow=true": ["", "new\n"]}
    monkeypatch.setattr("fairlead.server.console.client.Client", Interrupted)
    assert main(["logs", "small", "-f", "--url", server.url]) == 0
    assert capsys.readouterr().out == ""


def test_follow_fails_when_the_server_ends_it(server, capsys):
    server.texts = {"/models/small/logs?follow=true": ["old\n", "new\n"]}
    server.released.set()
    assert main(["logs", "small", "-f", "--url", server.url]) == 1
    printed = capsys.readouterr()
    assert printed.out == "old\nnew\n"
    message = "has ended the log of small: it is stopping, or the model was removed"
    assert printed.err == f"fairlead: {server.url} {message}\n"


def test_unreachable_server_is_reported_in_one_line(unreachable_url, capsys):
    assert main(["logs", "small", "--url", unreachable_url]) == 1
    assert capsys.readouterr().err == f"fairlead: no server answers at {unreachable_url}\n"
