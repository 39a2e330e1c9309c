"""Clients that disconnect, stall or send no complete request, and a listener that shuts down."""

from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from fairlead.base.config import Limits
from fairlead.server.listener import connection
from fairlead.server.listener.protocol import PIPELINED_BYTES
from server.routes.raw_http import SHORT, Apps, get, post, reply, serving

# Disconnects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        get("/wait"),
        get("/wait") + b"\r\n",
        get("/wait") + get("/next"),
        post(b"a body", "/wait"),
        post(b"a body", "/wait") + b"\r\n",
        post(bytes(100_000), "/wait")[:-50_000],
        post(bytes(100_000), "/wait"),
        get("/wait", "Upgrade: something"),
    ],
    ids=["bare", "stray CRLF", "pipelined", "body", "body CRLF", "half a body", "unread body", "upgrade"],
)
@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
async def test_disconnect_while_a_request_waits_is_noticed_at_once(request_, way, monkeypatch):
    monkeypatch.setattr(connection, "PROBE_INTERVAL_S", 0.02)  # between looks past an unread body
    apps = Apps()
    async with serving(apps) as server:
        client = await server.connect()
        await client.send(request_)
        await apps.waiting.wait()
        if way == "close":
            client.socket.close()
        elif way == "reset":
            client.reset()
        else:
            client.socket.shutdown(trio.socket.SHUT_WR)
        await apps.cancelled.wait()
    assert apps.requests == ["/wait"]


@pytest.mark.parametrize("way", ["close", "half-close"])
async def test_disconnect_after_the_maximum_of_pipelined_data_is_noticed(way):
    apps = Apps()
    async with serving(apps) as server:
        client = await server.connect()
        await client.send(get("/wait"))
        await apps.waiting.wait()
        await client.send((get("/next") * 10_000)[:PIPELINED_BYTES])
        if way == "close":
            client.socket.close()
        else:
            client.socket.shutdown(trio.socket.SHUT_WR)
        await apps.cancelled.wait()
    assert apps.requests == ["/wait"]


async def test_client_that_pipelines_too_much_is_refused_and_its_running_request_ends():
    """Its FIN would arrive after all these data, or never if they filled the kernel's buffers."""
    apps = Apps()
    async with serving(apps) as server:
        client = await server.connect()
        await client.send(get("/wait"))
        await apps.waiting.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_ignoring_close, get("/next") * 1_000_000)
            await apps.cancelled.wait()
            answer = await client.answer()
            nursery.cancel_scope.cancel()
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert apps.requests == ["/wait"]


async def test_stream_to_a_client_that_pipelines_too_much_is_ended():
    apps = Apps()
    async with serving(apps) as server:
        client = await server.connect()
        await client.send(get("/stream_in_two_parts"))
        await client.until(b"first")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_ignoring_close, get("/next") * 1_000_000)
            rest = await client.end()
            nursery.cancel_scope.cancel()
    assert not rest.endswith(b"0\r\n\r\n")
    assert apps.requests == ["/stream_in_two_parts"]


async def test_pipelined_requests_within_the_bound_are_all_served():
    apps = Apps()
    count = PIPELINED_BYTES // len(get("/next"))
    async with serving(apps) as server:
        client = await server.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, get("/wait") + get("/next") * count)
            await apps.waiting.wait()
            apps.go.set()
            statuses = [(await client.answer()).status for _ in range(count + 1)]
    assert statuses == [200] * (count + 1)


async def test_large_body_is_not_counted_with_the_pipelined_requests_behind_it():
    apps = Apps()
    async with serving(apps) as server:
        client = await server.connect()
        body = bytes(PIPELINED_BYTES * 3 - 500)
        await client.send(post(body, "/echo") + get("/next") * 10)
        assert (await client.answer()).body == body
        assert [(await client.answer()).body for _ in range(10)] == [b"hello"] * 10


async def test_connection_uses_one_file_descriptor_even_while_its_body_is_not_read():
    apps = Apps()
    async with serving(apps, drained=False) as server:
        before = len(list(Path("/proc/self/fd").iterdir()))
        client = await server.connect()
        with trio.move_on_after(0.1):  # as much as the kernel buffers
            await client.send(post(bytes(10_000_000), "/wait"))
        await apps.waiting.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 2  # the client's and the server's


