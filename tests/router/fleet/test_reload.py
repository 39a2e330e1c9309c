"""What a running server does with a configuration file that changes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import trio
from msgspec.structs import replace
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from fairlead.base.config import NO_OPERATOR, ApiKey, Config, ConfigError, QueueConfig
from fairlead.base.errors import LoadFailed
from fairlead.router.fleet.reload import FIXED, POLL_INTERVAL_S, ConfigSource, watch_config

FIRST = Config(models=(), port=1)
# The settings that a reload changes: in the fleet, except for the keys.
APPLIED = (
    *("models", "swap", "priorities", "nodes", "health_check", "selectors", "api_keys"),
    *("include_aliases_in_list", "send_loading_state", "teams", "budgets", "prices"),
)
CHANGED = Config(models=(), port=1, priorities={"m": 2})


class Server:
    """Applies each configuration, unless `refusing` is set, which it raises."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.refusing: Exception | None = None
        self.changed = trio.Event()

    async def change(self, config: Config) -> None:
        self.changed.set()
        if self.refusing is not None:
            raise self.refusing
        self.configs.append(config)


class Writing:
    """A configuration which a test can change or make fail."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcome: Config | Exception = FIRST

    def read(self, _running: Config | None = None) -> Config:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def writing(tmp_path: Path) -> Writing:
    file = tmp_path / "fairlead.yaml"
    file.write_text("one")
    return Writing(file)


async def read_again(done: Callable[[], object]) -> None:
    """Send SIGHUP to this process; wait until `done` shows that it was handled."""
    os.kill(os.getpid(), signal.SIGHUP)
    with trio.fail_after(60):
        while not done():  # noqa: ASYNC110  # a thread reads the file, in real time
            await trio.sleep(0.001)
    await wait_all_tasks_blocked()


async def test_sighup_reloads_the_file(writing, nursery):
    server = Server()
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    assert server.configs == []
    writing.outcome = CHANGED
    await read_again(lambda: server.configs)
    assert [writing.outcome] == server.configs


async def test_reload_that_leaves_no_operator_is_warned_about_once(writing, nursery):
    server = Server()
    operator, user = ApiKey("sk-1", role="operator"), ApiKey("sk-2")
    first = replace(FIRST, api_keys=(operator, user))
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), first, server.change)
    await wait_all_tasks_blocked()
    with capture_logs() as log:
        for number, keys in enumerate([(operator,), (user,), (user, ApiKey("sk-3"))], 1):
            writing.outcome = replace(FIRST, api_keys=keys)
            await read_again(lambda: len(server.configs) == number)  # noqa: B023
    assert [line["log_level"] for line in log if line["event"] == NO_OPERATOR] == ["warning"]


@pytest.mark.parametrize(
    "wrong",
    [
        ConfigError("fairlead.yaml:3: port: must be a number\nfairlead.yaml:4: host: is empty"),
        OSError("gone"),
    ],
)
async def test_wrong_file_changes_nothing_and_the_reason_is_logged(writing, nursery, wrong):
    server = Server()
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    writing.outcome = wrong
    with structlog.testing.capture_logs() as logs:
        await read_again(lambda: logs)
    assert str(wrong).splitlines() == [line["reason"] for line in logs]
    assert server.configs == []
    writing.outcome = FIRST
    await read_again(lambda: server.configs)
    assert server.configs == [FIRST]


async def test_missing_file_is_logged_with_a_readable_reason(writing, nursery):
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, Server().change)
    await wait_all_tasks_blocked()
    writing.outcome = FileNotFoundError(2, "No such file or directory", str(writing.file))
    with structlog.testing.capture_logs() as logs:
        await read_again(lambda: logs)
    assert [(str(writing.file), "No such file or directory")] == [
        (line["file"], line["reason"]) for line in logs
    ]


async def test_configuration_that_cannot_be_applied_is_logged_with_the_reason(writing, nursery):
    server = Server()
    server.refusing = LoadFailed("models.new: there are no weights")
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    with structlog.testing.capture_logs() as logs:
        await read_again(lambda: logs)
    assert [line["reason"] for line in logs] == ["models.new: there are no weights"]


@pytest.mark.parametrize(
    "bug",
    [ValueError("x"), RecursionError(), MemoryError(), KeyError("x"), ExceptionGroup("", [TypeError()])],
)
@pytest.mark.parametrize("where", ["read", "change"])
async def test_reload_works_after_any_failure_of_the_one_before(writing, nursery, bug, where):
    server = Server()
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    if where == "read":
        writing.outcome = bug
    else:
        server.refusing = bug
    with structlog.testing.capture_logs() as logs:
        await read_again(lambda: logs)
    (line,) = logs
    assert (line["event"], line["file"]) == ("configuration not reloaded", str(writing.file))
    assert line["exc_info"] is not None
    writing.outcome, server.refusing = CHANGED, None
    await read_again(lambda: server.configs)
    assert server.configs == [writing.outcome]


async def test_settings_that_need_a_restart_are_named_each_time_they_change(writing, nursery):
    server = Server()
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    writing.outcome = Config(models=(), port=2, queue=QueueConfig(capacity=3), request_timeout_s=5)
    with structlog.testing.capture_logs() as logs:
        await read_again(lambda: server.configs)
        await read_again(lambda: len(server.configs) == 2)
    (warning,) = [line["settings"] for line in logs if line["log_level"] == "warning"]
    assert warning == ["port", "queue.capacity", "requestTimeout"]


async def test_setting_restored_to_its_first_value_needs_no_restart(writing, nursery):
    server = Server()
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    with structlog.testing.capture_logs() as logs:
        for count, config in enumerate((Config(models=(), port=2), FIRST), start=1):
            writing.outcome = config
            await read_again(lambda count=count: len(server.configs) == count)
    assert [line["settings"] for line in logs if line["log_level"] == "warning"] == [["port"]]


async def test_setting_that_needs_a_restart_keeps_its_first_value(writing, nursery):
    server = Server()
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    for port in (2, 3):
        writing.outcome = Config(models=(), port=port, priorities={"m": port})
        await read_again(lambda count=port - 1: len(server.configs) == count)
    assert server.configs == [Config(models=(), port=1, priorities={"m": port}) for port in (2, 3)]


async def test_key_of_a_class_that_only_a_restart_would_add_is_refused_by_name(writing, nursery):
    server = Server()
    nursery.start_soon(watch_config, ConfigSource(writing.file, writing.read), FIRST, server.change)
    await wait_all_tasks_blocked()
    queue = QueueConfig(classes=("vip", "usual"))
    writing.outcome = Config(models=(), port=1, queue=queue, api_keys=(ApiKey("k", priority="vip"),))
    with structlog.testing.capture_logs() as logs:
        await read_again(lambda: logs)
    assert [line["reason"] for line in logs] == ["apiKeys[0].priority: must be one of high, normal, low"]
    assert server.configs == []


def test_each_setting_is_applied_by_a_reload_or_reported_as_needing_a_restart():
    assert sorted([*FIXED, *APPLIED]) == sorted(Config.__struct_fields__)


async def test_watched_file_is_read_once_it_no_longer_changes(writing, nursery, autojump_clock):
    server = Server()
    nursery.start_soon(
        watch_config, ConfigSource(writing.file, writing.read, is_watched=True), FIRST, server.change
    )
    await trio.sleep(3.5 * POLL_INTERVAL_S)  # from here on halfway between two checks
    assert server.configs == []
    for text in ("two and", "two and more"):  # written in two steps
        writing.file.write_text(text)
        await trio.sleep(POLL_INTERVAL_S)
        assert server.configs == []
    await server.changed.wait()
    assert server.configs == [FIRST]
    writing.file.unlink()
    await trio.sleep(3 * POLL_INTERVAL_S)
    assert len(server.configs) == 1
