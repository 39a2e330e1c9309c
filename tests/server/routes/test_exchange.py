"""Requests through Quart and real sockets: lifetimes of tasks, errors, bodies and exception groups."""

import pytest
import structlog
import trio
from quart import Response, g, request
from quart_trio import QuartTrio

from fairlead.base.config import Limits
from fairlead.base.errors import BodyTimeout, BodyTooLarge, FairleadError, NodeFailed, QueueFull
from fairlead.base.formats.content_coding import REQUEST_CODINGS
from fairlead.base.supervision import unwrap
from fairlead.generation.event_stream import CutStream
from fairlead.server.routes.exchange import Exchange, FairleadRequest, read_body
from nodes.coded import ENCODE
from server.routes.raw_http import get, post, serving


class App(QuartTrio):
    asgi_http_class = Exchange
    request_class = FairleadRequest


def current():
    return request._get_current_object()


@pytest.fixture
def app():
    app = App("test")
    app.config["RESPONSE_TIMEOUT"] = 0  # would time out every response that takes any time

    @app.before_request
    async def name():
        g.name = request.headers.get("X-Name", "nobody")

    @app.errorhandler(FairleadError)
    async def fail(error):
        return {"code": error.code, "name": g.name}, error.status

    @app.after_request
    async def sign(response):
        response.headers["X-Signed"] = g.name
        return response

    @app.post("/echo")
    async def echo():
        return await read_body(current())

    @app.get("/hello")
    async def hello():
        return "hello"

    return app


# Lifetimes -----------------------------------------------------------------------------------------


async def test_task_of_the_request_ends_when_its_answer_has_been_sent(app):
    ended = trio.Event()

    async def task(*, task_status):
        try:
            task_status.started("begun")
            await trio.sleep_forever()
        finally:
            ended.set()

    @app.get("/")
    async def route():
        return await current().nursery.start(task)

    async with serving(app) as server:
        assert (await server.fetch(get())).body == b"begun"
        await ended.wait()


@pytest.mark.parametrize("where", ["route", "task", "stream"])
async def test_disconnect_cancels_the_route_its_tasks_and_its_stream(app, where):
    running, ended = trio.Event(), trio.Event()

    async def work(*, task_status=trio.TASK_STATUS_IGNORED):
        try:
            running.set()
            await trio.sleep_forever()
        finally:
            ended.set()

    async def stream():
        yield b"first"
        await work()

    @app.post("/")
    async def route():
        await read_body(current())
        if where == "route":
            await work()
        if where == "task":
            await current().nursery.start(work)
        return Response(stream())

    async with serving(app) as server:
        client = await server.connect()
        await client.send(post(b"body"))
        await running.wait()
        assert not ended.is_set()
        client.socket.close()
        await ended.wait()


async def test_stream_has_no_timeout_and_keeps_its_connection_alive(app):
    @app.get("/stream")
    async def route():
        async def body():
            for n in range(5):
                await trio.sleep(0.01)
                yield b"%d" % n

        return Response(body())

    async with serving(app) as server:
        client = await server.connect()
        answers = [await client.fetch(get("/stream")) for _ in range(10)]
    assert [(answer.body, answer.is_complete) for answer in answers] == [(b"01234", True)] * 10


async def test_idle_connection_times_out_after_a_response(app):
    async with serving(app, Limits(idle_timeout_s=0.3)) as server:
        client = await server.connect()
        assert (await client.fetch(get("/hello"))).body == b"hello"
        assert await client.end() == b""


async def test_head_request_for_an_endless_stream_ends(app):
    @app.get("/stream")
    async def route():
        async def body():
            while True:
                yield b"more"

        return Response(body())

    async with serving(app) as server:
        client = await server.connect()
        await client.send(b"HEAD /stream HTTP/1.1\r\nHost: test\r\n\r\n")
        assert (await client.answer(head=True)).status == 200
        assert (await client.fetch(get("/hello"))).body == b"hello"


async def test_error_page_without_an_error_handler_is_sent_unchanged(app):
    async with serving(app) as server:
        answers = [
            await server.fetch(get("/nowhere")),
            await server.fetch(get("*").replace(b"GET", b"OPTIONS")),
        ]
    assert [answer.status for answer in answers] == [404, 404]


# Errors --------------------------------------------------------------------------------------------


async def test_error_of_a_task_before_the_response_is_handled_like_the_routes(app):
    async def task():
        raise NodeFailed("gone")

    @app.get("/")
    async def route():
        current().nursery.start_soon(task)
        await trio.sleep_forever()

    async with serving(app) as server:
        client = await server.connect()
        answer = await client.fetch(get("/", "X-Name: ana"))
        assert (await client.fetch(get("/hello"))).body == b"hello"
    assert (answer.status, answer.headers["x-signed"]) == (502, "ana")
    assert answer.body.replace(b" ", b"").strip() == b'{"code":"node_failed","name":"ana"}'


async def test_error_before_started_is_raised_in_the_route_without_a_group(app):
    async def serve(*, task_status):
        raise QueueFull("full")

    caught = []

    @app.get("/")
    async def route():
        try:
            await current().nursery.start(serve)
        except QueueFull as error:
            caught.append(error.code)
            raise

    async with serving(app) as server:
        assert (await server.fetch(get())).status == 429
    assert caught == ["queue_full"]


