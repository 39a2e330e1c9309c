"""A server started by a command: it loads, serves, stops, and leaves no process or file."""

import os
import signal
import socket
import sys
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import trio

from fairlead.base.config import CommandConfig, FiltersConfig
from fairlead.base.errors import FairleadError, LoadFailed, NodeFailed
from fairlead.base.job import Passthrough, Relay
from fairlead.nodes.command_node import CommandNode
from fairlead.nodes.processes import ports
from fairlead.nodes.streams.passthrough import decode_head
from nodes.listening import CollectedDeltas, RecordingListener, generated, quick_health, relayed_job, stub
from nodes.stub_server import text
from router.fleet.running_fleet import OpenFiles, free_port

STUB = (sys.executable, str(Path(__file__).with_name("stub_server.py")), "--port")


def command(*options, **settings):
    """Return a command that starts a stub on a free port."""
    port = free_port()
    given = {
        "cmd": (*STUB, str(port), *options),
        "proxy": f"http://127.0.0.1:{port}",
        "unload_timeout_s": 5.0,
    }
    return CommandConfig(name="m", **(given | settings))


def sleeping_command(**settings):
    """Return a command that serves nothing and has no health check."""
    return command(cmd=("sleep", "1000"), check_endpoint="none", **settings)


def is_free(url):
    """Return whether nothing listens on the URL's port."""
    with socket.socket() as client:
        return bool(client.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))))


async def test_command_node_loads_serves_and_stops():
    listener, progress = RecordingListener(), []
    node = CommandNode(
        command(
            use_model_name="own-name",
            filters=FiltersConfig(strip_params=("seed",)),
            concurrency_limit=3,
            answer_bytes=10_000,
        ),
        listener,
        on_progress=lambda fraction, stage: progress.append((fraction, stage)),
    )
    assert node.state == "stopped"
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        assert node.state == "ready"
        assert listener.reports == [("up", "command:m", 3)]
        got = await generated(node, relayed_job(seed=5))
        assert text() == got.text()
        got = await generated(node, relayed_job(stream=False, stub={"words": 10_000}))
        assert "more than 10000 bytes" in got.error.message
        assert node.status().output[0].endswith(f"process {node.pid}")
        nursery.cancel_scope.cancel()
    assert listener.reports == [("up", "command:m", 3), ("down", "command:m")]
    assert node.state == "stopped"
    assert not Path(f"/proc/{node.pid}").exists()
    assert is_free(node._config.proxy)
    assert progress[-1] == (1.0, "ready")
    assert {(None, "waiting for /health")} >= set(progress[:-1])


async def test_node_is_ready_only_after_its_health_check_succeeds():
    waited = trio.Semaphore(0)
    node = CommandNode(
        command("--healthy-after", "0.3"),
        RecordingListener(),
        on_progress=lambda _fraction, stage: waited.release() if "waiting" in stage else None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run)
        with trio.fail_after(60):
            while not node.status().output:  # noqa: ASYNC110  # its server listens now
                await trio.sleep(0.01)
            await waited.acquire()
        assert node.state == "loading"
        with pytest.raises(NodeFailed, match="is down"):
            async with node.generate(relayed_job(), CollectedDeltas()):
                pass
        with trio.fail_after(60):
            while node.state != "ready":  # noqa: ASYNC110
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def _fails(node) -> FairleadError:
    """Run the node and return the error it ends with."""
    with trio.fail_after(60):
        try:
            await node.run()
        except FairleadError as error:
            return error
    raise AssertionError("it did not fail")


async def test_command_that_exits_while_loading_reports_its_last_lines():
    listener = RecordingListener()
    script = "import sys\nfor n in range(30): print('line', n)\nsys.exit('no such file: model.gguf')"
    error = await _fails(CommandNode(command(cmd=(sys.executable, "-c", script)), listener))
    assert isinstance(error, LoadFailed)
    assert error.message.startswith("m ended with exit status 1 while loading\nline 21\n")
    assert error.message.endswith("no such file: model.gguf")
    assert listener.reports == []


