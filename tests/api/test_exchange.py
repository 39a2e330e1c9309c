"""One request and its answer, through Quart and real sockets: what lives how long, who is told of errors."""

import pytest
import structlog
import trio
from quart import Response, g, request
from quart_trio import QuartTrio

from api.raw_http import get, post, serving
from fairlead.api.exchange import CutStream, Exchange, FairleadRequest, read_body, unwrap
from fairlead.config import Limits
from fairlead.errors import BodyTimeout, BodyTooLarge, FairleadError, InvalidRequest, NodeFailed, QueueFull


class App(QuartTrio):
    asgi_http_class = Exchange
    request_class = FairleadRequest


def current():
    return request._get_current_object()


@pytest.fixture
def app():
    app = App("test")
    app.config["RESPONSE_TIMEOUT"] = 0  # would cut any answer that takes any time

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


async def test_a_task_of_the_request_ends_when_its_answer_has_been_sent(app):
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
        assert b"begun" == (await server.ask(get())).body
        await ended.wait()


@pytest.mark.parametrize("where", ["route", "task", "stream"])
async def test_a_client_that_leaves_unwinds_the_route_its_tasks_and_its_stream(app, where):
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


async def test_a_stream_has_no_timeout_and_keeps_its_connection_alive(app):
    @app.get("/stream")
    async def route():
        async def body():
            for n in range(5):
                await trio.sleep(0.01)
                yield b"%d" % n

        return Response(body())

    async with serving(app) as server:
        client = await server.connect()
        answers = [await client.ask(get("/stream")) for _ in range(10)]
    assert [(b"01234", True)] * 10 == [(answer.body, answer.whole) for answer in answers]


async def test_the_end_of_an_answer_does_not_keep_the_connection_from_timing_out(app):
    async with serving(app, Limits(idle_timeout_s=0.3)) as server:
        client = await server.connect()
        assert b"hello" == (await client.ask(get("/hello"))).body
        assert b"" == await client.end()


async def test_a_head_request_for_an_endless_stream_has_an_end(app):
    @app.get("/stream")
    async def route():
        async def body():
            while True:
                yield b"more"

        return Response(body())

    async with serving(app) as server:
        client = await server.connect()
        await client.send(b"HEAD /stream HTTP/1.1\r\nHost: test\r\n\r\n")
        assert 200 == (await client.answer(head=True)).status
        assert b"hello" == (await client.ask(get("/hello"))).body


async def test_a_page_that_no_handler_replaces_is_sent_as_it_is(app):
    async with serving(app) as server:
        answers = [await server.ask(get("/nowhere")), await server.ask(get("*").replace(b"GET", b"OPTIONS"))]
    assert [404, 404] == [answer.status for answer in answers]


# Errors --------------------------------------------------------------------------------------------


async def test_a_task_that_fails_before_the_answer_is_answered_for_like_the_route(app):
    async def task():
        raise NodeFailed("gone")

    @app.get("/")
    async def route():
        current().nursery.start_soon(task)
        await trio.sleep_forever()

    async with serving(app) as server:
        client = await server.connect()
        answer = await client.ask(get("/", "X-Name: ana"))
        assert b"hello" == (await client.ask(get("/hello"))).body
    assert (502, "ana") == (answer.status, answer.headers["x-signed"])
    assert b'{"code":"node_failed","name":"ana"}' == answer.body.replace(b" ", b"").strip()


async def test_a_refusal_before_started_is_a_plain_error_in_the_route(app):
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
        assert 429 == (await server.ask(get())).status
    assert ["queue_full"] == caught


async def test_a_task_that_fails_during_the_answer_cuts_it_and_is_logged_once(app):
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
            answer = await server.ask(get())
    assert (200, b"half", False) == (answer.status, answer.body, answer.whole)
    assert ["request failed"] == [entry["event"] for entry in logs]


async def test_a_cut_stream_has_no_end_and_makes_no_noise(app):
    @app.get("/")
    async def route():
        async def body():
            yield b"data: error\n\n"
            raise CutStream

        return Response(body())

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as server:
            answer = await server.ask(get())
    assert (b"data: error\n\n", False, []) == (answer.body, answer.whole, logs)


@pytest.mark.parametrize("name", ["X-Broken", "X Broken"])
async def test_a_header_that_cannot_be_sent_is_an_error_of_that_request_alone(app, name):
    @app.get("/")
    async def route():
        return Response("never", headers=[(name, "\x00")])

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as server:
            client = await server.connect()
            await client.send(get())
            await client.end()
            assert b"hello" == (await server.ask(get("/hello"))).body
    assert ["request failed"] == [entry["event"] for entry in logs]


# Bodies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [(), ("Content-Encoding: identity",)])
async def test_a_body_of_exactly_the_limit_is_read(app, encoding):
    async with serving(app, Limits(body_bytes=1000)) as server:
        answer = await server.ask(post(b"x" * 1000, "/echo", *encoding))
    assert (200, 1000) == (answer.status, len(answer.body))


async def test_a_body_announced_as_too_large_is_refused_before_it_comes(app):
    async with serving(app, Limits(body_bytes=1000)) as server:
        client = await server.connect()
        await client.send(post(b"x" * 1001, "/echo")[:-1001])
        answer = await client.answer()
        assert b"" == await client.end()
    assert (413, "close") == (answer.status, answer.headers["connection"])


async def test_a_body_that_grows_too_large_is_refused_and_its_connection_closed(app):
    async with serving(app, Limits(body_bytes=100_000)) as server:
        client = await server.connect()
        await client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_in_vain, 7 * (b"4000\r\n" + bytes(0x4000) + b"\r\n"))
            answer = await client.answer()
        assert b"" == await client.end()
    assert (413, "close") == (answer.status, answer.headers["connection"])


async def test_a_body_that_does_not_come_is_a_timeout(app):
    async with serving(app, Limits(body_timeout_s=0.3)) as server:
        client = await server.connect()
        await client.send(post(b"0123456789", "/echo")[:-1])
        answer = await client.answer()
        assert b"" == await client.end()
    assert (408, "close") == (answer.status, answer.headers["connection"])


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
async def test_a_compressed_body_is_refused_by_the_name_of_its_header(app, encoding):
    seen = []

    @app.errorhandler(InvalidRequest)
    async def fail(error):
        seen.append(error.param)
        return "", error.status

    async with serving(app) as server:
        answer = await server.ask(post(b"\x1f\x8b", "/echo", f"Content-Encoding: {encoding}"))
    assert (400, ["Content-Encoding"]) == (answer.status, seen)


async def test_a_body_is_read_in_a_test_client_too(app):
    response = await app.test_client().post("/echo", data=b"hello")
    assert b"hello" == await response.get_data()


# Groups --------------------------------------------------------------------------------------------


def test_what_is_no_group_is_left_as_it_is():
    error = ValueError("plain")
    assert error is unwrap(error)


@pytest.mark.parametrize("error", [BodyTooLarge("large"), BodyTimeout("late"), ValueError("bug")])
def test_a_single_error_is_found_however_deep(error):
    assert error is unwrap(ExceptionGroup("outer", [ExceptionGroup("inner", [error])]))


def test_the_fairlead_error_is_what_a_group_is_about():
    error = NodeFailed("gone")
    group = BaseExceptionGroup(
        "outer", [ValueError("noise"), ExceptionGroup("inner", [error]), KeyError("x")]
    )
    assert error is unwrap(group)


def test_a_group_of_several_bugs_stays_a_group():
    group = ExceptionGroup("bugs", [ValueError("one"), KeyError("two")])
    assert group is unwrap(group)
