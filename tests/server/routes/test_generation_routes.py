"""The routes that bypass Quart, over real sockets: bodies, streams that wake no task, disconnects."""

import gc
import json
from dataclasses import dataclass

import pytest
import structlog
import trio

from fairlead.base.config import Limits
from fairlead.base.errors import FairleadError, InvalidRequest
from fairlead.base.formats.content_coding import REQUEST_CODINGS
from fairlead.base.job import Delta
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.generation.event_stream import EventStream
from fairlead.generation.pending import PendingAnswer
from fairlead.language.text.model import TextModel
from fairlead.nodes.streams.deltas import Deltas
from fairlead.router.quotas.access import Authenticator
from fairlead.router.quotas.key_quotas import LocalQuotas
from fairlead.server.auth.origin import OriginPolicy
from fairlead.server.auth.request_auth import RequestAuth
from fairlead.server.routes.answers import stream_response
from fairlead.server.routes.generation_routes import GenerationRoutes
from fairlead.server.routes.request import Request, Response
from nodes.coded import ENCODE
from server.routes.conftest import client_of
from server.routes.raw_http import get, post, serving

COMPLETIONS = "/v1/completions"


def served(route) -> object:
    """Return an app with this one route, at every path and for every method."""
    auth = RequestAuth(Authenticator(()), LocalQuotas(()), OriginPolicy("127.0.0.1"))
    routes = GenerationRoutes(auth)

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            await routes(route, {**scope, "path": "/"}, receive, send)

    return app


# Bodies --------------------------------------------------------------------------------------------


async def echo(request: Request) -> Response:
    return Response(await request.read(), 200, {})


@pytest.mark.parametrize("encoding", ["identity", ""])
async def test_body_of_exactly_the_limit_is_read(encoding):
    async with serving(served(echo), Limits(body_bytes=10)) as server:
        answer = await server.fetch(post(b"0123456789", "/", f"Content-Encoding: {encoding}"))
    assert (answer.status, answer.body) == (200, b"0123456789")