async def test_task_that_fails_during_the_response_cuts_it_and_is_logged_once(app):
    @app.get("/")
    async def route():
        async def task():
            await begun.wait()
            raise NodeFailed("gone")

        async def body():
            yield b"half"
            begun.set()
            await trio.sleep_forever()

        begun = trio.Event()
        current().nursery.start_soon(task)
        return Response(body())

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as server:
            answer = await server.fetch(get())
    assert (answer.status, answer.body, answer.is_complete) == (200, b"half", False)
    assert [entry["event"] for entry in logs] == ["request failed"]


async def test_cut_stream_is_incomplete_and_logs_nothing(app):
    @app.get("/")
    async def route():
        async def body():
            yield b"data: error\n\n"
            raise CutStream

        return Response(body())

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as server:
            answer = await server.fetch(get())
    assert (answer.body, answer.is_complete, logs) == (b"data: error\n\n", False, [])


@pytest.mark.parametrize("name", ["X-Broken", "X Broken"])
async def test_invalid_response_header_fails_only_its_request(app, name):
    @app.get("/")
    async def route():
        return Response("never", headers=[(name, "\x00")])

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as server:
            client = await server.connect()
            await client.send(get())
            await client.end()
            assert (await server.fetch(get("/hello"))).body == b"hello"
    assert [entry["event"] for entry in logs] == ["request failed"]


# Bodies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [(), ("Content-Encoding: identity",)])
async def test_body_of_exactly_the_limit_is_read(app, encoding):
    async with serving(app, Limits(body_bytes=1000)) as server:
        answer = await server.fetch(post(b"x" * 1000, "/echo", *encoding))
    assert (answer.status, len(answer.body)) == (200, 1000)


async def test_body_announced_as_too_large_is_refused_before_it_is_sent(app):
    async with serving(app, Limits(body_bytes=1000)) as server:
        client = await server.connect()
        await client.send(post(b"x" * 1001, "/echo")[:-1001])
        answer = await client.answer()
        assert await client.end() == b""
    assert (answer.status, answer.headers["connection"]) == (413, "close")


async def test_body_that_grows_too_large_is_refused_and_its_connection_closed(app):
    async with serving(app, Limits(body_bytes=100_000)) as server:
        client = await server.connect()
        await client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_ignoring_close, 7 * (b"4000\r\n" + bytes(0x4000) + b"\r\n"))
            answer = await client.answer()
        assert await client.end() == b""
    assert (answer.status, answer.headers["connection"]) == (413, "close")


async def test_body_that_is_not_sent_times_out(app):
    async with serving(app, Limits(body_timeout_s=0.3)) as server:
        client = await server.connect()
        await client.send(post(b"0123456789", "/echo")[:-1])
        answer = await client.answer()
        assert await client.end() == b""
    assert (answer.status, answer.headers["connection"]) == (408, "close")


@pytest.mark.parametrize(
    ("encoding", "status"),
    [("gzip", 400), ("zstd", 400), ("br", 415), ("identity, gzip", 400), ("gzip, gzip", 415)],
)
async def test_body_that_cannot_be_decoded_is_refused_by_the_name_of_its_header(app, encoding, status):
    seen = []

    @app.errorhandler(FairleadError)
    async def fail(error):
        seen.append(error.param)
        return "", error.status

    async with serving(app) as server:
        answer = await server.fetch(post(b"\x1f\x8b", "/echo", f"Content-Encoding: {encoding}"))
    assert (answer.status, seen) == (status, ["Content-Encoding"])


@pytest.mark.parametrize("coding", REQUEST_CODINGS)
async def test_encoded_body_is_decoded_within_the_limit(app, coding):
    header = f"Content-Encoding: {coding.upper()}"
    async with serving(app, Limits(body_bytes=1000)) as server:
        answer = await server.fetch(post(ENCODE[coding](b"x" * 1000), "/echo", header))
        assert (answer.status, answer.body) == (200, b"x" * 1000)
        for large in (b"x" * 1001, bytes(10_000_000)):
            refused = await server.fetch(post(ENCODE[coding](large)[:1000], "/echo", header))
            assert refused.status == 413


@pytest.mark.parametrize("coding", REQUEST_CODINGS)
async def test_encoded_body_that_is_cut_off_is_refused(app, coding):
    async with serving(app) as server:
        body = ENCODE[coding](bytes(range(256)))[:-1]
        answer = await server.fetch(post(body, "/echo", f"Content-Encoding: {coding}"))
    assert answer.status == 400


async def test_body_is_read_with_quarts_test_client_too(app):
    response = await app.test_client().post("/echo", data=b"hello")
    assert await response.get_data() == b"hello"


# Exception groups ----------------------------------------------------------------------------------


def test_unwrap_returns_a_plain_error_unchanged():
    error = ValueError("plain")
    assert error is unwrap(error)


@pytest.mark.parametrize("error", [BodyTooLarge("large"), BodyTimeout("late"), ValueError("bug")])
def test_unwrap_finds_a_single_nested_error(error):
    assert error is unwrap(ExceptionGroup("outer", [ExceptionGroup("inner", [error])]))


def test_unwrap_prefers_the_fairlead_error_of_a_group():
    error = NodeFailed("gone")
    group = BaseExceptionGroup(
        "outer", [ValueError("noise"), ExceptionGroup("inner", [error]), KeyError("x")]
    )
    assert error is unwrap(group)


def test_unwrap_returns_a_group_of_several_bugs_unchanged():
    group = ExceptionGroup("bugs", [ValueError("one"), KeyError("two")])
    assert group is unwrap(group)
