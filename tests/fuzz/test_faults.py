"""Real sockets, the real listener and routes, and connections that fail in every way."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count, islice
from random import Random

import msgspec
import pytest
import structlog
import trio

from e2e.real_server import real_server
from fairlead.base.config import Config, Limits, ModelConfig, QueueConfig, demonstration_model
from fairlead.generation.gateway import Gateway
from fairlead.generation.services import Services
from fairlead.language.text.model import TextModel
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.server.routes.routes import Application
from fake_fleet import FakeFleet
from fake_nodes import TimedNode
from fuzz.fault_proxy import Fault, Kind, Way, draw_fault, faulty
from server.routes.raw_http import Answer, Client, post, serving

SHARE = 0.4  # of the time for all fuzz tests
AT_ONCE = 24
STORM = 120  # clients
MODEL = "fairlead-demo"
CANARY_S = 60.0  # generous: it is usually answered within a second

# Stalled requests must exceed these. The canary must not, even on a slow machine.
LIMITS = Limits(header_timeout_s=0.5, body_timeout_s=0.5, stall_s=0.5)
# A stalled request is refused. A client that disconnects in the middle of one gets no answer.
STATUSES = {200, 408}


def request(tenant: str, *, stream: bool, n: int = 1) -> bytes:
    """Return a completion request of this tenant."""
    body = {"model": MODEL, "prompt": "Hello.", "user": tenant, "stream": stream, "n": n, "max_tokens": 20}
    return post(json.dumps(body).encode(), "/v1/completions", "Content-Type: application/json")


def texts(answer: Answer) -> list[str]:
    """Return the choices' texts of a complete answer, streamed or not."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, done, rest = answer.body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    else:
        chunks = [json.loads(answer.body)]
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


class ServerOverFakeNodes:
    """The real server over fake nodes."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.nodes = [TimedNode(MODEL, first_s=0.002, service_s=0.01) for _ in range(2)]
        self.dispatcher = Dispatcher(QueueConfig(), random=Random(0))
        self.registry = NodeRegistry(self.dispatcher.scheduler)
        for number, node in enumerate(self.nodes):
            node.id = f"{number}"
            self.registry.report(node, NodeLimits(seats=2, max_model_len=1000))
        self.address: tuple[str, int]

    @asynccontextmanager
    async def open(self) -> AsyncIterator["ServerOverFakeNodes"]:
        """Serve until the context exits, which drains the server."""
        path = demonstration_model()
        app = Application(
            Services(
                config=Config(models=(ModelConfig(path=path, name=MODEL),), limits=self.limits),
                gateway=Gateway(self.dispatcher, self.registry, request_timeout_s=60),
                fleet=FakeFleet([MODEL]),
                models={MODEL: TextModel.load(path, name=MODEL)},
                aliases={},
                ready=lambda: True,
                estimate=self.dispatcher.estimate,
                queue_statistics=lambda: msgspec.structs.asdict(self.dispatcher.statistics()),
            )
        )
        async with trio.open_nursery() as nursery, serving(app, self.limits, timeout_s=250) as server:
            nursery.start_soon(self.dispatcher.run)
            self.address = server.address
            yield self
            nursery.cancel_scope.cancel()

    def at_rest(self) -> bool:
        """Return whether no job waits or runs, and no node holds one."""
        statistics = self.dispatcher.statistics()
        return not any([statistics.waiting, statistics.running, *(node.running for node in self.nodes)])


async def client_plan(server: tuple[str, int], seed: int) -> Answer | None:
    """Send a request through a fault, and disconnect after a random time; return the answer, if any."""
    random = Random(seed)
    content = request(random.choice("ABC"), stream=random.random() < 0.6, n=random.choice([1, 1, 2]))
    fault = draw_fault(random, request_bytes=len(content), answer_bytes=1200)
    with trio.move_on_after(random.choice([0.01, 0.05, 1.0])):
        async with faulty(server, fault) as address:
            return await fetch(address, content)
    return None


async def fetch(address: tuple[str, int], content: bytes) -> Answer | None:
    with trio.socket.socket() as sock, suppress(OSError, EOFError):
        await sock.connect(address)
        return await Client(sock).fetch(content)
    return None


async def run_storm(server: tuple[str, int], seeds: range) -> list[Answer]:
    """Run a client for each seed, at most `AT_ONCE` at the same time; return their answers."""
    left = iter(seeds)
    answers: list[Answer | None] = []

    async def one_after_the_other() -> None:
        for seed in left:
            answers.append(await client_plan(server, seed))  # noqa: PERF401  # `extend` takes no async generator

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(one_after_the_other)
    return [answer for answer in answers if answer is not None]


async def check_canary(server: tuple[str, int], *, expected: str | None) -> None:
    """Send requests without a fault on one connection, and check that each is answered correctly."""
    with trio.socket.socket() as sock:
        await sock.connect(server)
        client = Client(sock)
        for stream in map(bool, islice(count(), 1, None)):
            with trio.fail_after(CANARY_S):
                answer = await client.fetch(request("canary", stream=stream))
            assert (answer.status, answer.is_complete) == (200, True)
            assert expected in {None, *texts(answer)}
            await trio.sleep(0.005)


async def storm_with_canary(server, seeds: range, *, expected: str | None) -> list[Answer]:
    """Run `run_storm` beside a canary client; return the answers of the storm."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: check_canary(server, expected=expected))
        answers = await run_storm(server, seeds)
        nursery.cancel_scope.cancel()
    return answers