async def test_body_announced_as_too_large_is_refused_before_it_is_sent():
    async with serving(served(echo), Limits(body_bytes=10)) as server:
        answer = await server.fetch(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 11\r\n\r\n")
    assert (answer.status, answer.headers["connection"]) == (413, "close")


async def test_body_that_grows_too_large_is_refused_and_its_connection_closed():
    async with serving(served(echo), Limits(body_bytes=10)) as server:
        client = await server.connect()
        await client.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            await client.send(b"1\r\nx\r\n")
        answer = await client.answer()
        assert (answer.status, await client.end()) == (413, b"")


async def test_body_that_is_not_sent_times_out():
    async with serving(served(echo), Limits(body_timeout_s=0.3)) as server:
        answer = await server.fetch(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nabc")
    assert (answer.status, answer.error["code"]) == (408, "body_timeout")


@pytest.mark.parametrize("coding", REQUEST_CODINGS)
async def test_encoded_body_is_decoded(coding):
    async with serving(served(echo)) as server:
        answer = await server.fetch(post(ENCODE[coding](b"hello"), "/", f"Content-Encoding: {coding}"))
    assert (answer.status, answer.body) == (200, b"hello")


async def test_unknown_coding_is_refused_with_those_that_are_known():
    async with serving(served(echo)) as server:
        answer = await server.fetch(post(b"x", "/", "Content-Encoding: br"))
    assert (answer.status, answer.error["param"]) == (415, "Content-Encoding")
    assert answer.headers["accept-encoding"] == "zstd, gzip"


# Streams -------------------------------------------------------------------------------------------


class Plain:
    """A writer that sends the deltas' texts as events; it raises at "!"."""

    def write(self, deltas: list[Delta]) -> bytes:
        text = "".join(delta.text for delta in deltas)
        if "!" in text:
            raise ValueError("an exclamation mark")
        return text.encode()

    def end(self) -> bytes:
        return b"END"

    def fail(self, error: FairleadError) -> bytes:
        return ChatDialect().error_event(error)


@dataclass
class Given:
    """An answer with deltas from the test."""

    deltas: Deltas
    estimated_wait_s: None = None
    estimated_wait_p90_s: None = None
    queue_position: None = None


async def not_waiting() -> None:
    """Return no estimate."""


def streaming(deltas: Deltas) -> object:
    """Return an app that responds to every request with the stream of these deltas."""

    async def route(request: Request) -> Response:
        await request.read()
        pending = PendingAnswer()
        pending.started(Given(deltas))
        return stream_response(
            EventStream(pending, ChatDialect(), Plain(), not_waiting, write_large=trio.to_thread.run_sync), {}
        )

    return served(route)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_deltas_put_between_two_runs_of_the_task_are_sent_in_order(version):
    deltas = Deltas(1)
    async with serving(streaming(deltas)) as server:
        client = await server.connect()
        await client.send(get(version=version))
        deltas.put(Delta(0, "begun "))
        for number in range(100):
            await trio.testing.wait_all_tasks_blocked()
            deltas.put(Delta(0, f"{number} "))
            deltas.put(Delta(0, f"{number}b "))
        deltas.put(Delta(0, "last ", finish_reason="stop"))
        answer = await client.answer()
    expected = "begun " + "".join(f"{number} {number}b " for number in range(100)) + "last END"
    assert (answer.body.decode(), answer.is_complete) == (expected, True)


class Steps(trio.abc.Instrument):
    """Counts how often the tasks of requests run."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += "Protocol._run" in task.name


async def test_client_that_keeps_up_is_served_without_waking_its_requests_task():
    deltas = Deltas(1)
    steps = Steps()
    async with serving(streaming(deltas)) as server:
        client = await server.connect()
        await client.send(get())
        deltas.put(Delta(0, "begun "))
        await client.until(b"begun ")
        await trio.testing.wait_all_tasks_blocked(0.01)
        trio.lowlevel.add_instrument(steps)
        for number in range(100):
            deltas.put(Delta(0, f"@{number} "))
            await client.until(f"@{number} ".encode())
        trio.lowlevel.remove_instrument(steps)
        assert steps.count == 0
        deltas.put(Delta(0, finish_reason="stop"))


@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.parametrize("_time", range(5))  # the order of the tasks is random
async def test_slow_client_gets_everything_once_and_in_order(at_once, _time):
    deltas = Deltas(1)
    async with serving(streaming(deltas)) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(get())
        for number in range(400):  # much more than the buffers of the two sockets hold
            deltas.put(Delta(0, f"{number:04} " * 2000))
            if number % at_once == 0:
                await trio.lowlevel.checkpoint()
        deltas.put(Delta(0, finish_reason="stop"))
        answer = await client.answer()
    expected = b"".join(b"%04d " % number * 2000 for number in range(400)) + b"END"
    assert answer.is_complete
    assert expected == answer.body  # apart from the line above, as it has four megabytes


async def test_text_for_a_client_that_does_not_read_is_kept_and_blocks_no_other():
    deltas = Deltas(1)
    async with serving(streaming(deltas)) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(get())
        await trio.testing.wait_all_tasks_blocked(0.01)
        for _ in range(200):
            deltas.put(Delta(0, "x" * 10_000))
            await trio.lowlevel.checkpoint()
        deltas.put(Delta(0, finish_reason="length"))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (await client.answer()).body.count(b"x") == 200 * 10_000


async def test_failing_writer_sends_an_error_event_and_cuts_the_stream_without_raising_in_put():
    deltas = Deltas(1)
    with structlog.testing.capture_logs() as logs:
        async with serving(streaming(deltas)) as server:
            client = await server.connect()
            await client.send(get())
            deltas.put(Delta(0, "begun "))
            await client.until(b"begun ")
            await trio.testing.wait_all_tasks_blocked()
            deltas.put(Delta(0, "!"))
            answer = await client.answer()
    assert not answer.is_complete
    begun, _, error = answer.body.partition(b"data: ")
    assert (begun, json.loads(error)["error"]["code"]) == (b"begun ", "internal_error")
    assert [entry["event"] for entry in logs] == ["unexpected error"]


async def test_deltas_after_a_disconnect_cause_no_error():
    deltas = Deltas(1)
    with structlog.testing.capture_logs() as logs:
        async with serving(streaming(deltas)) as server:
            client = await server.connect()
            await client.send(get())
            deltas.put(Delta(0, "begun "))
            assert await client.chunk()
            client.reset()
            for _ in range(50):
                deltas.put(Delta(0, "more"))
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked(0.01)
    assert logs == []


# Consistency with Quart ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_methods_of_a_generating_route_are_a_405(model, method):
    reply = await client_of(model).send(method, COMPLETIONS, b"")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert set(reply.headers["allow"].split(", ")) == {"OPTIONS", "POST"}


async def test_failing_route_is_a_500_without_internals_and_is_logged_once():
    async def fail(request: Request) -> Response:
        raise ValueError("a secret")

    with structlog.testing.capture_logs() as logs:
        async with serving(served(fail)) as server:
            answer = await server.fetch(get())
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.body.decode()
    assert [entry["event"] for entry in logs] == ["unexpected error"]


async def test_error_of_a_task_of_the_request_is_handled_like_the_routes():
    async def route(request: Request) -> Response:
        async def fail() -> None:
            raise ValueError("in a task")

        request.nursery.start_soon(fail)
        await trio.sleep_forever()
        raise AssertionError("not reached")

    with structlog.testing.capture_logs() as logs:
        async with serving(served(route)) as server:
            assert (await server.fetch(get())).status == 500
    assert [entry["event"] for entry in logs] == ["unexpected error"]


# Refusals ------------------------------------------------------------------------------------------


def errors_in_memory():
    # By type: `isinstance` reads `__class__` of other libraries' objects, and some of them warn.
    return [found for found in gc.get_objects() if issubclass(type(found), FairleadError)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_refused_request_leaves_no_cycle_that_keeps_its_body_in_memory(client, path, monkeypatch):
    def refuse(*_, **__):  # in a thread, as the body is long
        raise InvalidRequest("no")

    monkeypatch.setattr(TextModel, "encode_chat", refuse)
    body = {"model": "small", "messages": [{"role": "user", "content": "long " * 100_000}]}
    gc.collect()
    earlier = errors_in_memory()  # these belong to other tests' parameters
    gc.disable()
    try:
        reply = await client.post(path, body)
        with trio.move_on_after(5):  # the thread that raised it may refer to it for a moment
            while len(errors_in_memory()) > len(earlier):  # noqa: ASYNC110
                await trio.sleep(0.01)
        left = [found for found in errors_in_memory() if found not in earlier]
    finally:
        gc.enable()
    assert (reply.status, left) == (400, [])
