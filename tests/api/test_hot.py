"""The routes that go past Quart, over real sockets: bodies, streams that need no task to wake, leaving."""

import gc
import json
from dataclasses import dataclass

import pytest
import structlog
import trio

from api.conftest import client_of
from api.raw_http import get, post, serving
from fairlead.api.access import Access
from fairlead.api.call import Call, Reply
from fairlead.api.door import Door
from fairlead.api.errors import error_event
from fairlead.api.hot import HotRoutes
from fairlead.api.limits import Quotas
from fairlead.api.origin import Guard
from fairlead.api.pending import PendingAnswer
from fairlead.api.sse import EventStream, event_reply
from fairlead.config import Limits
from fairlead.errors import FairleadError, InvalidRequest
from fairlead.job import Delta
from fairlead.nodes.deltas import Deltas
from fairlead.text.model import TextModel

COMPLETIONS = "/v1/completions"


def served(route) -> object:
    """Return an app with this one route, at every path and for every method."""
    hot = HotRoutes(Door(Access(()), Quotas(()), Guard("127.0.0.1")), {"/": route})

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            await hot({**scope, "path": "/"}, receive, send)

    return app


# Bodies --------------------------------------------------------------------------------------------


async def echo(call: Call) -> Reply:
    return Reply(await call.read(), 200, {})


@pytest.mark.parametrize("encoding", ["identity", ""])
async def test_a_body_of_exactly_the_limit_is_read(encoding):
    async with serving(served(echo), Limits(body_bytes=10)) as server:
        answer = await server.ask(post(b"0123456789", "/", f"Content-Encoding: {encoding}"))
    assert (200, b"0123456789") == (answer.status, answer.body)


