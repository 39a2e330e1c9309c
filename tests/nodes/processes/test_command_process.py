"""A command's process: its output is kept, and its process group ends with it."""

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from fairlead.base.errors import LoadFailed
from fairlead.base.runtime.child_output import LONGEST_LINE_BYTES
from fairlead.nodes.processes.command_process import LINES_KEPT, CommandProcess
from router.fleet.running_fleet import OpenFiles, children

FOREVER = ("sleep", "1000")


def python(source):
    """Return a command that runs Python code, and prints its process id on the first line."""
    return (sys.executable, "-c", f"import os, sys, time, signal\nprint(os.getpid(), flush=True)\n{source}")


def alive(pid):
    """Return whether a process of that id exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def printed(process, lines):
    """Wait until the process has printed that many lines; return its output."""
    with trio.fail_after(60):
        while len(process.output()) < lines:  # noqa: ASYNC110  # there is no event for it
            await trio.sleep(0.005)
    return process.output()


async def started_and_stopped(process, lines=0):
    """Run the process until it has printed that many lines, then cancel it."""
    async with trio.open_nursery() as nursery:
        await nursery.start(process.run)
        await printed(process, lines)
        nursery.cancel_scope.cancel()


async def test_run_reports_how_the_command_ended():
    process = CommandProcess("c", python("sys.exit(3)"))
    await process.run()
    assert process.ending == "ended with exit status 3"
    process = CommandProcess("c", python("os.kill(os.getpid(), signal.SIGKILL)"))
    await process.run()
    assert process.ending == "was killed by SIGKILL"


async def test_cancellation_sends_sigterm():
    process = CommandProcess(
        "c",
        python(
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('on', flush=True)\n"
            # Not one long sleep, which a signal just before it would not end.
            "while True: time.sleep(0.01)"
        ),
        unload_timeout_s=60,
    )
    await started_and_stopped(process, 2)
    assert process.ending == "ended with exit status 7"


async def test_process_that_ignores_sigterm_is_killed():
    process = CommandProcess(
        "c",
        python("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(99)"),
        unload_timeout_s=0.2,
    )
    await started_and_stopped(process, 2)
    assert process.ending == "was killed by SIGKILL"


@pytest.mark.parametrize("end", ["sys.exit(0)", "time.sleep(99)"])
async def test_child_processes_end_with_the_command(end):
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
        while alive(child):  # noqa: ASYNC110  # its parent has ended, so nothing reports it
            await trio.sleep(0.005)


async def test_child_that_keeps_the_pipe_in_another_session_does_not_block():
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
    assert process.ending == "ended with exit status 0"


async def test_stop_command_receives_the_process_id():
    stop = ("sh", "-c", "echo stopping ${PID}; kill -INT ${PID}")
    process = CommandProcess(
        "c",
        # A background process ignores SIGINT, and so do its children unless they install a handler.
        python(
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "try:\n print('there', flush=True)\n while True: time.sleep(0.01)\n"
            "except KeyboardInterrupt: sys.exit(5)"
        ),
        stop_command=stop,
        unload_timeout_s=60,
    )
    await started_and_stopped(process, 2)
    assert process.ending == "ended with exit status 5"


@pytest.mark.parametrize("stop", [("true",), ("sleep", "1000")])
async def test_process_is_killed_when_its_stop_command_does_not_stop_it_in_time(stop):
    process = CommandProcess("c", FOREVER, stop_command=stop, unload_timeout_s=0.2)
    with trio.fail_after(60):
        await started_and_stopped(process)
    assert process.ending == "was killed by SIGKILL"


async def test_sigterm_is_sent_when_the_stop_command_cannot_start():
    process = CommandProcess("c", FOREVER, stop_command=("/no/such/program",), unload_timeout_s=60)
    await started_and_stopped(process)
    assert process.ending == "was killed by SIGTERM"
    assert "/no/such/program" in process.output()[-1]


@pytest.mark.parametrize("command", [("/no/such/program",), ("",), ("a\0b",)])
async def test_command_that_cannot_start_raises_load_failed(command):
    with pytest.raises(LoadFailed, match="c cannot be started"):
        await CommandProcess("c", command).run()


async def test_output_is_printed_and_its_last_lines_are_kept(capsys):
    process = CommandProcess(
        "c", python("print('x' * 9000)\nsys.stderr.write('err\\n' * 300)\nprint('last', end='')")
    )
    await process.run()
    lines = process.output()
    assert len(lines) == LINES_KEPT
    assert lines[-2:] == ["err", "last"]
    assert max(map(len, lines)) <= LONGEST_LINE_BYTES
    shown = capsys.readouterr().err
    assert "[c] last\n" in shown
    assert shown.count("[c] err\n") == 300


async def test_line_over_the_limit_is_truncated():
    process = CommandProcess("c", python("sys.stdout.write('y' * 1_000_000)"))
    await process.run()
    assert all(len(line) <= LONGEST_LINE_BYTES for line in process.output())
    assert sum(map(len, process._lines)) <= LINES_KEPT * LONGEST_LINE_BYTES


async def test_configured_environment_is_added_to_that_of_the_server(monkeypatch):
    monkeypatch.setenv("OURS", "1")
    process = CommandProcess(
        "c", python("print(os.environ['OURS'], os.environ['THEIRS'])"), environment={"THEIRS": "2"}
    )
    await process.run()
    assert process.output()[1] == "1 2"


async def test_standard_input_of_the_command_is_empty():
    process = CommandProcess("c", python("print(repr(sys.stdin.read()))"))
    await process.run()
    assert process.output()[1] == "''"


async def test_two_hundred_short_runs_leave_no_process_or_file():
    before = children()

    async def start_and_cancel(number):
        process = CommandProcess("c", FOREVER)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(process.run)
                if number % 2:
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        assert process.pid is not None
        assert not Path(f"/proc/{process.pid}").exists()

    await start_and_cancel(0)
    files = OpenFiles()
    for number in range(200):
        await start_and_cancel(number)
    await files.are_no_more()
    assert children() <= before


async def test_process_cancelled_during_its_start_ends():
    before = children()
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.005):
        process = CommandProcess("c", FOREVER)
        with trio.move_on_after(delay_s):
            await process.run()
        assert process.pid is None or not Path(f"/proc/{process.pid}").exists()
    assert children() <= before


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_command_gets_sigterm_when_this_program_is_killed_even_if_suspended(is_stopped, tmp_path):
    mark = tmp_path / "mark"
    inner = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(mark)!r}).touch(), sys.exit()))\n"
        "print('on', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    script = (
        "import trio\n"
        "from fairlead.nodes.processes.command_process import CommandProcess\n"
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
            while alive(inner_pid):  # noqa: ASYNC110  # it is not a child of this process
                await trio.sleep(0.01)
    assert mark.exists()
