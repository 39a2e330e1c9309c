"""Remote nodes: adding, draining and removing them, and three of them with different faults."""

import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import msgspec
import pytest
import trio

from fairlead.base.config import Config, HealthConfig, NodeConfig, QueueConfig
from fairlead.base.errors import FairleadError, InvalidRequest, NotFound
from fairlead.base.job import Job, Sampling
from fairlead.base.requester import Requester
from fairlead.router.fleet.fleet import Fleet
from nodes.listening import relayed_job, stub
from nodes.stub_server import StubServer, text
from router.fleet.running_fleet import (
    STUB,
    OpenFiles,
    RunningFleet,
    engine,
    free_port,
    running_fleet,
    sleeper,
)

# For servers that answer every probe, however late on a busy machine.
QUICK = HealthConfig(interval_s=0.05, failures=3, timeout_s=60.0)
# For a server that does not. The others must answer in this time, even on a busy machine.
SHORT_INTERVALS = HealthConfig(interval_s=0.05, failures=3, timeout_s=2.0)


def node(url: str, name: str = "far", **settings: object) -> NodeConfig:
    return NodeConfig(id=name, url=url, **settings)


def state(opened: RunningFleet, node_id: str = "far") -> str:
    (found,) = [status.state for status in opened.fleet.nodes() if status.id == node_id]
    return found


async def test_removed_node_finishes_its_jobs_and_can_be_added_again():
    async with stub() as server, running_fleet(health_check=QUICK) as opened:
        assert not opened.fleet.has("m")
        await opened.fleet.add_node(node(server.url))
        await opened.until(lambda: opened.fleet.has("m") and state(opened) == "up")
        assert opened.fleet.is_relayed("m")
        assert [status.kind for status in opened.fleet.models()] == ["remote"]
        begun = trio.Event()
        async with trio.open_nursery() as clients:
            slow = relayed_job(stub={"delay_s": 0.05})
            clients.start_soon(opened.run_job_and_return_error, slow, begun)
            await begun.wait()
            clients.start_soon(opened.fleet.remove_node, "far")
            await opened.until(lambda: state(opened) == "draining")
            assert opened.dispatcher.statistics().running == 1
        assert (opened.errors, opened.fleet.nodes()) == ([], [])
        assert not opened.fleet.has("m")
        await opened.fleet.add_node(node(server.url))
        await opened.until(lambda: state(opened) == "up")
        assert await opened.run_job(relayed_job()) == text()


async def test_query_of_a_nodes_url_is_sent_with_every_request_and_shown_nowhere(capsys):
    async with stub() as server, running_fleet(health_check=QUICK) as opened:
        configured = node(f"{server.url}?api-version=1&key=SECRET", models=("m", "broken"))
        await opened.fleet.add_node(configured)
        await opened.until(lambda: state(opened) == "up")
        assert await opened.run_job(relayed_job()) == text()
        await opened.run_job_and_return_error(relayed_job(stub={"how": "status", "after": 404}))
        assert {request.path.partition("?")[2] for request in server.requests} == {"api-version=1&key=SECRET"}
        (status,) = opened.fleet.nodes()
        assert status.remote.url == server.url
        shown = repr((opened.fleet.nodes(), opened.fleet.models(), opened.errors))
    assert opened.errors
    assert "SECRET" not in shown + "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("first", "second", "command_speaks", "expected"),
    [
        (("openai", "messages"), ("messages",), ("messages",), True),
        (("openai", "messages"), ("openai",), ("messages",), False),
        (("messages",), ("messages",), ("openai",), False),
    ],
)
async def test_dialect_of_a_model_is_one_that_all_its_servers_speak(first, second, command_speaks, expected):
    local = sleeper("m", dialects=command_speaks)
    async with stub() as server, stub() as other, running_fleet(local, health_check=QUICK) as opened:
        await opened.fleet.add_node(node(server.url, "first", models=("m", "more"), dialects=first))
        await opened.fleet.add_node(node(other.url, "second", models=("m",), dialects=second))
        assert opened.fleet.speaks("m", "messages") is expected
        assert opened.fleet.speaks("more", "messages")
        assert opened.fleet.speaks("of no node", "messages")