async def test_disconnects_before_a_request_are_noticed_before_it_is_handled():
    waiting = 0

    async def app(scope, receive, send):
        nonlocal waiting
        if scope["type"] == "lifespan":
            return
        if scope["path"] == "/waiting":
            await reply(send, b"%d" % waiting)
            return
        waiting += 1
        try:
            await trio.sleep_forever()
        finally:
            waiting -= 1

    async with serving(app) as server:
        asking = await server.connect()
        for _ in range(30):
            clients = [await server.connect() for _ in range(5)]
            for client in clients:
                await client.send(get())
            while waiting < 5:
                await trio.lowlevel.checkpoint()
            for client in clients:
                client.socket.close()
            assert (await asking.fetch(get("/waiting"))).body == b"0"


async def test_sending_to_a_client_that_has_disconnected_raises_an_oserror():
    raised = []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        while (await receive())["type"] != "http.disconnect":
            begun.set()
        try:
            await Apps().hello(receive, send)
        except OSError as error:
            raised.append(type(error).__name__)
            cancelled.set()

    begun, cancelled = trio.Event(), trio.Event()
    with structlog.testing.capture_logs() as logs:
        async with serving(app) as server:
            client = await server.connect()
            await client.send(get())
            await begun.wait()
            client.socket.close()
            await cancelled.wait()
    assert (raised, logs) == (["ClientDisconnected"], [])


async def test_idle_client_that_disconnects_frees_its_connection():
    async with serving(Apps(), Limits(connections=1)) as server:
        for _ in range(5):
            client = await server.connect()
            while (answer := await client.fetch(get())).status == 503:  # the last one still counts
                client.socket.close()
                client = await server.connect()
            assert answer.body == b"hello"
            client.socket.close()


# Timeouts ------------------------------------------------------------------------------------------


async def test_client_that_does_not_read_is_cut_off_and_its_app_ended():
    apps = Apps()
    with structlog.testing.capture_logs() as logs:
        async with serving(apps, Limits(stall_s=0.3)) as server:
            client = await server.connect(receive_buffer=4096)
            await client.send(get("/flood"))
            await apps.cancelled.wait()
            assert (await server.fetch(get())).status == 200
            client.socket.close()
    assert [entry["reason"] for entry in logs] == ["the client does not read"]


async def test_response_cancelled_in_the_middle_of_a_chunk_is_cut_not_continued():
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with trio.move_on_after(0.1):
            await send({"type": "http.response.body", "body": bytes(10_000_000), "more_body": True})
        given_up.set()
        await send({"type": "http.response.body", "body": b"sorry", "more_body": False})

    given_up = trio.Event()
    with structlog.testing.capture_logs() as logs:
        async with serving(app) as server:
            client = await server.connect(receive_buffer=4096)
            await client.send(get())
            await given_up.wait()  # the client must not read before
            received = await client.end()
    assert (b"sorry" in received, logs) == (False, [])


async def test_client_that_reads_slowly_is_not_cut_off(mock_clock):
    step = 1_000_000  # more than the kernel buffers: part of each step is sent after the one before

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(5 * step), "more_body": False})

    async with serving(app, Limits(stall_s=1.0)) as server:
        client = await server.connect(receive_buffer=65536)
        await client.send(get())
        for _ in range(5):
            left = step
            while left:
                data = await client.socket.recv(min(left, 65536))
                assert data, "cut off"
                left -= len(data)
            mock_clock.jump(0.6)  # in total longer than `stall_s`, but with a read each time