async def test_command_that_never_answers_fails_after_the_health_check_timeout(mock_clock):
    node = CommandNode(command("--healthy-after", "100", health_check_timeout_s=1.0), RecordingListener())

    async def advance_the_clock_after_its_output():
        while not node.status().output:
            await trio.lowlevel.checkpoint()
        mock_clock.rate = 1.0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(advance_the_clock_after_its_output)
        error = await _fails(node)
    assert isinstance(error, LoadFailed)
    assert error.message.startswith("m did not answer /health within 1 s\nstub on port")
    assert not Path(f"/proc/{node.pid}").exists()
    assert is_free(node._config.proxy)


async def test_command_that_cannot_start_reports_the_reason():
    error = await _fails(CommandNode(command(cmd=("/no/such/program",)), RecordingListener()))
    assert isinstance(error, LoadFailed)
    assert "m cannot be started" in error.message


async def test_death_of_a_command_is_reported_before_its_jobs_fail():
    listener, order, errors = RecordingListener(), [], []

    class Failing(CollectedDeltas):
        def fail(self, error):
            order.append([report[0] for report in listener.reports])
            super().fail(error)

    node = CommandNode(command(), listener)

    async def serve(task_status):
        try:
            await node.run(task_status=task_status)
        except NodeFailed as error:
            errors.append(error)

    into = Failing()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        async with node.generate(relayed_job(stub={"how": "stall", "after": 3}), into):
            await into.first.wait()
            os.kill(node.pid, signal.SIGKILL)
            await into.over.wait()
    assert isinstance(into.error, NodeFailed)
    assert order == [["up", "down"]] or "in the middle of a response" in into.error.message
    assert [report[0] for report in listener.reports] == ["up", "down"]
    assert errors[0].message.startswith("m was killed by SIGKILL\n")


