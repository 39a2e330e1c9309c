"""The load progress of a command is read from its output, or is unknown."""

import sys

import pytest
import trio

from fairlead.base.config import CommandConfig, ConfigError
from fairlead.nodes.command_node import CommandNode
from fairlead.nodes.progress import fraction_reader
from nodes.listening import RecordingListener
from router.fleet.running_fleet import free_port, running_fleet, sleeper

VLLM = "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.20it/s]"


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"(\d+)%", VLLM, 0.5),
        (r"(\d+)/(\d+)", VLLM, 0.5),
        (r"(\d+)%", "load:\r 1%\r 12%\r 40%", 0.4),
        (r"(\d+)%", "nothing to see", None),
        (r"at (\S+)", "at 12.5", 0.125),
        (r"at (\S+)", "at last", None),
        (r"at (\S+)", "at nan", None),
        (r"at (\S+)", "at inf", None),
        (r"at (\S+)", "at -3", 0.0),
        (r"at (\S+)", "at 250", 1.0),
        (r"(\d+) of (\d+)", "3 of 0", None),
        (r"(\d+)(?: of (\d+))?", "3", None),
    ],
)
def test_last_match_of_the_pattern_is_the_progress(pattern, text, expected):
    assert fraction_reader(pattern)(text) == expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[", "is not a regular expression: unterminated character set at position 0"),
        (r"\d+%", "must have one group or two, not 0"),
        (r"(\d)(\d)(\d)", "must have one group or two, not 3"),
    ],
)
def test_invalid_pattern_is_refused_with_the_name_of_its_setting(pattern, reason):
    with pytest.raises(ConfigError) as refused:
        CommandConfig(name="m", cmd=("serve",), progress_pattern=pattern)
    assert str(refused.value) == f"models.m.progressPattern: {reason}"


def printing(script: str, **settings: object) -> CommandConfig:
    """Return a command that prints and never answers."""
    return CommandConfig(
        name="m",
        cmd=(sys.executable, "-c", f"import sys, time\n{script}\nsys.stdout.flush(); time.sleep(1000)"),
        proxy=f"http://127.0.0.1:{free_port()}",
        unload_timeout_s=5.0,
        **settings,
    )


async def reported(config: CommandConfig, last: float | None) -> list[tuple[float | None, str]]:
    """Load until that progress is reported; return the reports in order, without consecutive repeats."""
    reports: list[tuple[float | None, str]] = []
    seen = trio.Event()

    def report(fraction: float | None, stage: str) -> None:
        if not reports or reports[-1] != (fraction, stage):
            reports.append((fraction, stage))
        if fraction == last:
            seen.set()

    node = CommandNode(config, RecordingListener(), on_progress=report)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run)
        with trio.fail_after(60):
            await seen.wait()
        assert node.state == "loading"
        nursery.cancel_scope.cancel()
    return reports


async def test_progress_of_a_command_is_read_from_its_output():
    script = "print('shard 1/4')\nsys.stdout.flush(); time.sleep(.5)\nprint('shard 3/4')"
    reports = await reported(printing(script, progress_pattern=r"shard (\d+)/(\d+)"), last=0.75)
    assert reports[-2:] == [(0.25, "waiting for /health"), (0.75, "waiting for /health")]
    assert all(report == (None, "waiting for /health") for report in reports[:-2])


async def test_progress_bar_on_one_line_is_read_before_the_line_ends():
    script = "print('\\r 10%\\r 60%', end='')"
    assert (await reported(printing(script, progress_pattern=r"(\d+)%"), last=0.6))[-1][0] == 0.6


async def test_progress_without_a_pattern_stays_unknown(mock_clock):
    mock_clock.rate = 100.0
    config = printing("print('50%')", health_check_timeout_s=100_000.0)
    reports: list[float | None] = []
    node = CommandNode(
        config, RecordingListener(), on_progress=lambda fraction, _stage: reports.append(fraction)
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run)
        while not node.status().output or trio.current_time() < 20:  # noqa: ASYNC110
            await trio.sleep(1)
        assert set(reports) == {None}
        nursery.cancel_scope.cancel()


async def test_status_has_the_progress_of_a_loading_command_and_one_when_ready():
    async with running_fleet(
        printing("print('at 30')", progress_pattern=r"at (\d+)"), sleeper("y")
    ) as opened:
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.fleet.load, "m")
            await opened.until(lambda: opened.status().load.progress == 0.3)
            assert opened.status().load.stage == "waiting for /health"
            clients.cancel_scope.cancel()
        await opened.fleet.load("y")
        assert opened.status("y").load.progress == 1.0