async def test_model_of_several_nodes_is_listed_with_a_node_that_is_up():
    async with (
        stub() as far,
        stub() as local_fast,
        running_fleet(engine("ours"), health_check=QUICK) as opened,
    ):
        for name, server in (("far", far), ("near", local_fast)):
            await opened.fleet.add_node(node(server.url, name))
        await opened.until(lambda: (state(opened), state(opened, "near")) == ("up", "up"))
        assert opened.fleet.model("m").node == "far"
        far.healthy = False
        await opened.until(lambda: state(opened) == "down")
        near_one = opened.fleet.model("m")
        assert (near_one.node, near_one.state, near_one.problem) == ("near", "ready", None)
        assert [status.model for status in opened.fleet.models()] == ["ours", "m"]
        local_fast.healthy = False
        await opened.until(lambda: state(opened, "near") == "down")
        assert (opened.fleet.model("m").state, opened.fleet.model("m").problem is None) == ("stopped", False)
        assert opened.fleet.model("ours").kind == "engine"
        assert opened.fleet.model("nobody") is None


async def test_drained_node_stays_listed_and_gets_no_job_even_after_recovery():
    async with stub() as server, running_fleet(health_check=QUICK, nodes=(node(server.url),)) as opened:
        await opened.until(lambda: state(opened) == "up")
        await opened.fleet.drain_node("far")
        assert state(opened) == "draining"
        server.healthy = False
        await opened.until(lambda: opened.fleet.nodes()[0].downs == 1)
        server.healthy = True
        await opened.until(lambda: opened.fleet.nodes()[0].ups == 2)
        assert opened.dispatcher.statistics().seats == 0
        assert state(opened) == "draining"


@asynccontextmanager
async def busy_node(how: str = "well") -> AsyncIterator[tuple[RunningFleet, trio.Nursery, StubServer]]:
    """Run a fleet with a remote node that runs one job until its server is released; another job waits."""
    async with stub() as server, running_fleet(health_check=QUICK, nodes=(node(server.url),)) as opened:
        await opened.until(lambda: state(opened) == "up")
        async with trio.open_nursery() as clients:
            clients.start_soon(opened.run_job_and_return_error, slow_job(how))
            await opened.until(lambda: posts(server) == 1)
            clients.start_soon(opened.run_job_and_return_error, relayed_job())
            await opened.until(lambda: opened.dispatcher.statistics().waiting == 1)
            yield opened, clients, server


def posts(server: StubServer) -> int:
    """Return how many jobs a server has received."""
    return sum(request.method == "POST" for request in server.requests)


def slow_job(how: str = "well") -> Job:
    """Return a job with a response that waits until the server is released."""
    return relayed_job(stream=False, stub={"how": how, "waits": True})


async def test_drained_node_finishes_its_jobs_and_queued_ones_use_another_node():
    async with stub() as other, busy_node() as (opened, clients, server):
        await opened.fleet.add_node(node(other.url, "other"))
        await opened.until(lambda: posts(other) == 1 and opened.dispatcher.statistics().running == 1)
        clients.start_soon(opened.run_job_and_return_error, slow_job())
        await opened.until(lambda: posts(other) == 2)
        clients.start_soon(opened.run_job_and_return_error, relayed_job())
        await opened.until(lambda: opened.dispatcher.statistics().waiting == 1)
        await opened.fleet.drain_node("far")
        assert opened.fleet.offers("m")
        assert opened.dispatcher.statistics().waiting == 1
        other.go.release()
        await opened.until(lambda: opened.dispatcher.statistics().waiting == 0)
        server.go.release()
    assert opened.errors == []


@pytest.mark.parametrize("how", ["drain", "remove"])
async def test_what_waits_for_the_only_node_ends_when_that_is_drained_or_removed(how):
    async with busy_node() as (opened, clients, server):
        if how == "drain":
            await opened.fleet.drain_node("far")
        else:
            clients.start_soon(opened.fleet.remove_node, "far")
        await opened.until(lambda: bool(opened.errors))
        assert [(error.status, error.code) for error in opened.errors] == [(503, "no_node")]
        assert opened.errors[0].message == "no node has the model m any more"
        assert not opened.fleet.offers("m")
        assert opened.dispatcher.statistics().running == 1  # the running job may finish
        server.go.release()
    assert len(opened.errors) == 1


async def test_job_that_a_drained_node_fails_ends_without_another_node():
    async with busy_node(how="half") as (opened, _, server):
        await opened.fleet.drain_node("far")
        await opened.until(lambda: len(opened.errors) == 1)
        with trio.fail_after(10):  # and not only after the queue timeout
            server.go.release()
            await opened.until(lambda: len(opened.errors) == 2)
    assert [error.code for error in opened.errors] == ["no_node", "no_node"]


