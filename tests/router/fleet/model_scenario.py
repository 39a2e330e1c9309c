"""Fault points in the lifecycle of an engine model beside another one, from load to unload."""

from functools import partial

import trio

from fairlead.base import frame_link as connection
from fairlead.base import messages
from fairlead.base.frames import FrameSplitter
from fairlead.nodes import model_process, own_engine
from fairlead.nodes.engines import client
from fairlead.nodes.engines.client import Worker
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.engines.watchdog import Watchdog
from fairlead.nodes.streams.sequence import NodeSequence
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.fleet import managed_model
from router.fleet.fault_points import (
    QUEUE,
    FaultPoints,
    Step,
    assert_no_more,
    ends,
    is_struck,
    noting,
    resource_counts,
)
from router.fleet.running_fleet import RunningFleet, engine, question, running_fleet
from router.fleet.simulated_child import SimulatedProcess, SimulatedProcesses

WATCHDOG_S = 1.0

# Steps that must be reached: a missing one means that its wrapper no longer applies.
STEPS: set[Step] = {
    *(("load", name) for name in ("specify", "socketpair", "open_process", "send", "recv", "decode")),
    *(
        ("load", name)
        for name in ("socket folder", "connect", "progress", "node_up", "thread", "measure", "read log")
    ),
    *(("serve", name) for name in ("submit", "send", "recv", "decode", "step", "receive", "receive_token")),
    *(("death", name) for name in ("recv", "node_down", "wait", "send_signal", "close pipe", "socketpair")),
    *(("stuck", name) for name in ("node_down", "send_signal", "wait")),
    *(("unload", name) for name in ("send_signal", "wait", "close pipe", "node_down", "stopped")),
}


async def model_scenario(points: FaultPoints, problems: list[str]) -> None:
    """Load a model, let it serve, die and hang, unload it; then check that nothing is left over."""
    models = (engine("m", watchdog_s=WATCHDOG_S), engine("other", watchdog_s=10_000))
    async with trio.open_nursery() as children:
        processes = SimulatedProcesses(children, points.aside)
        points.replace(trio.lowlevel, "open_process", processes.open_process)
        _wrap(points)
        async with running_fleet(*models, queue=QUEUE) as opened:
            opened.fleet._on_progress = lambda *_progress: points.reach("progress")
            await opened.fleet.load("other")
            await trio.sleep(1)
            before = resource_counts(opened)
            with points.phase("load"):
                await ends(opened.fleet.load, "m")
                await trio.sleep(1)
            for phase, trouble in (("serve", None), ("death", "kill"), ("stuck", "hang")):
                if not points.has_struck:
                    with points.phase(phase):
                        await _serve(opened, points, processes, trouble)
            if not points.has_struck:
                with points.phase("unload"):
                    await ends(opened.fleet.unload, "m")
            await _check(opened, processes, before, problems)
        children.cancel_scope.cancel()


async def _serve(
    opened: RunningFleet, points: FaultPoints, processes: SimulatedProcesses, trouble: str | None
) -> None:
    """Run two jobs, and call the method `trouble` of their process meanwhile, if any."""
    async with trio.open_nursery() as clients:
        begun = trio.Event()
        clients.start_soon(ends, partial(opened.run_job, begun=begun), question(tokens=50))
        clients.start_soon(ends, opened.run_job, question(tokens=2))
        with trio.move_on_after(5):
            await begun.wait()
        if trouble is not None:
            with points.aside():
                getattr(processes.all[-1], trouble)()
        await trio.sleep(6 * WATCHDOG_S)
        processes.all[-1].hangs = False


async def _check(
    opened: RunningFleet, processes: SimulatedProcesses, before: dict[str, int], problems: list[str]
) -> None:
    with noting(problems, "the other model does not serve"):
        await opened.run_job(question("other"))
    with noting(problems, "it does not settle"):
        await opened.state("m", "ready", "stopped", "failed")
    with noting(problems, "it cannot be loaded again"):
        await opened.fleet.load("m")
        await opened.run_job(question())
    with noting(problems, "it cannot be unloaded"):
        await opened.fleet.unload("m")
    with noting(problems, "it leaves something"):
        await trio.sleep(1)
        left = processes.left()
        await assert_no_more(opened, before)
        assert len(left) == 1, f"processes {left}"


# Fault points ------------------------------------------------------------------------------------------


def _wrap(points: FaultPoints) -> None:
    points.replace(client, "PING_INTERVAL_S", 1000)  # the other model is silent while this one is struck
    points.wrap(client.socket, "socketpair", "socketpair")
    points.wrap(own_engine, "socket_folder", "socket folder")
    points.wrap(trio, "open_unix_socket", "connect")
    for name in ("to_parent_decoder", "to_client_decoder"):
        points.replace(messages, name, _Decoder(points, getattr(messages, name)))
    points.wrap(trio.SocketStream, "send_all", "send")
    points.wrap(trio.SocketStream, "receive_some", "recv")
    points.wrap(trio.lowlevel, "open_process", "open_process")
    points.wrap(connection, "encode_frame", "encode")
    points.wrap(FrameSplitter, "feed", "split")
    points.wrap(messages.StepOutputs, "plain", "step")
    points.wrap(trio.lowlevel.FdStream, "receive_some", "read log")
    points.wrap(trio.lowlevel.FdStream, "aclose", "close pipe")
    points.wrap(trio.to_thread, "run_sync", "thread")
    points.wrap(managed_model, "memory_of", "measure")
    points.wrap(model_process, "worker_spec", "specify")
    points.wrap(SequenceClient, "submit", "submit")
    points.wrap(Worker, "_log_line", "log line")
    for name in ("stuck", "message_sent", "frame_received"):
        points.wrap(Watchdog, name, f"watchdog {name}")
    for name in ("wait", "send_signal"):
        points.wrap(SimulatedProcess, name, name)
    for name in ("receive_token", "receive"):
        points.wrap(NodeSequence, name, name)
    for name in ("node_up", "node_down"):
        points.wrap(Scheduler, name, name, lambda _self, node_id, *_: is_struck(node_id))
    points.wrap(Scheduler, "stopped", "stopped")


class _Decoder:
    def __init__(self, points: FaultPoints, decoder) -> None:
        self._points, self._decoder = points, decoder

    def decode(self, frame):
        self._points.reach("decode")
        return self._decoder.decode(frame)