async def test_incomplete_head_times_out_even_if_bytes_keep_arriving(mock_clock):
    async with serving(Apps(), SHORT) as server:
        client = await server.connect()

        async def drip():
            await client.send(b"GET / HTTP/1.1\r\nX-Slow: ")
            while True:
                await trio.testing.wait_all_tasks_blocked(0.001)
                mock_clock.jump(0.02)
                await client.send_ignoring_close(b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            answer = await client.answer()
            nursery.cancel_scope.cancel()
    assert (answer.status, answer.error["code"]) == (408, "header_timeout")
    assert trio.current_time() >= SHORT.header_timeout_s


@pytest.mark.parametrize(
    ("first", "limit"), [(b"", "header_timeout_s"), (b"\r\n", "header_timeout_s"), (get(), "idle_timeout_s")]
)
async def test_connection_without_a_request_is_closed_after_a_timeout(first, limit):
    async with serving(Apps(), Limits(**{limit: 0.3})) as server:
        client = await server.connect()
        await client.send(first)
        rest = await client.end()
    assert rest.endswith(b"hello" if first == get() else b"")
    assert b"408" not in rest


async def test_body_that_is_not_sent_ends_the_wait_of_an_app_without_a_timeout(mock_clock):
    apps = Apps()
    async with serving(apps, SHORT) as server:
        client = await server.connect()
        await client.send(post(b"0123456789", "/echo")[:-5])
        while not apps.requests:
            await trio.lowlevel.checkpoint()
        mock_clock.jump(10)
        assert await client.end() == b""
    assert apps.requests == ["/echo"]


async def test_long_wait_for_a_response_does_not_time_out(mock_clock):
    apps = Apps()
    async with serving(apps, SHORT) as server:
        client = await server.connect()
        await client.send(get("/wait"))
        await apps.waiting.wait()
        mock_clock.jump(10)
        await trio.testing.wait_all_tasks_blocked()  # a timeout would happen now
        apps.go.set()
        assert (await client.answer()).body == b"waited"


async def test_a_thousand_idle_connections_do_not_delay_others():
    async with serving(Apps(), Limits(header_timeout_s=3600)) as server:
        idle = [await server.connect() for _ in range(1000)]
        answers = [await server.fetch(get()) for _ in range(20)]
        last = await idle[-1].fetch(get())
    assert {answer.status for answer in [*answers, last]} == {200}


# Shutdown ------------------------------------------------------------------------------------------


async def test_shutdown_closes_idle_connections_at_once_and_lets_responses_finish():
    apps = Apps()
    async with serving(apps) as server:
        idle, busy, streaming = [await server.connect() for _ in range(3)]
        await idle.fetch(get())
        await busy.send(get("/wait"))
        await apps.waiting.wait()
        await streaming.send(get("/stream_in_two_parts"))
        await streaming.until(b"first")
        server.shutdown.set()
        assert await idle.end() == b""
        with pytest.raises(ConnectionError):
            await server.connect()
        assert not server.ended.is_set()
        apps.go.set()
        answer = await busy.answer()
        rest = await streaming.end()
        server.close_clients()
        await server.ended.wait()
    assert (answer.body, answer.headers["connection"]) == (b"waited", "close")
    assert rest.endswith(b"last\r\n0\r\n\r\n")


async def test_shutdown_with_a_delay_answers_new_connections_until_the_old_ones_have_ended(monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.1)  # the clients do not close their connections
    apps = Apps()
    async with serving(apps, Limits(drain_delay_s=1)) as server:
        busy = await server.connect()
        await busy.send(get("/wait"))
        await apps.waiting.wait()
        server.shutdown.set()
        for _ in range(3):
            answer = await (await server.connect()).fetch(get())
            assert (answer.body, answer.headers["connection"]) == (b"hello", "close")
        unused = await server.connect()  # is not waited for
        apps.go.set()
        assert (await busy.answer()).body == b"waited"
        await server.ended.wait()
        assert await unused.end() == b""
        with pytest.raises(ConnectionError):
            await server.connect()


@pytest.mark.parametrize("path", ["/wait", "/flood", "/stream_in_two_parts"])
async def test_shutdown_ends_although_an_app_waits_or_a_client_never_reads(path):
    apps = Apps()
    limits = Limits(drain_s=0.2, stall_s=3600)
    with structlog.testing.capture_logs() as logs:
        async with serving(apps, limits) as server:
            client = await server.connect(receive_buffer=4096)
            await client.send(get(path))
            await client.socket.recv(1) if path != "/wait" else await apps.waiting.wait()
            server.shutdown.set()
            await server.ended.wait()
            client.socket.close()
    assert [(entry["event"], entry["connections"]) for entry in logs] == [("drain timed out", 1)]


async def test_cancelling_the_listener_ends_all_of_its_tasks():
    apps = Apps()
    before = trio.lowlevel.current_statistics().tasks_living
    async with serving(apps, drained=False) as server:
        clients = [await server.connect() for _ in range(3)]
        for client, path in zip(clients, ["/wait", "/flood", "/stream_in_two_parts"], strict=True):
            await client.send(get(path))
        await apps.waiting.wait()
    assert before == trio.lowlevel.current_statistics().tasks_living
