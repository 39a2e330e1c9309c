"""Fault points in the lifecycle of a command's model, from load to unload."""

import os

import trio

from fairlead.base.config import HealthConfig
from fairlead.nodes.processes import command_process as process
from fairlead.nodes.processes.child import Child
from fairlead.nodes.processes.liveness import LivenessProbe
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.fleet import managed_model
from nodes.listening import relayed_job
from nodes.stub_server import StubServer, text
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
from router.fleet.node_scenario import run_job, serve_on_socketpairs, wrap_relaying
from router.fleet.running_fleet import RunningFleet, engine, question, running_fleet, sleeper
from router.fleet.simulated_child import SimulatedProcess, SimulatedProcesses

HEALTH = HealthConfig(interval_s=1.0, failures=2, timeout_s=20.0)

# Steps that must be reached: a missing one means that its wrapper no longer applies.
STEPS: set[Step] = {
    *(("load", name) for name in ("open_process", "guard", "connect", "parse feed", "node_up", "measure")),
    *(("serve", name) for name in ("rewrite_model", "read_event", "put")),
    *(("death", name) for name in ("wait", "node_down", "signal group", "close pipe", "guard")),
    *(("unload", name) for name in ("signal group", "wait", "close pipe", "node_down", "stopped")),
}


async def command_scenario(points: FaultPoints, problems: list[str]) -> None:
    """Start a command, relay to it, kill it, unload it; then check that nothing is left over."""
    server = StubServer()
    command = sleeper("m", check_endpoint="/health", proxy="http://127.0.0.1:1", unload_timeout_s=2.0)
    async with trio.open_nursery() as children:
        processes = SimulatedProcesses(children, points.aside)
        points.replace(trio.lowlevel, "open_process", processes.open_process)
        points.replace(os, "killpg", processes.killpg)
        serve_on_socketpairs(points, children, server)
        wrap_relaying(points)
        _wrap(points)
        async with running_fleet(command, engine("other"), health_check=HEALTH, queue=QUEUE) as opened:
            await opened.fleet.load("other")
            await trio.sleep(1)
            before = resource_counts(opened)
            for phase, happen in (("load", _load), ("serve", _serve), ("death", _crash), ("unload", _unload)):
                if not points.has_struck:
                    with points.phase(phase):
                        await happen(opened, points, processes)
                        await trio.sleep(3.3)
            await _check(opened, server, processes, before, problems)
        children.cancel_scope.cancel()


async def _load(opened: RunningFleet, _points: FaultPoints, _processes: SimulatedProcesses) -> None:
    await ends(opened.fleet.load, "m")


async def _serve(opened: RunningFleet, _points: FaultPoints, _processes: SimulatedProcesses) -> None:
    async with trio.open_nursery() as clients:
        for number, stream in enumerate((True, False)):
            clients.start_soon(run_job, opened, relayed_job(request_id=f"r{number}", stream=stream))


async def _crash(opened: RunningFleet, points: FaultPoints, processes: SimulatedProcesses) -> None:
    async with trio.open_nursery() as clients:
        clients.start_soon(run_job, opened, relayed_job(stub={"words": 100, "delay_s": 0.2}))
        await trio.sleep(1)
        with points.aside():
            (main,) = [each for each in processes.all if each.pid == opened.pid()]
            main.kill()


async def _unload(opened: RunningFleet, _points: FaultPoints, _processes: SimulatedProcesses) -> None:
    await ends(opened.fleet.unload, "m")


async def _check(
    opened: RunningFleet,
    server: StubServer,
    processes: SimulatedProcesses,
    before: dict[str, int],
    problems: list[str],
) -> None:
    with noting(problems, "the other model does not serve"):
        await opened.run_job(question("other"))
    with noting(problems, "it does not settle"):
        await opened.state("m", "ready", "stopped", "failed")
    with noting(problems, "it cannot be loaded again"):
        await opened.fleet.load("m")
        assert await opened.run_job(relayed_job()) == text()
    with noting(problems, "it cannot be unloaded"):
        await opened.fleet.unload("m")
    with noting(problems, "it leaves something"):
        await trio.sleep(1)
        left = processes.left()
        await assert_no_more(opened, before)
        assert len(left) == 1, f"processes {left}"
        assert server.connections == 0, "connections"


def _wrap(points: FaultPoints) -> None:
    points.wrap(trio.lowlevel, "open_process", "open_process")
    points.wrap(process, "_guard", "guard")
    points.wrap(Child, "signal", "signal group")
    points.wrap(LivenessProbe, "stopped", "pulse")
    points.wrap(trio.lowlevel.FdStream, "receive_some", "read log")
    points.wrap(trio.lowlevel.FdStream, "aclose", "close pipe")
    points.wrap(process.CommandProcess, "_record_line", "log line")
    points.wrap(managed_model, "memory_of", "measure")
    points.wrap(SimulatedProcess, "wait", "wait")
    for name in ("node_up", "node_down"):
        points.wrap(Scheduler, name, f"scheduler {name}", lambda _self, node_id, *_: is_struck(node_id))
    points.wrap(Scheduler, "stopped", "stopped")
