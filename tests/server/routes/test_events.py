"""`GET /events`: what watchers receive and when, how many there may be, and cleanup after a disconnect."""

import json
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest
import trio
from quart.globals import request_ctx
from quart_trio import QuartTrio

from fairlead.base.config import ApiKey, Limits
from fairlead.generation.metrics.job_metrics import JobMetrics
from fairlead.generation.metrics.snapshot import Snapshot
from fairlead.generation.metrics.totals import QueueTotals, TokenTotals
from fairlead.router.fleet.status import ModelStatus
from fairlead.server.listener import connection
from fairlead.server.routes import events
from fairlead.server.routes.events import MAX_CLIENTS, POLL_INTERVAL_S, Events, SnapshotCache, SnapshotStream
from fairlead.server.routes.exchange import Exchange, FairleadRequest, quart_response
from fairlead.server.routes.history import DURATION_S, INTERVAL_S, History, totals_of
from fairlead.server.routes.request import Request
from server.routes.conftest import FakeGateway, hello_world
from server.routes.raw_http import get, serving


class Server:
    """A source of snapshots that counts how many are taken. Its clock is Trio's."""

    def __init__(self) -> None:
        self.waiting = 0
        self.taken = 0
        self.draining = False

    def take(self) -> Snapshot:
        self.taken += 1
        return Snapshot(
            at_s=trio.current_time(),
            ready=True,
            queue=QueueTotals(waiting=self.waiting, running=1, capacity=100, seats=1, oldest_wait_s=2.5),
            answered=7,
            rejected={"queue_full": 2, "no_queue": 1},
            failed={},
            tokens=TokenTotals(prompt=10, generated=20, prompt_per_s=0.5, generated_per_s=1.5),
            cache_usage=0.25,
            models=(ModelStatus(model="small", kind="engine", node="engine:small", state="ready"),),
            nodes=(),
        )

    def watch(self, snapshots: SnapshotCache | None = None, history: History | None = None) -> SnapshotStream:
        scoped = (snapshots or SnapshotCache(self.take)).of(None)
        return SnapshotStream(scoped, history or History(self.take), lambda: self.draining)


@dataclass
class CountingGateway(FakeGateway):
    """Has the statistics of a gateway without jobs."""

    def statistics(self):
        return JobMetrics().statistics()


def parsed(body: bytes) -> list[tuple[str, dict]]:
    """Return the events in a body: names and values."""
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    lines = [block.split("\n") for block in blocks]
    return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in lines]


async def snapshots_within(watch: SnapshotStream, seconds: float) -> list[tuple[float, dict]]:
    """Return the snapshots, with their times, that a watcher which always reads gets in that time."""
    snapshots = []
    with trio.move_on_after(seconds):
        async for piece in watch:
            snapshots += [
                (trio.current_time(), value) for event, value in parsed(piece) if event == "snapshot"
            ]
    return snapshots


# Events and their times -----------------------------------------------------------------------------


async def test_event_stream_begins_with_the_history_and_a_snapshot(autojump_clock):
    server = Server()
    history = History(server.take)
    with trio.move_on_after(60):
        await history.run()
    began = trio.current_time()
    (first, kept), (second, snapshot) = parsed(await anext(server.watch(history=history)))
    assert began == trio.current_time()
    assert (first, second) == ("history", "snapshot")
    assert kept["every_s"] == INTERVAL_S
    assert [began - 60 + INTERVAL_S * row for row in range(30)] == pytest.approx(kept["columns"]["at_s"])
    assert {name: column for name, column in kept["columns"].items() if name != "at_s"} == {
        "waiting": [0] * 30,
        "running": [1] * 30,
        "oldest_wait_s": [2.5] * 30,
        "rejected": [3] * 30,
        "tokens_per_s": [1.5] * 30,
        "cache_usage": [0.25] * 30,
    }
    assert {name: snapshot["queue"][name] for name in ("waiting", "running", "capacity", "seats")} == {
        "waiting": 0,
        "running": 1,
        "capacity": 100,
        "seats": 1,
    }
    assert [model["model"] for model in snapshot["models"]] == ["small"]


async def test_without_changes_there_is_one_snapshot_a_second(autojump_clock):
    snapshots = await snapshots_within(Server().watch(), 60.1)
    assert len(snapshots) == 61