def wrong(answers: list[Answer]) -> list[Answer]:
    """Return answers with a wrong status, and complete ones with a wrong text. An answer may be late."""
    return [
        answer
        for answer in answers
        if answer.status not in STATUSES
        or (answer.status == 200 and answer.is_complete and {"first last"} != set(texts(answer)))
    ]


async def test_storms_of_cut_stalled_dripping_and_reset_connections_leave_nothing_behind(fuzz_seconds):
    ends = time.monotonic() + SHARE * fuzz_seconds
    tasks = trio.lowlevel.current_statistics().tasks_living
    answers: list[Answer] = []
    with structlog.testing.capture_logs() as logs:
        async with ServerOverFakeNodes(LIMITS).open() as server:
            undisturbed = trio.lowlevel.current_statistics().tasks_living
            for first in count(0, STORM):
                seeds = range(first, first + STORM)
                answers += await storm_with_canary(server.address, seeds, expected="first last")
                with trio.fail_after(CANARY_S):
                    while trio.lowlevel.current_statistics().tasks_living > undisturbed:  # noqa: ASYNC110  # no event
                        await trio.sleep(0.01)
                assert server.at_rest()
                assert wrong(answers) == []
                # On a slow machine all clients of a storm may disconnect too early for one of these.
                seen = {answer.is_complete for answer in answers if answer.status == 200}
                if time.monotonic() > ends and {True, False} == seen:
                    break
    assert tasks == trio.lowlevel.current_statistics().tasks_living
    worse = [entry for entry in logs if entry["log_level"] != "info"]  # than a refused request
    assert [entry for entry in worse if entry.get("reason") != "the client does not read"] == []


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "to the server") for kind in ("cut", "half-close", "reset")),  # a stall is invisible there
        *((kind, "to the client") for kind in ("cut", "half-close", "reset", "stall")),
    ],
)
async def test_connection_that_fails_in_the_middle_of_a_job_frees_its_seat(kind: Kind, way: Way):
    content = request("A", stream=True)
    server = ServerOverFakeNodes()
    for node in server.nodes:
        node.service_s = 1000
    # At the byte after the request, or within the first event of its answer.
    after = len(content) + 1 if way == "to the server" else 300
    async with server.open(), faulty(server.address, Fault(kind, way, after)) as address:
        with trio.socket.socket() as sock, suppress(OSError):
            await sock.connect(address)
            client = Client(sock)
            await client.send(content)
            while not any(node.served for node in server.nodes):  # noqa: ASYNC110  # no event
                await trio.sleep(0.005)
            await client.send(b"\r\n")
            with trio.move_on_after(0.3):
                await client.end()
        with trio.fail_after(CANARY_S):
            while not server.at_rest():  # noqa: ASYNC110  # no event
                await trio.sleep(0.005)
    assert sum(len(node.served) for node in server.nodes) == 1


@pytest.mark.parametrize("way", ["to the server", "to the client"])
@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_that_arrive_one_at_a_time_give_a_correct_answer(way: Way, stream):
    async with (
        ServerOverFakeNodes().open() as server,
        faulty(server.address, Fault("drip", way, 0)) as address,
    ):
        answer = await fetch(address, request("A", stream=stream, n=2))
    assert answer is not None
    assert texts(answer) == ["first last"] * 2


@pytest.mark.slow
async def test_real_server_is_idle_again_after_a_storm_of_faults():
    with real_server() as server:
        await storm_with_canary(server.address, range(600), expected=None)
        counts = await trio.to_thread.run_sync(server.wait_until_at_rest)
    assert set(counts.values()) == {0}
