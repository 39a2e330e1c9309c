"""The log: one line per request, as text or JSON, of the configured level, without names of people."""

import importlib
import json
import logging
import re

import pytest
import structlog

from fairlead.base.config import ApiKey, Config
from fairlead.base.job import Passthrough, Relay
from fairlead.base.telemetry import logs
from fairlead.generation.metrics import tenants
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.request_log import RequestLog
from generation.metrics.sources import timeline


@pytest.fixture(autouse=True)
def _restore_structlog():
    """Restore the configuration of structlog."""
    earlier = structlog.get_config()
    yield
    structlog.reset_defaults()
    structlog.configure(**earlier)


@pytest.fixture
def write(monkeypatch, capsys):
    """Return a function that configures the log, logs a timeline or runs a call, and returns the output."""

    def write(job_timeline=None, *, config: Config | None = None, call=None, **options) -> str:
        structlog.reset_defaults()
        logs.configure(**{"json": False, **options})
        monkeypatch.setattr("fairlead.generation.request_log.logger", structlog.get_logger("test"))
        if job_timeline is not None:
            log = RequestLog(TenantNames(config or Config(models=())))
            log.add(job_timeline, None)
            log.flush()
        if call is not None:
            call(structlog.get_logger("test"))
        return capsys.readouterr().err

    return write


def test_request_is_logged_as_one_line_with_all_its_fields(write):
    line = write(timeline("ana"), json=True, config=Config(models=(), tenant_names="plain"))
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
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
    }


def test_log_is_colored_only_on_a_terminal_without_no_color(write, monkeypatch):
    plain = write(timeline())
    assert "request_id=r-1" in plain
    assert "\x1b" not in plain
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "\x1b[" in write(timeline())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in write(timeline())


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
def test_refused_job_is_a_warning_and_failed_job_an_error(write, outcome, level):
    assert level == json.loads(write(timeline(outcome=outcome), json=True))["level"]


@pytest.mark.parametrize("outcome", ["queue_full", "displaced", "queue_timeout", "request_timeout"])
def test_refused_job_is_logged_with_method_path_and_client(write, outcome):
    job_timeline = timeline(outcome=outcome, path="/v1/chat/completions", client="192.0.2.7")
    entry = json.loads(write(job_timeline, json=True))
    assert (entry["method"], entry["path"], entry["client"]) == ("POST", "/v1/chat/completions", "192.0.2.7")


def test_refused_job_of_upstream_is_logged_with_its_method(write):
    relay = Relay("/x", b"", passthrough=Passthrough("DELETE", ()))
    job_timeline = timeline(outcome="queue_full", path="/upstream/m/x", relay=relay)
    entry = json.loads(write(job_timeline, json=True))
    assert (entry["method"], entry["path"]) == ("DELETE", "/upstream/m/x")


def test_job_without_a_seat_has_only_a_waiting_time_and_no_node(write):
    job_timeline = timeline(
        outcome="queue_timeout", granted_s=None, first_delta_s=None, node=None, attempts=0
    )
    entry = json.loads(write(job_timeline, json=True))
    assert (entry["waited_s"], entry["first_token_s"], entry["node"]) == (7.0, None, None)


def test_attempts_are_logged_only_if_more_than_one(write):
    assert json.loads(write(timeline(attempts=2), json=True))["attempts"] == 2
    assert "attempts" not in json.loads(write(timeline(), json=True))


@pytest.mark.parametrize("level", ["debug", "info", "warn", "error"])
def test_only_events_of_at_least_the_level_are_written(write, level):
    def log_all_levels(logger) -> None:
        logger.debug("one")
        logger.info("two")
        logger.warning("three")
        logger.error("four")

    written = write(call=log_all_levels, level=level)
    expected = ["one", "two", "three", "four"][["debug", "info", "warn", "error"].index(level) :]
    assert expected == [word for word in ("one", "two", "three", "four") if word in written]
    assert logging.getLogger().level == logging.WARNING  # the level of libraries is not changed


@pytest.mark.parametrize("json_lines", [False, True])
def test_client_text_can_neither_begin_a_line_nor_control_a_terminal(write, json_lines):
    job_timeline = timeline("a\nb\x1b[2J", request_id="x\x9b31m\r")
    line = write(job_timeline, json=json_lines, config=Config(models=(), tenant_names="plain"))
    assert (line.count("\n"), line.endswith("\n")) == (1, True)
    assert not any(sign in line for sign in ("\x1b", "\x9b", "\r"))


@pytest.mark.parametrize("json_lines", [False, True])
def test_traceback_has_locations_but_no_values_of_variables(write, json_lines):
    def fail(logger) -> None:
        api_key = "-".join(["sk", "secret"] * 2)  # joined at run time, because tracebacks show source lines
        try:
            int(f"{len(api_key)} apples")
        except ValueError:
            logger.exception("request failed")

    written = write(call=fail, json=json_lines)
    assert "in fail" in written
    assert "invalid literal" in written
    assert "sk-secret-sk" not in written


# Tenants --------------------------------------------------------------------------------------------


def test_tenant_is_shown_as_a_stable_hash_that_hides_its_name():
    names = TenantNames(Config(models=()))
    assert names.shown("address/192.0.2.7") == names.shown("address/192.0.2.7")
    assert names.shown("address/192.0.2.7") != names.shown("address/192.0.2.8")
    assert re.fullmatch("[0-9a-f]{12}", names.shown("address/192.0.2.7"))


def test_without_api_keys_the_key_of_the_hashes_is_random():
    shown = set()
    for _ in range(3):  # as in three processes
        names = importlib.reload(tenants).TenantNames
        (found,) = {names(Config(models=())).shown("address/192.0.2.7") for _ in range(2)}
        shown.add(found)
    assert len(shown) == 3


def test_with_api_keys_the_hash_of_a_tenant_survives_a_restart():
    config = Config(models=(), api_keys=(ApiKey("one"), ApiKey("two")))
    other = Config(models=(), api_keys=(ApiKey("one"), ApiKey("three")))
    assert TenantNames(config).shown("ana") == TenantNames(config).shown("ana")
    assert TenantNames(config).shown("ana") != TenantNames(other).shown("ana")


def test_tenant_name_with_a_lone_surrogate_has_a_hash():
    assert len(TenantNames(Config(models=())).shown("\ud800")) == 12


def test_broken_pipe_of_the_log_is_not_an_error(write, monkeypatch):
    class Broken:
        def write(self, _text):
            raise BrokenPipeError

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stderr", Broken())
    assert write(timeline()) == ""