async def test_change_is_sent_within_a_quarter_of_a_second(autojump_clock):
    server = Server()
    snapshots = []
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            snapshots.extend(await snapshots_within(server.watch(), 60))

        nursery.start_soon(read)
        changed = {}
        for waiting in range(1, 20):
            await trio.sleep(2.7182)
            server.waiting = waiting
            changed[waiting] = trio.current_time()
    received: dict[int, float] = {}
    for at, snapshot in snapshots:
        received.setdefault(snapshot["queue"]["waiting"], at)
    delays = [received[waiting] - at for waiting, at in changed.items()]
    assert max(delays) <= 0.25
    assert min(delays) > 0


async def test_with_constant_changes_there_are_only_four_snapshots_a_second(autojump_clock):
    server = Server()

    async def change() -> None:
        while True:
            server.waiting += 1
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        snapshots = await snapshots_within(server.watch(), 10.1)
        nursery.cancel_scope.cancel()
    assert len(snapshots) == 41


async def test_a_hundred_watchers_need_as_many_snapshots_as_one(autojump_clock):
    server = Server()
    snapshots = SnapshotCache(server.take)
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(snapshots_within, server.watch(snapshots), 10.1)
    assert server.taken == 41


async def test_slow_reader_gets_the_current_snapshot_and_none_are_buffered(autojump_clock):
    server = Server()
    watch = server.watch()
    await anext(watch)
    taken = server.taken
    for waiting in range(1, 4):
        await trio.sleep(3600)
        server.waiting = waiting
    assert taken == server.taken
    ((_, snapshot),) = parsed(await anext(watch))
    assert snapshot["queue"]["waiting"] == 3


async def test_server_that_drains_ends_the_stream(autojump_clock):
    server = Server()
    async with trio.open_nursery() as nursery:

        async def drain() -> None:
            await trio.sleep(5)
            server.draining = True

        nursery.start_soon(drain)
        began = trio.current_time()
        snapshots = [piece async for piece in server.watch()]
    assert pytest.approx(trio.current_time() - began, abs=2 * POLL_INTERVAL_S) == 5
    assert 5 <= len(snapshots) <= 6


async def test_output_of_commands_is_not_shown_and_is_no_change(autojump_clock):
    shown = Server().take()
    (model,) = shown.models
    printed = []

    def take() -> Snapshot:
        printed.append("password=1")
        return msgspec.structs.replace(shown, models=(msgspec.structs.replace(model, output=tuple(printed)),))

    scoped = SnapshotCache(take).of(None)
    scoped.update()
    await trio.sleep(1)
    scoped.update()
    assert (len(printed), scoped.changes) == (2, 1)
    assert b"password" not in scoped.event


# The history ----------------------------------------------------------------------------------------


async def test_history_is_limited_to_ten_minutes(autojump_clock):
    server = Server()
    history = History(server.take)
    with trio.move_on_after(3 * 3600):
        await history.run()
    columns = history.columns()
    assert {round(DURATION_S / INTERVAL_S) + 1} == {len(column) for column in columns.values()}
    assert pytest.approx(columns["at_s"][-1] - columns["at_s"][0]) == DURATION_S
    assert trio.current_time() - columns["at_s"][-1] <= INTERVAL_S


async def test_failed_snapshot_leaves_a_gap_in_the_history(autojump_clock, log):
    server = Server()

    def take() -> Snapshot:
        snapshot = server.take()
        if 3 <= server.taken < 5:
            raise ZeroDivisionError
        return snapshot

    history = History(take)
    began = trio.current_time()
    with trio.move_on_after(9 * INTERVAL_S + 0.1):
        await history.run()
    assert [(at - began) / INTERVAL_S for at in history.columns()["at_s"]] == [0, 1, 4, 5, 6, 7, 8, 9]
    assert [entry["event"] for entry in log] == ["snapshot failed"] * 2


async def test_row_has_totals_only(autojump_clock):
    """Watchers must not learn about jobs of other users."""
    assert (totals_of(Server().take()).__struct_fields__) == (
        "at_s",
        "waiting",
        "running",
        "oldest_wait_s",
        "rejected",
        "tokens_per_s",
        "cache_usage",
    )


