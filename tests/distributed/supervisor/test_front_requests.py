"""A front reports how its requests to remote nodes end, and ends those to a server found dead by probes."""

import shutil
from contextlib import suppress
from math import inf
from types import SimpleNamespace

import msgspec
import pytest
import trio

from distributed.supervisor.running_server import CHAT, RunningServer, running
from distributed.supervisor.test_takeover_state import remote, state
from fairlead.base.config import Config, HealthConfig, NodeConfig
from fairlead.base.errors import NodeFailed
from fairlead.distributed.supervisor.fleet_state import state_of
from fairlead.distributed.supervisor.front_nodes import SUCCESS_S, FrontNodes
from nodes.listening import CollectedDeltas, generated, relayed_job, stub, tls_contexts
from nodes.scripted import full_response
from nodes.stub_server import StubServer, stream_events, text
from router.fleet.running_fleet import running_fleet

INTERVAL_S = 0.5
CATALOG = SimpleNamespace(
    texts={}, config=Config(models=(), health_check=HealthConfig(interval_s=INTERVAL_S))
)


def front_nodes(nursery, **options):
    return FrontNodes("front", CATALOG, nursery, trio.lowlevel.checkpoint, **options)


def found_dead(server, died_s=0.0, **more):
    return state(msgspec.structs.replace(remote(server.url), deaths=1, died_s=died_s, **more))