async def test_job_for_a_changed_node_waits_until_the_node_is_added_again():
    async with busy_node() as (opened, _, server):
        changed = node(server.url, seats=2)
        await opened.fleet.reload(Config(models=(), health_check=QUICK, nodes=(changed,)))
        await opened.until(lambda: state(opened) == "draining")
        assert opened.fleet.offers("m")
        server.go.release()
    assert opened.errors == []


async def test_duplicate_and_unknown_node_ids_are_refused():
    async with stub() as server, running_fleet(engine(), health_check=QUICK) as opened:
        await opened.fleet.add_node(node(server.url))
        for taken in ("far", "engine:m"):
            with pytest.raises(InvalidRequest, match="already"):
                await opened.fleet.add_node(node(server.url, taken))
        with pytest.raises(NotFound):
            await opened.fleet.remove_node("near")
        with pytest.raises(NotFound):
            await opened.fleet.drain_node("near")
        with pytest.raises(InvalidRequest, match="is a local model"):
            await opened.fleet.drain_node("engine:m")
        with pytest.raises(InvalidRequest, match="is a local model"):
            await opened.fleet.remove_node("engine:m")


async def test_adding_this_server_as_its_own_node_is_refused():
    async with stub() as server, running_fleet(health_check=QUICK) as opened:
        server.health_body = {"status": "ok", "instance": opened.fleet.instance}
        with pytest.raises(InvalidRequest, match="this server itself") as refused:
            await opened.fleet.add_node(node(server.url))
        assert (refused.value.param, opened.fleet.nodes()) == ("url", [])
        # Its id is free again for a different server.
        server.health_body = {"status": "ok", "instance": "0" * 32}
        await opened.fleet.add_node(node(server.url))
        assert state(opened) == "up"


async def test_configured_node_that_is_this_server_stays_down_with_a_reason():
    async with stub() as server, running_fleet(health_check=QUICK) as opened:
        server.health_body = {"instance": opened.fleet.instance}
        nodes = (node(server.url, models=("m",)),)
        await opened.fleet.reload(Config(models=(), nodes=nodes, health_check=QUICK))
        await opened.until(lambda: len(server.requests) > QUICK.failures)
        (status,) = opened.fleet.nodes()
        assert (status.state, status.seats, status.ups) == ("down", 0, 0)
        assert status.problem == "it is this server itself"


@pytest.mark.parametrize(
    "health", [None, [], "ok", {"instance": None}, {"instance": 7}, {"instance": "other"}]
)
async def test_other_contents_of_a_health_response_are_ignored(health):
    async with stub() as server, running_fleet(health_check=QUICK) as opened:
        server.health_body = health
        await opened.fleet.add_node(node(server.url))
        assert state(opened) == "up"


async def test_node_that_becomes_this_server_goes_down():
    async with stub() as server, running_fleet(health_check=QUICK, nodes=(node(server.url),)) as opened:
        await opened.until(lambda: state(opened) == "up")
        server.health_body = {"instance": opened.fleet.instance}
        await opened.until(lambda: state(opened) == "down")
        assert opened.dispatcher.statistics().seats == 0


async def test_reload_adds_changes_and_removes_nodes():
    async with stub() as one, stub() as two, stub() as three:
        before = (node(one.url, "same"), node(one.url, "other"), node(one.url, "old"))
        after = (node(one.url, "same"), node(two.url, "other"), node(three.url, "new"))
        async with running_fleet(health_check=QUICK, nodes=before) as opened:
            await opened.until(lambda: all(status.state == "up" for status in opened.fleet.nodes()))
            changes = await opened.fleet.reload(Config(models=(), nodes=after, health_check=QUICK))
            assert (
                changes.nodes_added,
                changes.nodes_changed,
                changes.nodes_removed,
            ) == (("new",), ("other",), ("old",))
            urls = {"same": one.url, "other": two.url, "new": three.url}
            await opened.until(
                lambda: (
                    urls == {status.id: status.remote.url for status in opened.fleet.nodes()}
                    and all(status.state == "up" for status in opened.fleet.nodes())
                )
            )
            (same,) = [status for status in opened.fleet.nodes() if status.id == "same"]
            assert (same.ups, same.downs) == (1, 0)