async def test_history_is_kept_from_the_apps_start_to_its_end(watchable, autojump_clock):
    client = watchable()
    to_app, from_test = trio.open_memory_channel(1)
    messages = []

    async def note(message) -> None:
        messages.append(message["type"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(client.app, {"type": "lifespan", "asgi": {}}, from_test.receive, note))
        await to_app.send({"type": "lifespan.startup"})
        await trio.sleep(10.5 * INTERVAL_S)
        disconnected, pieces = trio.Event(), []
        nursery.start_soon(partial(client.get, "/events", disconnected=disconnected, pieces=pieces))
        await trio.sleep(0.1)
        disconnected.set()
        await to_app.send({"type": "lifespan.shutdown"})
    assert messages == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    (_, history), _ = parsed(pieces[0])
    assert len(history["columns"]["at_s"]) == 11


# Watchers -------------------------------------------------------------------------------------------


@pytest.fixture
def watchable(client_with):
    """A function that returns a client of an application with statistics in its gateway."""
    return lambda *api_keys, **changes: client_with(
        *api_keys, gateway=CountingGateway(hello_world), **changes
    )


async def test_events_route_reports_the_queue_statistics(watchable, autojump_clock):
    client = watchable(queue_statistics=lambda: {"waiting": 5, "running": 3, "capacity": 100, "seats": 3})
    disconnected, pieces = trio.Event(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(client.get, "/events", disconnected=disconnected, pieces=pieces))
        await trio.sleep(3.1)
        disconnected.set()
    received = parsed(b"".join(pieces))
    assert [event for event, _ in received] == ["history"] + ["snapshot"] * 4
    assert {
        (value["queue"]["waiting"], value["queue"]["running"])
        for event, value in received
        if event == "snapshot"
    } == {(5, 3)}


async def test_events_have_the_content_type_that_browsers_require(watchable, autojump_clock):
    client, disconnected, replies = watchable(), trio.Event(), []

    async def watch() -> None:
        replies.append(await client.get("/events", disconnected=disconnected))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.sleep(1.5)
        disconnected.set()
    assert [reply.headers["content-type"] for reply in replies] == ["text/event-stream"]


async def test_watchers_are_bounded_and_a_disconnect_frees_a_place(watchable, autojump_clock):
    client = watchable()
    leaving = [trio.Event() for _ in range(MAX_CLIENTS)]
    async with trio.open_nursery() as nursery:
        for disconnected in leaving:
            nursery.start_soon(partial(client.get, "/events", disconnected=disconnected))
        await trio.sleep(2)
        refused = await client.get("/events")
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert refused.headers["retry-after"] == "10"

        leaving[7].set()
        await trio.sleep(1)
        again, pieces = trio.Event(), []
        nursery.start_soon(partial(client.get, "/events", disconnected=again, pieces=pieces))
        await trio.sleep(1)
        assert pieces
        assert (await client.get("/events")).status == 429
        for disconnected in (*leaving, again):
            disconnected.set()


async def test_head_request_takes_no_place(watchable, autojump_clock):
    client = watchable()
    for _ in range(2 * MAX_CLIENTS):
        assert (await client.send("HEAD", "/events", b"")).status == 200


async def test_watching_needs_the_key(watchable, autojump_clock):
    client = watchable(ApiKey(key="sesame"))
    refused = await client.get("/events")
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    disconnected, pieces = trio.Event(), []
    async with trio.open_nursery() as nursery:
        key = {"Authorization": "Bearer sesame"}
        nursery.start_soon(
            partial(client.get, "/events", headers=key, disconnected=disconnected, pieces=pieces)
        )
        await trio.sleep(1)
        disconnected.set()
    assert pieces


# Over sockets ---------------------------------------------------------------------------------------


def served(watched: Events) -> QuartTrio:
    class App(QuartTrio):
        asgi_http_class = Exchange
        request_class = FairleadRequest

    app = App("test")
    app.config["RESPONSE_TIMEOUT"] = None

    @app.get("/events")
    async def route():
        request = Request({"method": "GET", "path": "/events", "headers": []}, trio.lowlevel.checkpoint)
        request.nursery = request_ctx.request.nursery
        return quart_response(await watched.events(request))

    return app


async def until(condition) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110  # no event is set when this state changes
            await trio.sleep(0.01)


async def test_connection_of_a_client_that_does_not_read_is_closed_and_freed(monkeypatch):
    monkeypatch.setattr(events, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(events, "MAX_SILENCE_S", 0.0)
    watched = Events(Server().take, lambda: False)
    async with serving(served(watched), Limits(stall_s=0.3)) as server:
        client = await server.connect()
        await client.send(get("/events"))
        await until(lambda: watched._clients == 1)
        await until(lambda: watched._clients == 0)
        assert not (await client.answer()).is_complete


async def test_server_that_shuts_down_does_not_wait_for_watchers(monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.1)  # the client does not close its connection
    looked_at = Server()
    watched = Events(looked_at.take, lambda: looked_at.draining)
    async with serving(served(watched), Limits(drain_s=3600)) as server:
        client = await server.connect()
        await client.send(get("/events"))
        await until(lambda: watched._clients == 1)
        looked_at.draining = True
        server.shutdown.set()
        await server.ended.wait()
        assert (await client.answer()).is_complete
    assert watched._clients == 0