async def test_a_body_announced_as_too_large_is_refused_before_it_comes():
    async with serving(served(echo), Limits(body_bytes=10)) as server:
        answer = await server.ask(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 11\r\n\r\n")
    assert (413, "close") == (answer.status, answer.headers["connection"])


async def test_a_body_that_grows_too_large_is_refused_and_its_connection_closed():
    async with serving(served(echo), Limits(body_bytes=10)) as server:
        client = await server.connect()
        await client.send(b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            await client.send(b"1\r\nx\r\n")
        answer = await client.answer()
        assert (413, b"") == (answer.status, await client.end())


async def test_a_body_that_does_not_come_is_a_timeout():
    async with serving(served(echo), Limits(body_timeout_s=0.3)) as server:
        answer = await server.ask(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nabc")
    assert (408, "body_timeout") == (answer.status, answer.error["code"])


async def test_a_compressed_body_is_refused_by_the_name_of_its_header():
    async with serving(served(echo)) as server:
        answer = await server.ask(post(b"x", "/", "Content-Encoding: gzip"))
    assert (400, "Content-Encoding") == (answer.status, answer.error["param"])


# Streams -------------------------------------------------------------------------------------------


class Plain:
    """A writer whose events are the deltas' texts; it fails at "!"."""

    def write(self, deltas: list[Delta]) -> bytes:
        text = "".join(delta.text for delta in deltas)
        if "!" in text:
            raise ValueError("an exclamation mark")
        return text.encode()

    def end(self) -> bytes:
        return b"END"

    def error(self, error: FairleadError) -> bytes:
        return error_event(error)


@dataclass
class Given:
    """An answer whose deltas the test puts."""

    deltas: Deltas
    estimated_wait_s: None = None
    estimated_wait_p90_s: None = None
    queue_position: None = None


def streaming(deltas: Deltas) -> object:
    """Return an app whose every answer is the stream of these deltas, with one event for a beginning."""

    async def route(call: Call) -> Reply:
        await call.read()
        pending = PendingAnswer()
        pending.started(Given(deltas))
        return event_reply(EventStream(pending, Plain(), lambda: None), {})

    return served(route)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_what_is_put_between_two_turns_goes_out_in_order(version):
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
    told = "begun " + "".join(f"{number} {number}b " for number in range(100)) + "last END"
    assert (told, True) == (answer.body.decode(), answer.whole)


class Steps(trio.abc.Instrument):
    """Counts the turns that the tasks of requests have."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += "Protocol._run" in task.name


async def test_a_client_that_keeps_up_is_served_without_a_turn_of_its_requests_task():
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
        assert 0 == steps.count
        deltas.put(Delta(0, finish_reason="stop"))


@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.parametrize("_time", range(5))  # which task comes first is chance
async def test_a_client_that_does_not_keep_up_gets_everything_once_and_in_order(at_once, _time):
    deltas = Deltas(1)
    async with serving(streaming(deltas)) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(get())
        for number in range(400):  # far more than the two sockets hold
            deltas.put(Delta(0, f"{number:04} " * 2000))
            if number % at_once == 0:
                await trio.lowlevel.checkpoint()
        deltas.put(Delta(0, finish_reason="stop"))
        answer = await client.answer()
    expected = b"".join(b"%04d " % number * 2000 for number in range(400)) + b"END"
    assert answer.whole
    assert expected == answer.body  # not in the line above: it is four megabytes


async def test_while_a_client_does_not_read_no_other_waits_and_what_it_has_not_read_is_kept_as_text():
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
        assert 200 * 10_000 == (await client.answer()).body.count(b"x")


async def test_a_writer_that_fails_is_an_error_event_and_a_cut_and_not_the_engines_affair():
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
    assert not answer.whole
    begun, _, error = answer.body.partition(b"data: ")
    assert (b"begun ", "internal_error") == (begun, json.loads(error)["error"]["code"])
    assert ["unexpected error"] == [entry["event"] for entry in logs]


async def test_a_client_that_leaves_is_nobodys_loss():
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
    assert [] == logs


# Beside Quart --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_methods_of_a_hot_path_are_answered_as_everywhere(model, method):
    reply = await client_of(model).send(method, COMPLETIONS, b"")
    assert (405, "method_not_allowed") == (reply.status, reply.error["code"])
    assert {"OPTIONS", "POST"} == set(reply.headers["allow"].split(", "))


async def test_a_failing_route_is_a_500_that_says_nothing_and_is_logged_once():
    async def fail(call: Call) -> Reply:
        raise ValueError("a secret")

    with structlog.testing.capture_logs() as logs:
        async with serving(served(fail)) as server:
            answer = await server.ask(get())
    assert (500, "internal_error") == (answer.status, answer.error["code"])
    assert "secret" not in answer.body.decode()
    assert ["unexpected error"] == [entry["event"] for entry in logs]


async def test_a_failing_task_of_the_request_is_answered_for_like_the_route():
    async def route(call: Call) -> Reply:
        async def fail() -> None:
            raise ValueError("in a task")

        call.nursery.start_soon(fail)
        await trio.sleep_forever()
        raise AssertionError("not reached")

    with structlog.testing.capture_logs() as logs:
        async with serving(served(route)) as server:
            assert 500 == (await server.ask(get())).status
    assert ["unexpected error"] == [entry["event"] for entry in logs]


# Refusals ------------------------------------------------------------------------------------------


def errors_in_memory():
    # By its type: `isinstance` asks objects of other libraries for their class, and some of them warn.
    return [found for found in gc.get_objects() if issubclass(type(found), FairleadError)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_refused_request_leaves_no_cycle_that_keeps_its_body_in_memory(client, path, monkeypatch):
    def refuse(*_, **__):  # in a thread, as the body is long
        raise InvalidRequest("no")

    monkeypatch.setattr(TextModel, "encode_chat", refuse)
    body = {"model": "small", "messages": [{"role": "user", "content": "long " * 100_000}]}
    gc.collect()
    earlier = errors_in_memory()  # those of other tests' parameters
    gc.disable()
    try:
        reply = await client.post(path, body)
        with trio.move_on_after(5):  # a thread that raised it may hold it for a moment
            while len(errors_in_memory()) > len(earlier):  # noqa: ASYNC110
                await trio.sleep(0.01)
        left = [found for found in errors_in_memory() if found not in earlier]
    finally:
        gc.enable()
    assert (400, []) == (reply.status, left)