async def test_jobs_of_a_server_that_was_found_dead_end_unless_it_sends(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server, trio.open_nursery() as nursery:
        nodes = front_nodes(nursery)
        nodes.update(state(remote(server.url)))
        deltas = CollectedDeltas()
        async with nodes.find("far").generate(relayed_job(stub={"how": "stall", "after": 3}), deltas):
            await deltas.first.wait()
            nodes.update(found_dead(server, is_dead=True))  # it handles one request at a time, and sends
            await trio.sleep(INTERVAL_S / 2)
            assert deltas.error is None
            nodes.update(state(remote(server.url)))
            await trio.sleep(2 * INTERVAL_S)
            assert deltas.error is None  # it is silent, but lives
            nodes.update(found_dead(server, is_dead=True))
            await deltas.over.wait()
        assert isinstance(deltas.error, NodeFailed)
        assert deltas.error.message == "far is down: it does not answer its probes"
        nodes.update(state(remote(server.url)))
        assert (await generated(nodes.find("far"), relayed_job())).text() == text()
        nodes.update(state())  # closes the connections
        nursery.cancel_scope.cancel()


async def test_jobs_of_a_server_that_was_dead_between_two_states_end_and_later_ones_do_not(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server, trio.open_nursery() as nursery:
        nodes = front_nodes(nursery)
        nodes.update(state(remote(server.url)))
        earlier, later = CollectedDeltas(), CollectedDeltas()
        stalls = relayed_job(stub={"how": "stall", "after": 3})
        async with nodes.find("far").generate(stalls, earlier):
            await earlier.first.wait()
            await trio.sleep(10)
            async with nodes.find("far").generate(relayed_job(stub={"how": "silent"}), later):
                await trio.sleep(1)
                nodes.update(found_dead(server, died_s=2.0))
                await earlier.over.wait()
                assert later.error is None
                await trio.sleep(1)
                nodes.update(found_dead(server, died_s=0.0))  # the same death: only its age is other
                await trio.sleep(1)
                assert later.error is None
        assert earlier.error.message == "far is down: it does not answer its probes"
        nodes.update(state())
        nursery.cancel_scope.cancel()


async def test_front_sends_as_many_requests_at_a_time_as_the_dispatcher_grants():
    async with stub() as server, trio.open_nursery() as nursery:
        nodes = front_nodes(nursery)
        nodes.update(state(remote(server.url)))
        jobs = 20
        async with trio.open_nursery() as clients:
            for _ in range(jobs):
                clients.start_soon(generated, nodes.find("far"), relayed_job(stub={"waits": True}))
            with trio.fail_after(20):
                while len(server.jobs) < jobs:  # noqa: ASYNC110  the stub sends no event
                    await trio.sleep(0.01)
            for _ in range(jobs):
                server.go.release()
        nodes.update(state())
        nursery.cancel_scope.cancel()


async def test_state_has_the_deaths_of_a_node():
    processes = SimpleNamespace(engines={}, commands={})
    health = HealthConfig(interval_s=0.05, failures=2, timeout_s=60.0)
    async with stub() as server:
        node = NodeConfig(id="far", url=server.url, models=("m",))
        async with running_fleet(nodes=(node,), health_check=health) as opened:

            def far():
                return state_of(opened.fleet, opened.dispatcher, processes).remote[0]

            await opened.until(lambda: opened.fleet.nodes()[0].state == "up")
            assert (far().is_dead, far().deaths, far().died_s) == (False, 0, inf)
            for death in (1, 2):
                server.refuses = True
                await opened.until(lambda: far().is_dead)
                assert far().deaths == death
                server.refuses = False
                await opened.until(lambda: opened.fleet.nodes()[0].state == "up")
                before = far().died_s
                assert (far().is_dead, far().deaths) == (False, death)
                await trio.sleep(0.1)
                assert far().died_s >= before + 0.1


async def test_front_reports_failed_connections_and_the_first_success_after_them(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    reports = []
    async with stub() as server, trio.open_nursery() as nursery:
        nodes = front_nodes(nursery, on_request=lambda *report: reports.append(report))
        nodes.update(state(remote(server.url)))
        hows = ["gone", "status", "well", "broken", "reset", "well", "well"]
        for how in hows:
            await generated(
                nodes.find("far"), relayed_job(stub={"how": how, "after": 502 if how == "status" else 0})
            )
        outcomes = ["failed", "succeeded", "progressed", "failed", "failed", "progressed", "succeeded"]
        assert reports == [("far", outcome, relayed_job().tenant) for outcome in outcomes]
        await trio.sleep(SUCCESS_S)
        await generated(nodes.find("far"), relayed_job())
        assert [outcome for _, outcome, _ in reports[7:]] == ["progressed", "succeeded"]
        nodes.update(state())
        nursery.cancel_scope.cancel()


class Clients:
    """Clients of a server, whose only node is a stub."""

    def __init__(self, server: RunningServer, stub: StubServer) -> None:
        self.server = server
        self.stub = stub
        self.answers: list[str] = []

    async def post(self, stream: bool = False, **how: object) -> str:
        body = {"model": "m", "messages": [], "stream": stream, "stub": how}
        response = await self.server.post(CHAT, body)
        return response.text

    async def keep_answer(self, stream: bool) -> None:
        self.answers.append(await self.post(stream, waits=True, after=4))

    async def until_sent(self, requests: int) -> None:
        """Wait until the node has got so many requests that wait."""
        with trio.fail_after(20):
            while sum("waits" in job.stub for job in self.stub.jobs) < requests:  # noqa: ASYNC110  it sends no event
                await trio.sleep(0.02)

    async def until_node(self, **expected: object) -> None:
        """Wait until `GET /nodes` has these values of the node."""
        with trio.fail_after(20):
            while not expected.items() <= (await self.server.get("/nodes"))[0].items():  # noqa: ASYNC110
                await trio.sleep(0.05)


@pytest.mark.slow
async def test_failing_requests_of_one_front_stop_new_jobs_and_only_probes_end_running_ones():
    streams = 6
    async with stub() as far:
        node = NodeConfig(id="far", url=far.url, models=("m",), seats=streams + 1)
        health = HealthConfig(interval_s=0.2, failures=2, timeout_s=60.0)
        async with running(2, slots={}, nodes=(node,), health_check=health) as server:
            clients = Clients(server, far)
            await clients.until_node(state="up")
            async with trio.open_nursery() as nursery:
                for _ in range(streams):
                    nursery.start_soon(clients.keep_answer, True)
                await clients.until_sent(streams)
                for status in (500, 502, 504):
                    for _ in range(3):
                        assert "node_failed" in await clients.post(how="status", after=status)
                assert (await server.get("/nodes"))[0]["downs"] == 0
                for _ in range(4):
                    assert "node_failed" in await clients.post(how="gone")
                await clients.until_node(state="up")
                found = (await server.get("/nodes"))[0]
                assert found["downs"] > 0
                assert found["busy"] == streams
                for _ in range(streams):
                    far.go.release()
            assert [answer.count("data: [DONE]") for answer in clients.answers] == [1] * streams
            assert len([job for job in far.jobs if "waits" in job.stub]) == streams
            await _end_by_probes(clients, far)


async def _end_by_probes(clients: Clients, far: StubServer) -> None:
    """Let the server take no connections until a job that it has is sent again."""
    sent = len([job for job in far.jobs if "waits" in job.stub])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clients.keep_answer, False)
        await clients.until_sent(sent + 1)
        far.refuses = True
        await clients.until_node(state="down")
        far.refuses = False
        await clients.until_sent(sent + 2)
        for _ in range(2):
            far.go.release()
    assert text() in clients.answers[-1]


async def test_change_of_a_nodes_probes_keeps_the_node():
    async with trio.open_nursery() as nursery:
        nodes = front_nodes(nursery)
        before = remote("http://127.0.0.1:1")
        nodes.update(state(before))
        found = nodes.find("far")
        config = msgspec.structs.replace(before.config, check_endpoint="/x", health_check=HealthConfig())
        nodes.update(state(msgspec.structs.replace(before, config=config)))
        assert nodes.find("far") is found
        config = msgspec.structs.replace(config, api_key="sk-other")
        nodes.update(state(msgspec.structs.replace(before, config=config)))
        assert nodes.find("far") is not found
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes a certificate")
@pytest.mark.parametrize("has_file", [True, False])
async def test_front_trusts_the_authorities_of_a_node(tmp_path, has_file):
    context, _ = tls_contexts(tmp_path)
    authorities = str(tmp_path / "certificate.pem") if has_file else None
    answer = full_response(b"".join(stream_events(CHAT, {}, 2, 1)), "text/event-stream", "Connection: close")

    async def serve(stream):
        async with trio.SSLStream(stream, context, server_side=True, https_compatible=True) as secure:
            with suppress(trio.BrokenResourceError):
                await secure.receive_some()
                await secure.send_all(answer)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        far = remote(f"https://localhost:{listeners[0].socket.getsockname()[1]}")
        nodes = front_nodes(nursery)
        config = msgspec.structs.replace(far.config, ca_file=authorities)
        nodes.update(state(msgspec.structs.replace(far, config=config)))
        error = (await generated(nodes.find("far"), relayed_job())).error
        nursery.cancel_scope.cancel()
    assert error is None if has_file else "certificate" in error.message
