"""Many swaps of real processes leave nothing behind; and evictions as a llama-swap file defines them."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest
import trio

from fairlead.base.config import CommandConfig, LruSwap, ModelConfig, demonstration_model
from fairlead.nodes.engines.client import COMMAND
from fairlead.server.configfile import read_config
from nodes.listening import relayed_job
from router.fleet.running_fleet import (
    FAKE_CHILD,
    OpenFiles,
    RunningFleet,
    children,
    engine,
    free_port,
    memory_bytes,
    question,
    running_fleet,
)
from router.fleet.tiny_server import TEXT

TINY = (sys.executable, "-IS", str(Path(__file__).with_name("tiny_server.py")))
GROWTH_BYTES = 5 * 2**20
LONG = (pytest.mark.nightly, pytest.mark.timeout(600))


def tiny(name: str, port: int) -> CommandConfig:
    """Return a command for a server that starts at once."""
    return CommandConfig(name=name, cmd=(*TINY, str(port)), proxy=f"http://127.0.0.1:{port}")


# Repeated swaps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=LONG)])
async def test_two_servers_that_take_turns_leave_no_process_no_port_and_no_file(times):
    # On one port: the second server could not listen if the first one still ran.
    port = free_port()
    before_all = children()
    async with running_fleet(tiny("x", port), tiny("y", port), swap=LruSwap(max_loaded=1)) as opened:
        for model in "xyx":  # imports and one-time objects exist after this
            assert await opened.run_job(relayed_job(model=model)) == TEXT
        files, before_bytes, before = OpenFiles(), memory_bytes(), len(children() - before_all)
        for turn in range(times):
            job = relayed_job(model="yx"[turn % 2], request_id=f"turn {turn}")
            assert await opened.run_job(job) == TEXT
            assert sorted(status.state for status in opened.fleet.models()) == ["ready", "stopped"]
            assert before == len(children() - before_all)
        await files.are_no_more()
        assert memory_bytes() - before_bytes < GROWTH_BYTES
        statuses = opened.fleet.models()
        assert (times + 3, times + 2) == (
            sum(status.counts.loads for status in statuses),
            sum(status.counts.evictions for status in statuses),
        )
        assert sum(status.counts.restarts + status.counts.load_failures for status in statuses) == 0
        assert (opened.dispatcher.statistics().waiting, opened.dispatcher.statistics().running) == (0, 0)
    assert children() <= before_all
    for listener in await trio.open_tcp_listeners(port, host="127.0.0.1"):
        await listener.aclose()


async def swap_repeatedly(opened: RunningFleet, times: int) -> None:
    """Load the model by a job and unload it, that many times; its process must end each time."""
    for _ in range(times):
        assert await opened.run_job(question())
        pid = opened.pid()
        await opened.fleet.unload("m")
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("model", "child", "times"),
    [
        pytest.param(engine(), FAKE_CHILD, 20, id="20 times"),
        pytest.param(
            ModelConfig(path=demonstration_model(), name="m"),
            COMMAND,
            2,
            id="2 times, the demonstration model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ModelConfig(path=demonstration_model(), name="m"),
            COMMAND,
            50,
            id="50 times, the demonstration model",
            marks=LONG,
        ),
    ],
)
async def test_repeated_load_and_unload_leaks_no_memory(model, child, times):
    before_all = children()
    async with running_fleet(model, child=child) as opened:
        await swap_repeatedly(opened, first := min(times, 5))
        files, before_bytes = OpenFiles(), memory_bytes()
        await swap_repeatedly(opened, times)
        grown = memory_bytes() - before_bytes
        await files.are_no_more()
        assert children() <= before_all
        assert grown < GROWTH_BYTES, f"{grown / 2**20:.1f} MB after {times} times"
        assert first + times == opened.status().counts.loads
    assert children() <= before_all


# As llama-swap documents it ----------------------------------------------------------------------------


@pytest.fixture
def from_file(tmp_path: Path):
    """Return a function that runs a llama-swap file; each of its models is the tiny server."""

    def opened(names: str, routing: str):
        command = " ".join((*TINY, "${PORT}"))
        models = "".join(f'  {name}: {{cmd: "{command}"}}\n' for name in names.split())
        file = tmp_path / "config.yaml"
        text = f"startPort: {free_port(20)}\nmodels:\n{models}{dedent(routing)}"
        file.write_text(text)
        config = read_config(file, {}).config
        return running_fleet(*config.models, swap=config.swap)

    return opened


async def loaded_after(opened: RunningFleet, model: str) -> str:
    """Send a job to a model; return the names of the models that are loaded afterwards."""
    with trio.fail_after(60):
        await opened.run_job(relayed_job(model=model, stream=False, request_id=model))
    ready = [status.model for status in opened.fleet.models() if status.state == "ready"]
    assert len(ready) == len([status for status in opened.fleet.models() if status.state != "stopped"])
    return " ".join(sorted(ready))


async def test_without_routing_one_model_of_a_llama_swap_file_runs_at_a_time(from_file):
    async with from_file("a b", "") as opened:
        assert [await loaded_after(opened, model) for model in "aba"] == ["a", "b", "a"]


async def test_groups_of_a_llama_swap_file_evict_as_documented(from_file):
    routing = """\
        groups:
          one: {swap: true, exclusive: true, members: [a, b]}
          many: {swap: false, exclusive: false, members: [c, d]}
          always: {persistent: true, swap: false, exclusive: false, members: [e, f]}
        """
    async with from_file("a b c d e f", routing) as opened:
        assert [(model, await loaded_after(opened, model)) for model in "efacdbc"] == [
            ("e", "e"),
            ("f", "e f"),  # swap: false: all members may stay
            ("a", "a e f"),  # exclusive, but a persistent group stays
            ("c", "a c e f"),  # not exclusive: it leaves other groups untouched
            ("d", "a c d e f"),
            ("b", "b e f"),  # in place of a; and being exclusive, it unloads the group of c and d
            ("c", "b c e f"),
        ]


async def test_matrix_of_a_llama_swap_file_evicts_as_documented(from_file):
    routing = """\
        routing:
          router:
            use: matrix
            settings:
              matrix:
                vars: {g: gem, q: quill, v: vox, e: ear}
                evict_costs: {v: 50}
                sets:
                  pairs: "(g | q | mist) & v"
                  with_ear: "(g | q) & v & e"
                  pictures: "(g | q) & draw"
                  whole: "giant"
        """
    async with from_file("gem quill mist vox ear draw giant lone", routing) as opened:
        assert [
            (model, await loaded_after(opened, model))
            for model in ["gem", "vox", "ear", "quill", "mist", "draw", "gem", "vox", "giant", "vox", "lone"]
        ] == [
            ("gem", "gem"),
            ("vox", "gem vox"),
            ("ear", "ear gem vox"),
            ("quill", "ear quill vox"),  # in place of gem; the others may run with it
            ("mist", "mist vox"),  # only with vox
            ("draw", "draw"),  # in no set with either of them
            ("gem", "draw gem"),
            ("vox", "gem vox"),
            ("giant", "giant"),  # alone
            ("vox", "vox"),
            ("lone", "lone"),  # in no set: alone
        ]