async def test_reload_of_a_nodes_probes_keeps_the_node_and_its_streams():
    async with stub() as server:
        before = node(server.url, models=("m",))
        changed = node(
            server.url, models=("m",), check_endpoint="/other", health_check=HealthConfig(interval_s=0.02)
        )
        async with running_fleet(health_check=QUICK, nodes=(before,)) as opened:
            await opened.until(lambda: state(opened) == "up")
            begun = trio.Event()
            async with trio.open_nursery() as clients:
                slow = relayed_job(stub={"delay_s": 0.05})
                clients.start_soon(opened.run_job_and_return_error, slow, begun)
                await begun.wait()
                await opened.fleet.reload(Config(models=(), nodes=(changed,), health_check=QUICK))
                await opened.until(lambda: "/other" in {request.path for request in server.requests})
                assert (state(opened), opened.errors) == ("up", [])
                await opened.fleet.reload(Config(models=(), nodes=(before,), health_check=QUICK))
            (status,) = opened.fleet.nodes()
            assert (status.state, status.ups, status.downs, opened.errors) == ("up", 1, 0, [])


async def test_model_of_a_remote_node_cannot_be_loaded():
    async with stub() as server, running_fleet(health_check=QUICK, nodes=(node(server.url),)) as opened:
        await opened.until(lambda: state(opened) == "up")
        with pytest.raises(InvalidRequest, match="another server"):
            await opened.fleet.load("m")


# Three nodes with faults -------------------------------------------------------------------------------

WORDS = 12


