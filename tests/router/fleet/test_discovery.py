"""Nodes by DNS: which nodes there are after each answer, and in a fleet with a real server."""

from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from fairlead.base.config import Config, ConfigError, HealthConfig, NodeConfig
from fairlead.base.errors import InvalidRequest
from fairlead.router.fleet import discovery
from fairlead.router.fleet.discovery import INTERVAL_S, MAX_NODES, NodeDiscovery
from fairlead.router.fleet.fleet import Fleet
from nodes.listening import relayed_job, stub
from nodes.stub_server import text
from router.fleet.running_fleet import running_fleet

CONFIG = NodeConfig(id="pods", url="dns+http://nodes.example:8000/base", seats=3, api_key="k")


class Names:
    """A resolver: each lookup gets the next answer, and the last one again and again."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def look_up(self, host, port):
        self.asked.append((host, port))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


class Nodes:
    """The nodes that were added and not removed. One whose jobs are not `finished` stays."""

    def __init__(self):
        self.configs = {}
        self.finished = trio.Event()
        self.finished.set()

    def add(self, config):
        assert config.id not in self.configs
        self.configs[config.id] = config

    async def remove(self, node_id):
        await self.finished.wait()
        del self.configs[node_id]


@asynccontextmanager
async def running(*answers):
    async with trio.open_nursery() as nursery:
        nodes, names = Nodes(), Names(*answers)
        found = NodeDiscovery(
            CONFIG, add=nodes.add, remove=nodes.remove, spawn=nursery.start_soon, lookup=names.look_up
        )
        nursery.start_soon(found.run)
        await trio.sleep(0.1)  # after the first lookup
        yield found, nodes, names
        nursery.cancel_scope.cancel()


async def test_each_address_is_a_node_with_the_settings_of_its_name(autojump_clock):
    async with running(["10.0.0.1", "fd00::1"]) as (_, nodes, names):
        assert names.asked == [("nodes.example", 8000)]
        assert {config.id: config.url for config in nodes.configs.values()} == {
            "pods-10.0.0.1": "http://10.0.0.1:8000/base",
            "pods-fd00::1": "http://[fd00::1]:8000/base",
        }
        assert {(config.seats, config.api_key) for config in nodes.configs.values()} == {(3, "k")}


async def test_new_address_is_added_and_one_that_is_missing_twice_is_removed(autojump_clock):
    async with running(["1.1.1.1"], ["1.1.1.1", "2.2.2.2"], ["2.2.2.2"], ["2.2.2.2"]) as (_, nodes, _names):
        seen = []
        for _ in range(4):
            seen.append([node_id.removeprefix("pods-") for node_id in nodes.configs])
            await trio.sleep(INTERVAL_S)
        assert seen == [["1.1.1.1"], ["1.1.1.1", "2.2.2.2"], ["1.1.1.1", "2.2.2.2"], ["2.2.2.2"]]


async def test_address_that_is_missing_once_stays(autojump_clock):
    async with running(["1.1.1.1"], [], ["1.1.1.1"], [], ["1.1.1.1"]) as (_, nodes, names):
        await trio.sleep(10 * INTERVAL_S)
        assert (list(nodes.configs), len(names.asked)) == (["pods-1.1.1.1"], 11)


async def test_failed_lookup_changes_nothing_however_often_it_fails(autojump_clock):
    async with running(["1.1.1.1"], OSError("no such name")) as (_, nodes, names):
        await trio.sleep(10 * INTERVAL_S)
        assert (list(nodes.configs), len(names.asked)) == (["pods-1.1.1.1"], 11)


async def test_name_without_an_address_at_first_is_looked_up_again(autojump_clock):
    async with running(OSError("no such name"), ["1.1.1.1"]) as (_, nodes, _names):
        assert list(nodes.configs) == []
        await trio.sleep(INTERVAL_S)
        assert list(nodes.configs) == ["pods-1.1.1.1"]


async def test_address_that_comes_back_while_its_node_finishes_jobs_is_added_afterwards(autojump_clock):
    async with running(["1.1.1.1"], [], [], ["1.1.1.1"]) as (_, nodes, _names):
        nodes.finished = trio.Event()
        first = nodes.configs["pods-1.1.1.1"]
        await trio.sleep(5 * INTERVAL_S)
        assert nodes.configs["pods-1.1.1.1"] is first
        nodes.finished.set()
        await trio.sleep(INTERVAL_S)
        assert nodes.configs["pods-1.1.1.1"] is not first


async def test_closing_removes_all_nodes_and_ends_lookups(autojump_clock):
    async with running(["1.1.1.1", "2.2.2.2"]) as (found, nodes, names):
        await found.close()
        await trio.sleep(10 * INTERVAL_S)
        assert (nodes.configs, len(names.asked)) == ({}, 1)


async def test_number_of_nodes_of_a_name_is_bounded(autojump_clock):
    addresses = [f"10.0.{number // 256}.{number % 256}" for number in range(MAX_NODES + 5)]
    async with running(addresses) as (_, nodes, _names):
        assert len(nodes.configs) == MAX_NODES


async def test_addresses_of_a_real_name_are_found():
    assert "127.0.0.1" in await discovery.look_up("localhost", 80)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"url": "dns+https://name:1"}, "must begin with dns\\+http://"),
        ({"url": "dns+http://"}, "must be a URL"),
        ({"url": "dns+http://name:1", "id": "x" * 128}, "must be 1 to 82 characters"),
    ],
)
def test_url_that_cannot_be_looked_up_is_refused(settings, fault):
    with pytest.raises(ConfigError, match=fault):
        NodeConfig(**({"id": "n"} | settings))


async def test_fleet_uses_the_node_that_is_found_and_waits_when_it_is_gone(monkeypatch):
    monkeypatch.setattr(discovery, "INTERVAL_S", 0.02)
    async with stub() as server:
        port = server.url.rpartition(":")[2]
        names = Names(["127.0.0.1"])
        monkeypatch.setattr("router.fleet.running_fleet.Fleet", partial(Fleet, lookup=names.look_up))
        config = NodeConfig(id="pods", url=f"dns+http://name.example:{port}")
        health = HealthConfig(interval_s=0.05, failures=3, timeout_s=60.0)
        async with running_fleet(nodes=(config,), health_check=health) as opened:
            await opened.until(lambda: opened.fleet.has("m"))
            assert [status.id for status in opened.fleet.nodes()] == ["pods-127.0.0.1"]
            assert await opened.run_job(relayed_job()) == text()
            with pytest.raises(InvalidRequest, match="only a configuration"):
                await opened.fleet.add_node(NodeConfig(id="more", url="dns+http://name"))
            names.answers = [[]]
            await opened.until(lambda: not opened.fleet.nodes())
            names.answers = [["127.0.0.1"]]
            await opened.until(lambda: opened.fleet.has("m"))
            await opened.fleet.reload(Config(models=()))
            await opened.until(lambda: not opened.fleet.nodes())
