"""The log: one line a request, readable or JSON, of the level asked for, without names of people."""

import json
import logging

import pytest
import structlog

from fairlead.config import ApiKey, Config
from fairlead.job import Passthrough, Relay
from fairlead.telemetry import logs
from fairlead.telemetry.journal import Journal
from fairlead.telemetry.tenants import TenantNames
from telemetry.sources import journey


@pytest.fixture(autouse=True)
def _as_before():
    """Leave structlog as the other tests expect it."""
    earlier = structlog.get_config()
    yield
    structlog.reset_defaults()
    structlog.configure(**earlier)


@pytest.fixture
def write(monkeypatch, capsys):
    """Configure the log and return what it says of a journey, or of a function that logs."""

    def write(told=None, *, config: Config | None = None, call=None, **options) -> str:
        structlog.reset_defaults()
        logs.configure(**{"json": False, **options})
        monkeypatch.setattr("fairlead.telemetry.journal.logger", structlog.get_logger("test"))
        if told is not None:
            Journal(TenantNames(config or Config(models=())))(told)
        if call is not None:
            call(structlog.get_logger("test"))
        return capsys.readouterr().err

    return write


def test_a_request_is_one_line_with_all_that_is_known_of_it(write):
    line = write(journey("ana"), json=True, config=Config(models=(), tenant_names="plain"))
    assert 1 == line.count("\n")
    said = json.loads(line)
    assert said.pop("timestamp").endswith("Z")
    assert {
        "event": "request",
        "level": "info",
        "request_id": "r-1",
        "outcome": "success",
        "model": "m",
        "tenant": "ana",
        "node": "engine:m",
        "waited_s": 1.0,
        "first_token_s": 3.0,
        "took_s": 7.0,
        "prompt_tokens": 3,
        "tokens": 5,
    } == said


def test_on_a_terminal_it_is_readable_and_coloured_and_elsewhere_not_coloured(write, monkeypatch):
    plain = write(journey())
    assert "request_id=r-1" in plain
    assert "\x1b" not in plain
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "\x1b[" in write(journey())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in write(journey())


@pytest.mark.parametrize(
    ("outcome", "level"),
    [
        ("success", "info"),
        ("client_left", "info"),
        ("cancelled", "info"),
        ("queue_full", "warning"),
        ("queue_timeout", "warning"),
        ("node_failed", "error"),
        ("internal_error", "error"),
    ],
)
def test_who_was_turned_away_is_a_warning_and_what_failed_an_error(write, outcome, level):
    assert level == json.loads(write(journey(outcome=outcome), json=True))["level"]


@pytest.mark.parametrize("outcome", ["queue_full", "displaced", "queue_timeout", "request_timeout"])
def test_refused_job_is_logged_with_method_path_and_client(write, outcome):
    told = journey(outcome=outcome, path="/v1/chat/completions", client="192.0.2.7")
    said = json.loads(write(told, json=True))
    assert (said["method"], said["path"], said["client"]) == ("POST", "/v1/chat/completions", "192.0.2.7")


def test_refused_job_below_upstream_is_logged_with_its_own_method(write):
    relay = Relay("/x", b"", passthrough=Passthrough("DELETE", ()))
    told = journey(outcome="queue_full", path="/upstream/m/x", relay=relay)
    said = json.loads(write(told, json=True))
    assert (said["method"], said["path"]) == ("DELETE", "/upstream/m/x")


def test_a_job_that_never_had_a_seat_waited_all_its_time_and_has_no_node(write):
    told = journey(outcome="queue_timeout", granted_s=None, first_delta_s=None, node=None, attempts=0)
    said = json.loads(write(told, json=True))
    assert (7.0, None, None) == (said["waited_s"], said["first_token_s"], said["node"])


def test_attempts_are_named_when_there_was_more_than_one(write):
    assert 2 == json.loads(write(journey(attempts=2), json=True))["attempts"]
    assert "attempts" not in json.loads(write(journey(), json=True))


@pytest.mark.parametrize("level", ["debug", "info", "warn", "error"])
def test_only_what_is_as_bad_as_the_level_is_written(write, level):
    def speak(logger) -> None:
        logger.debug("one")
        logger.info("two")
        logger.warning("three")
        logger.error("four")

    written = write(call=speak, level=level)
    expected = ["one", "two", "three", "four"][["debug", "info", "warn", "error"].index(level) :]
    assert expected == [word for word in ("one", "two", "three", "four") if word in written]
    assert logging.getLogger().level == logging.WARNING  # nobody else's log is touched


@pytest.mark.parametrize("json_lines", [False, True])
def test_what_a_client_sends_can_neither_begin_a_line_nor_command_a_terminal(write, json_lines):
    told = journey("a\nb\x1b[2J", request_id="x\x9b31m\r")
    line = write(told, json=json_lines, config=Config(models=(), tenant_names="plain"))
    assert (1, True) == (line.count("\n"), line.endswith("\n"))
    assert not any(sign in line for sign in ("\x1b", "\x9b", "\r"))


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_traceback_says_where_but_not_what_was_in_the_variables(write, json_lines):
    def fail(logger) -> None:
        api_key = "-".join(["sk", "secret"] * 2)  # never whole in the source, which tracebacks may show
        try:
            int(f"{len(api_key)} apples")
        except ValueError:
            logger.exception("request failed")

    written = write(call=fail, json=json_lines)
    assert "in fail" in written
    assert "invalid literal" in written
    assert "sk-secret-sk" not in written


# Tenants --------------------------------------------------------------------------------------------


def test_a_tenant_is_shown_as_a_hash_that_stays_the_same_and_does_not_say_who_it_is():
    names = TenantNames(Config(models=()))
    assert names.shown("address/192.0.2.7") == names.shown("address/192.0.2.7")
    assert names.shown("address/192.0.2.7") != names.shown("address/192.0.2.8")
    assert "192" not in names.shown("address/192.0.2.7") or 12 == len(names.shown("address/192.0.2.7"))


def test_nobody_finds_an_address_by_hashing_them_all():
    shown = {TenantNames(Config(models=())).shown("address/192.0.2.7") for _ in range(3)}
    assert 3 == len(shown)


def test_with_api_keys_a_tenant_is_called_the_same_after_a_restart():
    config = Config(models=(), api_keys=(ApiKey("one"), ApiKey("two")))
    other = Config(models=(), api_keys=(ApiKey("one"), ApiKey("three")))
    assert TenantNames(config).shown("ana") == TenantNames(config).shown("ana")
    assert TenantNames(config).shown("ana") != TenantNames(other).shown("ana")


def test_a_tenant_with_half_a_character_in_its_name_has_a_hash_too():
    assert 12 == len(TenantNames(Config(models=())).shown("\ud800"))


def test_a_line_that_nobody_can_read_any_more_is_no_error(write, monkeypatch):
    class Broken:
        def write(self, _text):
            raise BrokenPipeError

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stderr", Broken())
    assert "" == write(journey())