@contextmanager
def servers(count: int) -> Iterator[list[tuple[subprocess.Popen[bytes], str]]]:
    """Start stub servers in processes of their own; kill them at the end."""
    ports = [free_port() for _ in range(count)]
    processes = [subprocess.Popen([*STUB, str(port)], stdout=subprocess.DEVNULL) for port in ports]
    try:
        yield [(process, f"http://127.0.0.1:{port}") for process, port in zip(processes, ports, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def repeatable(number: int, *, stream: bool) -> Job:
    """Return a greedy or seeded job; its second response is the same."""
    stub_options = {"words": WORDS, "chunk_words": 1, "delay_s": 0.02}
    job = relayed_job(stream=stream, request_id=f"r{number}", stub=stub_options)
    seeded = Sampling(max_tokens=WORDS, seed=number) if number % 2 else None
    return msgspec.structs.replace(
        job,
        id=f"job {number}",
        tenant=f"t{number % 7}",
        sampling=seeded or Sampling(max_tokens=WORDS, temperature=0),
    )


@pytest.mark.parametrize("streams", [60, pytest.param(200, marks=pytest.mark.nightly)])
async def test_no_response_is_lost_or_wrong_with_a_killed_a_stopped_and_a_slow_node(streams):
    plain = streams
    nothing = (0, 0)
    files = OpenFiles()
    with servers(3) as ((killed, killed_url), (stopped, stopped_url), (slow, slow_url)):
        nodes = (
            node(killed_url, "killed", seats=8),
            node(stopped_url, "stopped", seats=8),
            node(slow_url, "slow", seats=8),
        )
        queue = QueueConfig(capacity=500, timeout_s=60)
        async with running_fleet(health_check=SHORT_INTERVALS, nodes=nodes, queue=queue) as opened:
            await opened.until(lambda: all(status.state == "up" for status in opened.fleet.nodes()))
            texts: dict[int, str] = {}
            errors: list[FairleadError] = []

            async def run_job(number: int) -> None:
                job = repeatable(number, stream=number < streams)
                try:
                    texts[number] = await opened.run_job(job)
                except FairleadError as error:
                    errors.append(error)

            async def slow_down() -> None:
                """Let the server run only half of the time."""
                while True:
                    slow.send_signal(signal.SIGSTOP)
                    await trio.sleep(0.03)
                    slow.send_signal(signal.SIGCONT)
                    await trio.sleep(0.03)

            # A job has two attempts: one that loses an attempt to the first fault must not meet the second.
            all_requests = range(streams + plain)
            first, second = (
                [number for number in all_requests if number // 2 % 2 == wave] for wave in (0, 1)
            )
            async with trio.open_nursery() as fault_done:
                fault_done.start_soon(slow_down)
                async with trio.open_nursery() as clients:
                    for number in first:
                        clients.start_soon(run_job, number)
                    await opened.until(lambda: opened.dispatcher.statistics().running == 24)
                    await opened.until(
                        lambda: len(texts) > 5 and opened.dispatcher.scheduler.node_counts("stopped").busy > 0
                    )
                    stopped.send_signal(signal.SIGSTOP)
                await opened.until(lambda: state(opened, "stopped") == "down")
                async with trio.open_nursery() as clients:
                    for number in second:
                        clients.start_soon(run_job, number)
                    await opened.until(lambda: opened.dispatcher.statistics().running == 16)
                    done = len(texts) + 5
                    await opened.until(
                        lambda: (
                            len(texts) > done and opened.dispatcher.scheduler.node_counts("killed").busy > 0
                        )
                    )
                    killed.kill()
                fault_done.cancel_scope.cancel()
            slow.send_signal(signal.SIGCONT)

            assert errors == []
            expected = text(WORDS)
            assert {expected} == {texts[number] for number in range(streams)}
            assert streams + plain == len(texts)
            counts = opened.dispatcher.statistics()
            assert nothing == (counts.waiting, counts.running)
            assert [status.busy for status in opened.fleet.nodes()] == [0, 0, 0]
            # Two failed nodes do not take the healthy one down.
            assert state(opened, "slow") == "up"
    await files.are_no_more()


# Restricted addresses -------------------------------------------------------------------------------

BY = Requester("ana", "key-1", "request-1")
NAMES = {"innocent.example": ["10.0.0.2", "169.254.169.254"], "mapped.example": ["::ffff:169.254.169.254"]}


async def look_up(host: str, _port: int) -> list[str]:
    await trio.lowlevel.checkpoint()
    if host not in NAMES:
        raise OSError("no such name")
    return NAMES[host]


@pytest.mark.parametrize(
    "url",
    [
        *("http://169.254.169.254", "http://169.254.7.7:8000/v1", "http://[fe80::1]:80"),
        *("http://[::ffff:169.254.169.254]", "http://100.100.100.200", "http://[fd00:ec2::254]"),
        *("http://metadata.google.internal", "https://Metadata.Google.Internal./x"),
        *("http://innocent.example", "http://mapped.example:8080"),
    ],
)
async def test_node_that_a_client_adds_is_at_no_link_local_or_metadata_address(monkeypatch, url):
    monkeypatch.setattr("router.fleet.running_fleet.Fleet", partial(Fleet, lookup=look_up))
    async with running_fleet() as opened:
        with pytest.raises(InvalidRequest, match=r"^url: .* link-local or metadata address") as refused:
            await opened.fleet.add_node(node(url), by=BY)
        assert refused.value.param == "url"
        assert opened.fleet.nodes() == []


@pytest.mark.parametrize(
    "host", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "0xa9.254.0xa9.0376", "169.254.43518"]
)
async def test_other_spellings_of_an_address_are_refused_as_they_are_resolved(host):
    async with running_fleet() as opened:
        with pytest.raises(InvalidRequest, match="link-local or metadata"):
            await opened.fleet.add_node(node(f"http://{host}"), by=BY)


async def test_configuration_may_name_a_restricted_address_which_clients_may_then_use(monkeypatch):
    monkeypatch.setattr("router.fleet.running_fleet.Fleet", partial(Fleet, lookup=look_up))
    configured = node("http://innocent.example:1", "configured", models=("m",))
    async with running_fleet(nodes=(configured,), health_check=QUICK) as opened:
        with trio.move_on_after(0.5):
            await opened.fleet.add_node(node("http://INNOCENT.example:1/v1", "again", models=("m",)), by=BY)
        assert {status.id for status in opened.fleet.nodes()} == {"configured", "again"}
        with pytest.raises(InvalidRequest, match="link-local"):
            await opened.fleet.add_node(node("http://innocent.example:2", "port"), by=BY)


async def test_node_with_a_name_that_later_has_a_restricted_address_gets_nothing(monkeypatch):
    restricted: set[str] = set()
    monkeypatch.setattr("fairlead.nodes.http.links.is_restricted", lambda address: address in restricted)
    async with stub() as server, running_fleet(health_check=QUICK) as opened:
        await opened.fleet.add_node(node(server.url), by=BY)
        await opened.fleet.add_node(node(server.url, "own"))
        await opened.until(lambda: {state(opened), state(opened, "own")} == {"up"})
        restricted.add("127.0.0.1")
        for entry in opened.fleet.remote_entries():
            entry._node._upstream.close()
        await opened.until(lambda: state(opened) == "down")
        assert state(opened, "own") == "up"
