"""A command's process: what it prints is kept, and when it is over nobody of it is left."""

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from fairlead.child_output import LONGEST_LINE_BYTES
from fairlead.errors import LoadFailed
from fairlead.nodes.process import LINES_KEPT, CommandProcess
from nodes.garage import OpenFiles, children

FOREVER = ("sleep", "1000")


def python(source):
    """A command that runs some Python, with its process id on the first line."""
    return (sys.executable, "-c", f"import os, sys, time, signal\nprint(os.getpid(), flush=True)\n{source}")


def alive(pid):
    """Whether there is a process of that id that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def printed(process, lines):
    """Wait until it has printed that many lines; return them."""
    with trio.fail_after(60):
        while len(process.output()) < lines:  # noqa: ASYNC110  # it tells nobody
            await trio.sleep(0.005)
    return process.output()


async def started_and_stopped(process, lines=0):
    """Run it until it has printed so many lines, then cancel it."""
    async with trio.open_nursery() as nursery:
        await nursery.start(process.run)
        await printed(process, lines)
        nursery.cancel_scope.cancel()


async def test_it_returns_when_the_command_ends_and_says_how():
    process = CommandProcess("c", python("sys.exit(3)"))
    await process.run()
    assert "ended with exit status 3" == process.ending
    process = CommandProcess("c", python("os.kill(os.getpid(), signal.SIGKILL)"))
    await process.run()
    assert "was killed by SIGKILL" == process.ending


async def test_cancelling_stops_it_with_sigterm():
    process = CommandProcess(
        "c",
        python(
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('on', flush=True)\n"
            # Not one long sleep: a signal that comes just before it would not end it.
            "while True: time.sleep(0.01)"
        ),
        unload_timeout_s=60,
    )
    await started_and_stopped(process, 2)
    assert "ended with exit status 7" == process.ending


async def test_what_does_not_stop_is_killed():
    process = CommandProcess(
        "c",
        python("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(99)"),
        unload_timeout_s=0.2,
    )
    await started_and_stopped(process, 2)
    assert "was killed by SIGKILL" == process.ending


@pytest.mark.parametrize("end", ["sys.exit(0)", "time.sleep(99)"])
async def test_whom_it_started_ends_with_it(end):
    process = CommandProcess(
        "c",
        python(
            "import subprocess\n"
            "child = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 1000'])\n"
            f"print(child.pid, flush=True)\n{end}"
        ),
        unload_timeout_s=0.5,
    )
    await started_and_stopped(process, 2)
    own, child = (int(line) for line in process.output())
    assert own == process.pid
    assert not alive(own)
    with trio.fail_after(60):
        while alive(child):  # noqa: ASYNC110  # its parent is gone, so nobody is told
            await trio.sleep(0.005)


async def test_one_that_leaves_the_group_with_the_pipe_does_not_hold_us_up():
    process = CommandProcess(
        "c",
        python(
            "import subprocess\n"
            "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
            "print(child.pid, flush=True)"
        ),
    )
    with trio.fail_after(60):
        await process.run()
    os.kill(int(process.output()[1]), 9)
    assert "ended with exit status 0" == process.ending


async def test_the_stop_command_is_told_the_process_id():
    stop = ("sh", "-c", "echo stopping ${PID}; kill -INT ${PID}")
    process = CommandProcess(
        "c",
        # Who was started in the background ignores SIGINT, and so do its children, unless they are told.
        python(
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "try:\n print('there', flush=True)\n while True: time.sleep(0.01)\n"
            "except KeyboardInterrupt: sys.exit(5)"
        ),
        stop_command=stop,
        unload_timeout_s=60,
    )
    await started_and_stopped(process, 2)
    assert "ended with exit status 5" == process.ending


@pytest.mark.parametrize("stop", [("true",), ("sleep", "1000")])
async def test_a_stop_command_that_does_not_stop_it_is_not_waited_for_longer_than_it_has(stop):
    process = CommandProcess("c", FOREVER, stop_command=stop, unload_timeout_s=0.2)
    with trio.fail_after(60):
        await started_and_stopped(process)
    assert "was killed by SIGKILL" == process.ending


async def test_without_the_stop_command_that_was_configured_sigterm_has_to_do():
    process = CommandProcess("c", FOREVER, stop_command=("/no/such/program",), unload_timeout_s=60)
    await started_and_stopped(process)
    assert "was killed by SIGTERM" == process.ending
    assert "/no/such/program" in process.output()[-1]


@pytest.mark.parametrize("command", [("/no/such/program",), ("",), ("a\0b",)])
async def test_what_cannot_be_started_says_so(command):
    with pytest.raises(LoadFailed, match="c cannot be started"):
        await CommandProcess("c", command).run()


async def test_its_output_is_shown_and_the_last_lines_are_kept(capsys):
    process = CommandProcess(
        "c", python("print('x' * 9000)\nsys.stderr.write('err\\n' * 300)\nprint('last', end='')")
    )
    await process.run()
    lines = process.output()
    assert LINES_KEPT == len(lines)
    assert ["err", "last"] == lines[-2:]
    assert max(map(len, lines)) <= LONGEST_LINE_BYTES
    shown = capsys.readouterr().err
    assert "[c] last\n" in shown
    assert 300 == shown.count("[c] err\n")


async def test_a_line_without_end_is_cut():
    process = CommandProcess("c", python("sys.stdout.write('y' * 1_000_000)"))
    await process.run()
    assert all(len(line) <= LONGEST_LINE_BYTES for line in process.output())
    assert sum(map(len, process._lines)) <= LINES_KEPT * LONGEST_LINE_BYTES


async def test_it_has_the_environment_that_was_configured_beside_ours(monkeypatch):
    monkeypatch.setenv("OURS", "1")
    process = CommandProcess(
        "c", python("print(os.environ['OURS'], os.environ['THEIRS'])"), environment={"THEIRS": "2"}
    )
    await process.run()
    assert "1 2" == process.output()[1]


async def test_it_cannot_read_what_is_typed_here():
    process = CommandProcess("c", python("print(repr(sys.stdin.read()))"))
    await process.run()
    assert "''" == process.output()[1]


async def test_two_hundred_quick_lives_leave_nothing_behind():
    before = children()

    async def one_life(number):
        process = CommandProcess("c", FOREVER)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(process.run)
                if number % 2:
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        assert process.pid is not None
        assert not Path(f"/proc/{process.pid}").exists()

    await one_life(0)
    files = OpenFiles()
    for number in range(200):
        await one_life(number)
    await files.are_no_more()
    assert children() <= before


async def test_cancelled_while_it_starts_it_is_not_left_behind():
    before = children()
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.005):
        process = CommandProcess("c", FOREVER)
        with trio.move_on_after(delay_s):
            await process.run()
        assert process.pid is None or not Path(f"/proc/{process.pid}").exists()
    assert children() <= before


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_when_this_program_is_killed_the_command_ends_in_good_order_even_if_it_was_stopped(
    is_stopped, tmp_path
):
    mark = tmp_path / "mark"
    inner = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(mark)!r}).touch(), sys.exit()))\n"
        "print('on', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    script = (
        "import trio\n"
        "from fairlead.nodes.process import CommandProcess\n"
        "async def main():\n"
        "    async with trio.open_nursery() as nursery:\n"
        f"        process = CommandProcess('inner', (sys.executable, '-c', {inner!r}))\n"
        "        print(await nursery.start(process.run), flush=True)\n"
        "trio.run(main)"
    )
    outer = CommandProcess("outer", python(script), environment={"PYTHONPATH": os.pathsep.join(sys.path)})
    async with trio.open_nursery() as nursery:
        await nursery.start(outer.run)
        own, inner_pid = (int(line) for line in (await printed(outer, 3))[:2])
        if is_stopped:
            os.kill(inner_pid, signal.SIGSTOP)
        os.kill(own, signal.SIGKILL)
        with trio.fail_after(60):
            while alive(inner_pid):  # noqa: ASYNC110  # it is no child of ours
                await trio.sleep(0.01)
    assert mark.exists()