async def test_stopping_fails_the_jobs_before_the_process_ends():
    listener = RecordingListener()
    node = CommandNode(command("--ignore-sigterm", unload_timeout_s=0.3), listener)
    into = CollectedDeltas()
    scope = trio.CancelScope()

    async def serve(task_status):
        with scope:
            await node.run(task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        async with node.generate(relayed_job(stub={"how": "stall", "after": 3}), into):
            await into.first.wait()
            scope.cancel()
            await into.over.wait()
            assert Path(f"/proc/{node.pid}").exists()
    assert isinstance(into.error, NodeFailed)
    assert not Path(f"/proc/{node.pid}").exists()


async def test_command_without_a_health_check_is_ready_at_once():
    listener = RecordingListener()
    node = CommandNode(sleeping_command(), listener)
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        assert node.state == "ready"
        nursery.cancel_scope.cancel()
    assert [report[0] for report in listener.reports] == ["up", "down"]


async def test_two_hundred_quick_loads_leave_no_process_and_no_file():
    async def load_once(number):
        node = CommandNode(sleeping_command(), RecordingListener())
        with trio.move_on_after(0.0005 * (number % 4)) if number % 3 else trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                scope.cancel()
        assert node.state == "stopped"
        assert node.pid is None or not Path(f"/proc/{node.pid}").exists()
        return node.pid is not None

    await load_once(0)
    files = OpenFiles()
    started = [await load_once(number) for number in range(200)]
    assert sum(started) > 60
    await files.are_no_more()


# Its port and its key ------------------------------------------------------------------------------------


@asynccontextmanager
async def running(config, listener=None):
    """Run a command's node during the block, from the moment that it is ready."""
    node = CommandNode(config, listener or RecordingListener(), health=quick_health())
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            await nursery.start(node.run)
        yield node
        nursery.cancel_scope.cancel()


def symbolic_command(port, *options, **settings):
    """Return a command that starts a stub on the port that it is given."""
    given = {"cmd": (*STUB, "${PORT}", *options), "proxy": "http://localhost:${PORT}", "port": port}
    return command(**given | settings)


async def test_command_whose_port_another_program_has_is_not_started(autojump_clock):
    async with stub() as stranger:
        node = CommandNode(command(proxy=stranger.url), RecordingListener())
        error = await _fails(node)
        assert isinstance(error, LoadFailed)
        assert error.message == f"port {stranger.port} is taken by another program"
        assert node.pid is None
        assert stranger.requests == []


async def test_command_with_a_port_from_us_gets_the_next_free_one():
    port = free_port(3)
    with socket.create_server(("127.0.0.1", port)):
        async with running(symbolic_command(port)) as first, running(symbolic_command(port)) as second:
            assert [node.started_config.port for node in (first, second)] == [port + 1, port + 2]
            for node in (first, second):
                assert (await generated(node, relayed_job())).text() == text()
    async with running(symbolic_command(port)) as third:
        assert third.started_config.port == port


async def test_command_waits_for_a_port_that_is_being_closed():
    listener = socket.create_server(("127.0.0.1", port := free_port()))

    async def close_later():
        await trio.sleep(0.2)
        listener.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(close_later)
        config = command(cmd=(*STUB, str(port)), proxy=f"http://127.0.0.1:{port}")
        async with running(config) as node:
            assert node.state == "ready"


async def test_command_is_not_ready_while_a_stranger_answers_on_its_port():
    async with stub() as stranger:
        # Free when it is looked at, and taken by a program that ran before: two servers start at once.
        taken = symbolic_command(stranger.port, cmd=("sleep", "1000"))
        with patch.object(ports, "_is_free", lambda *_: True):
            error = await _fails(CommandNode(taken, RecordingListener()))
        assert isinstance(error, LoadFailed)
        assert error.message == f"port {stranger.port} is taken by another program"
        assert stranger.requests, "it was healthy"


async def test_command_is_given_up_when_a_stranger_takes_its_port():
    port = free_port()
    node = CommandNode(
        command(cmd=("sleep", "1000"), proxy=f"http://127.0.0.1:{port}", check_endpoint="none"),
        RecordingListener(),
        health=quick_health(),
    )
    with ExitStack() as strangers:

        async def take_the_port():
            while node.state != "ready":  # noqa: ASYNC110
                await trio.sleep(0.01)
            strangers.enter_context(socket.create_server(("127.0.0.1", port)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_the_port)
            error = await _fails(node)
    assert isinstance(error, NodeFailed)
    assert error.message == node.stuck == f"port {port} is taken by another program"


async def test_server_that_a_script_has_started_in_another_session_is_the_commands_own(tmp_path):
    port, file = free_port(), tmp_path / "pid"
    config = command(
        cmd=("sh", "-c", f"setsid {' '.join(STUB)} {port} & echo $! > {file}; sleep 1000"),
        cmd_stop=("sh", "-c", f'kill $(cat {file}) "$1"', "stop", "${PID}"),
        proxy=f"http://127.0.0.1:{port}",
    )
    async with running(config) as node:
        assert (await generated(node, relayed_job())).text() == text()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--api-key", "sk-needed"), {}),
        (("--api-key=sk-needed,sk-second",), {}),
        (("--api-key-file", "{file}"), {}),
        ((), {"env": {"LLAMA_API_KEY": "sk-needed"}}),
        (("--api-key", "sk-second,sk-needed"), {"api_key": "sk-needed"}),
    ],
)
async def test_server_gets_the_key_that_it_requires_and_nobody_sees_it(options, settings, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-needed\nsk-second\n")
    options = [option.format(file=keys) for option in options]
    printed = []
    config = symbolic_command(free_port(), *options, "--requires-key", "sk-needed", **settings)
    node = CommandNode(config, RecordingListener(), on_line=printed.append)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            await nursery.start(node.run)
        assert (await generated(node, relayed_job())).text() == text()
        passed = Relay("/health", b"", passthrough=Passthrough("GET", ()))
        got = await generated(node, msgspec.structs.replace(relayed_job(), relay=passed))
        assert decode_head(got.deltas[0].raw[0]).status == 200
        output = node.status().output
        nursery.cancel_scope.cancel()
    assert any("requires ***" in line for line in output)
    assert "sk-needed" not in repr((printed, output, node.status()))
