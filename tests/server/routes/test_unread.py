"""The memory of all answers that their clients do not read: what counts, which are dropped, and when."""

import gc
import json
import tracemalloc
from functools import partial

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from fairlead.base.config import ApiKey, Config, Limits
from fairlead.base.job import CallPiece, Delta, TokenLogprob
from fairlead.nodes.streams.deltas import COUNTED_AT_ONCE, Deltas, size_of
from fairlead.nodes.streams.passthrough import PassthroughHead, encode_head
from fairlead.router.fleet.status import ModelStatus
from fairlead.server.processes.front_role import of_one_front
from fairlead.server.responses.background import EVENT_BYTES_AT_ONCE, StoredEvents
from fairlead.server.responses.store import StoredResponse
from fairlead.server.routes.request import Request
from fairlead.server.routes.unread import UnreadAnswer, UnreadAnswers
from fake_fleet import FakeFleet
from server.routes.conftest import client_of
from server.routes.raw_http import get, post, serving, until

KB = 1024
MB = 1024 * KB


class Reading:
    """Answers in memory, by the names under which `answer` began them."""

    def __init__(self, total: int) -> None:
        self.answers = UnreadAnswers(total, shown=str.upper)
        self.dropped: list[str] = []

    def answer(self, name: str, size: int = 0) -> UnreadAnswer:
        """Return an answer of the user that the name begins with, of which `size` bytes wait."""
        user = [(b"x-openwebui-user-id", name.partition(" ")[0].encode())]
        request = Request({"method": "GET", "path": "/path", "headers": user}, None)
        request.request_id = name
        answer = UnreadAnswer(self.answers, request, partial(self.dropped.append, name))
        answer.add(size)
        return answer


def test_largest_tenant_loses_the_answer_that_is_unread_for_longest():
    reading = Reading(10)
    first, second = reading.answer("ana 1", 4), reading.answer("ana 2", 4)
    first.progress()
    reading.answer("bob 1", 3)
    assert reading.dropped == ["ana 2"]
    reading.answer("bob 2", 2).progress()
    reading.answer("cy 1", 2)
    assert reading.dropped == ["ana 2", "bob 1"]
    assert reading.answers.bytes_waiting == 8
    second.add(100)  # it has ended
    assert reading.answers.bytes_waiting == 8


def test_tenant_within_its_share_loses_nothing():
    reading = Reading(12)
    reading.answer("ana", 6)
    for number in range(100):
        reading.answer(f"bob {number}", 3)
    assert set(reading.dropped) == {f"bob {number}" for number in range(98)}


def test_bytes_that_were_read_do_not_count():
    reading = Reading(10)
    answer = reading.answer("ana 1", 8)
    answer.remove(8)
    reading.answer("ana 2", 9)
    assert (reading.dropped, reading.answers.bytes_waiting) == ([], 9)
    answer.add(1)
    answer.leave()
    assert reading.answers.bytes_waiting == 9


def test_answer_larger_than_the_budget_is_dropped_only_for_another_tenant():
    reading = Reading(10)
    large = reading.answer("ana 1", 100)
    large.add(50)
    assert (reading.dropped, reading.answers.bytes_waiting) == ([], 10)
    large.remove(145)
    assert reading.answers.bytes_waiting == 5
    large.add(200)
    reading.answer("bob 1", 1)
    assert (reading.dropped, reading.answers.bytes_waiting) == (["ana 1"], 1)


def test_dropped_answer_is_counted_and_logged_with_its_tenant():
    reading = Reading(10)
    with capture_logs() as log:
        reading.answer("ana 1", 8)
        reading.answer("ana 2", 8)
    assert reading.answers.dropped() == {"user/ana": 1}
    (line,) = log
    assert (line["event"], line["request_id"], line["path"]) == ("unread answer dropped", "ana 1", "/path")
    assert (line["tenant"], line["bytes"]) == ("USER/ANA", 8)


def test_tenant_of_an_answer_that_never_waits_is_not_needed():
    request = Request({"method": "GET", "path": "/", "headers": []}, None)
    del request.headers  # from which the tenant is read
    answer = UnreadAnswer(UnreadAnswers(10), request, lambda: None)
    answer.add(0)
    answer.progress()
    answer.remove(0)
    answer.leave()


# Deltas --------------------------------------------------------------------------------------------------


class Counted:
    """Counts bytes that wait."""

    def __init__(self) -> None:
        self.waiting = 0

    def add(self, size: int) -> None:
        self.waiting += size

    def progress(self) -> None:
        pass

    def remove(self, size: int) -> None:
        self.waiting -= size
        assert self.waiting >= 0


def counted_deltas(choices: int = 1) -> tuple[Deltas, Counted]:
    deltas, counted = Deltas(choices), Counted()
    deltas.unread = counted
    return deltas, counted


async def test_deltas_count_until_their_reader_takes_them():
    deltas, counted = counted_deltas(2)
    for index in (0, 1):
        for _ in range(10):
            deltas.put(Delta(index, "x" * 10 * KB))
    assert 200 * KB - COUNTED_AT_ONCE < counted.waiting < 250 * KB
    await deltas.take()
    assert counted.waiting == 0
    deltas.put(Delta(0, "x" * 20 * KB))
    deltas.put(Delta(1, "", finish_reason="stop"))
    deltas.put(Delta(0, "", finish_reason="stop"))
    assert counted.waiting > 20 * KB
    await deltas.take()
    assert counted.waiting == 0


async def test_deltas_that_their_reader_accepts_do_not_count():
    deltas, counted = counted_deltas()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deltas.take, lambda _: True)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(100):
            deltas.put(Delta(0, "x" * KB))
        assert counted.waiting == 0
        deltas.put(Delta(0, "", finish_reason="stop"))


async def test_deltas_of_an_attempt_that_starts_over_do_not_count():
    deltas, counted = counted_deltas()
    deltas.put(Delta(0, "x" * 50 * KB))
    assert counted.waiting
    assert deltas.restart()
    assert counted.waiting == 0


def logprobs(start: int) -> list[TokenLogprob]:
    top = tuple((start + index, -1.5 - index / 7) for index in range(20))
    return [TokenLogprob(start + 1000, -0.5 - start / 7, top)]


SLOWLY_READ = {
    "text": lambda index: Delta(0, f"{index:6}" * 20, [1000 + index]),
    "tokens": lambda index: Delta(0, "", list(range(1000 + index, 1010 + index))),
    "log-probabilities": lambda index: Delta(0, "a", [1000 + index], logprobs(1000 + index)),
    "relayed events": lambda index: Delta(0, raw=[b"data: %d\n\n" % index]),
    "calls": lambda index: Delta(0, calls=[CallPiece(index, "name", f"{index:6}" * 20)]),
}


@pytest.mark.parametrize("kind", SLOWLY_READ)
def test_what_counts_is_at_least_the_memory_that_deltas_take(kind):
    deltas, counted = counted_deltas()
    gc.collect()
    tracemalloc.start()
    try:
        for index in range(2000):
            deltas.put(SLOWLY_READ[kind](index))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= 1.1 * counted.waiting + COUNTED_AT_ONCE
    assert counted.waiting <= 5 * taken


def test_vector_of_an_embedding_counts():
    assert size_of(Delta(0, vector=bytes(MB))) >= MB


# Over sockets --------------------------------------------------------------------------------------------

READERS = 10
LARGE = 4 * MB  # the kernel's buffers take 0.5 MB or less


def whole(body):
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def chunked(body):
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": body})

    return app


@pytest.mark.parametrize("app_with", [whole, chunked])
async def test_readers_of_the_same_bytes_share_them(app_with):
    body = bytes(range(256)) * (LARGE // 256)
    async with serving(app_with(body)) as server:
        assert (await server.fetch(get())).body == body * (1 + (app_with is chunked))
        clients = [await server.connect(receive_buffer=4 * KB) for _ in range(READERS)]
        tracemalloc.start()
        try:
            for client in clients:
                await client.send(get())
                await client.until(b"\r\n\r\n")
            for _ in range(10):
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert tracemalloc.get_traced_memory()[0] < LARGE
        finally:
            tracemalloc.stop()


async def test_readers_of_kept_events_share_large_ones_and_get_small_ones_together():
    small, large = b"event: a\n\n" * 10, b"event: b\n\n" * 10_000
    response = StoredResponse("r", "", "a", events=[*[small] * 200, large, small], has_ended=True)

    async def settle(_response):
        pass

    events = StoredEvents(response, None, 0, waiting=None, settle=settle)
    pieces = [piece async for piece in events]
    assert b"".join(pieces) == small * 200 + large + small
    assert any(piece is large for piece in pieces)
    assert max(len(piece) for piece in pieces if piece is not large) <= EVENT_BYTES_AT_ONCE
    assert len(pieces) < 10


def answering(size):
    """Return a script whose only delta has a text of this size."""
    return lambda job: [
        [Delta(index, "x" * size, [10], finish_reason="stop") for index in range(job.sequences)]
    ]


COMPLETION = post(json.dumps({"model": "small", "prompt": "a"}).encode(), "/v1/completions")


def of(user: str) -> bytes:
    return COMPLETION.replace(b"\r\n\r\n", f"\r\nX-OpenWebUI-User-Id: {user}\r\n\r\n".encode(), 1)


def app_of(model, *, bypasses_quart, answers_bytes, **options):
    """Return the application, and what counts its unread answers."""
    client = client_of(model, gateway_script=answering(LARGE), bypasses_quart=bypasses_quart, **options)
    unread = client.app._reader.unread
    unread.shares.total = answers_bytes
    return client.app, unread


async def dropped_and_waiting(unread: UnreadAnswers, dropped: int, answers: int) -> None:
    """Wait until so many answers were dropped, and so many wait."""
    await until(lambda: (sum(unread.dropped().values()), unread.bytes_waiting // LARGE) == (dropped, answers))


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_tenant_whose_clients_do_not_read_loses_its_own_answers(model, bypasses_quart):
    app, unread = app_of(model, bypasses_quart=bypasses_quart, answers_bytes=int(2.5 * LARGE))
    async with serving(app) as server:
        silent = []
        for number in range(4):
            client = await server.connect(receive_buffer=4 * KB)
            await client.send(of("ana"))
            await dropped_and_waiting(unread, max(0, number - 1), min(number + 1, 2))
            silent.append(client)
        assert unread.dropped() == {"user/ana": 2}
        for client in silent[:2]:
            answer = await client.answer()
            assert not answer.is_complete
        slow = await server.connect(receive_buffer=4 * KB)
        await slow.send(of("bob"))
        await until(lambda: unread.dropped() == {"user/ana": 3})
        answer = await slow.answer()
        assert (answer.status, answer.is_complete) == (200, True)
        assert len(answer.body) > LARGE
        last = await silent[3].answer()
        assert (last.status, last.is_complete) == (200, True)
        await until(lambda: unread.bytes_waiting == 0)
        assert unread.shares.holders == 0


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_client_that_reads_gets_its_answer_beside_those_that_do_not(model, bypasses_quart):
    app, unread = app_of(model, bypasses_quart=bypasses_quart, answers_bytes=int(2.5 * LARGE))
    async with serving(app) as server:
        reader = await server.connect(receive_buffer=4 * KB)
        await reader.send(of("ana"))
        await dropped_and_waiting(unread, 0, 1)
        received = await reader.chunk()
        for number in range(5):
            client = await server.connect(receive_buffer=4 * KB)
            await client.send(of("ana"))
            await dropped_and_waiting(unread, number, 2)
            size = len(received)
            while len(received) < size + 600 * KB:
                received += await reader.chunk()
        reader._received = received
        answer = await reader.answer()
        assert (answer.status, answer.is_complete) == (200, True)


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_deltas_of_a_stream_that_is_not_read_count(model, bypasses_quart):
    def script(_job):
        for _ in range(100):
            yield [Delta(0, "x" * 100 * KB, [10])]
        yield None

    client = client_of(model, gateway_script=script, bypasses_quart=bypasses_quart)
    unread = client.app._reader.unread
    body = json.dumps({"model": "small", "prompt": "a", "stream": True}).encode()
    async with serving(client.app) as server:
        reader = await server.connect(receive_buffer=4 * KB)
        await reader.send(post(body, "/v1/completions"))
        await until(lambda: unread.bytes_waiting > 9 * MB)
        unread.shares.total = 9 * MB
        client.gateway.script = answering(LARGE)
        other = await server.connect(receive_buffer=4 * KB)
        await other.send(COMPLETION)
        await until(unread.dropped)
        await reader.end()
        answer = await other.answer()
        assert answer.is_complete


async def test_piece_of_a_stream_counts_until_it_was_read(model):
    client = client_of(model, gateway_script=lambda _job: [[Delta(0, "x" * LARGE, [10])], None])
    unread = client.app._reader.unread
    body = json.dumps({"model": "small", "prompt": "a", "stream": True}).encode()
    async with serving(client.app) as server:
        reader = await server.connect(receive_buffer=4 * KB)
        await reader.send(post(body, "/v1/completions"))
        await dropped_and_waiting(unread, 0, 1)
        received = 0
        while received < LARGE:
            received += len(await reader.chunk())
        await until(lambda: unread.bytes_waiting == 0)
        assert client.gateway.ended == 0


async def test_data_of_a_commands_server_count_until_they_were_read(model):
    head = encode_head(PassthroughHead(200, {}))

    def script(_job):
        for data in (head, *[bytes(100 * KB)] * 100):
            yield [Delta(0, raw=[data])]
        yield None

    command = ModelStatus(model="m", kind="command", node="command:m", state="ready")
    client = client_of(model, gateway_script=script, fleet=FakeFleet(statuses=[command]))
    async with serving(client.app) as server:
        reader = await server.connect(receive_buffer=4 * KB)
        await reader.send(get("/upstream/m/x"))
        await until(lambda: client.app._reader.unread.bytes_waiting > 8 * MB)


async def test_dropped_response_of_another_server_is_left_incomplete(client):
    unread = client.app._reader.unread
    client.gateway.script = lambda _job: [[Delta(0, "x", [10])], None]
    pieces: list[bytes] = []
    answers: list[UnreadAnswer] = []
    of = unread.of
    unread.of = lambda *arguments: answers.append(of(*arguments)) or answers[-1]
    body = {"model": "small", "prompt": "a", "stream": True}
    async with trio.open_nursery() as nursery:

        async def read():
            reply = await client.post("/v1/completions", body, pieces=pieces)
            assert not reply.is_complete

        nursery.start_soon(read)
        await until(lambda: pieces)
        unread.shares.total = 100 * KB
        answers[0].add(80 * KB)
        _Sharing(unread).answer("bob", 60 * KB)
    assert unread.dropped() == {"address/192.0.2.7": 1}


class _Sharing(Reading):
    """Further answers of an application."""

    def __init__(self, answers: UnreadAnswers) -> None:
        self.answers = answers
        self.dropped = []


async def test_metrics_show_what_waits_and_what_was_dropped(model):
    key = ApiKey("k", user="ana", role="operator")
    client = client_of(model, key, ApiKey("other", models=("small",)))
    answers = _Sharing(client.app._reader.unread)
    client.app._reader.unread.shares.total = 100
    answers.answer("ana 1", 60)
    answers.answer("ana 2", 70)
    text = (await client.get("/metrics", headers={"Authorization": "Bearer k"})).body.decode()
    assert "fairlead_unread_answers_bytes 70.0\n" in text
    assert text.count('fairlead_unread_answers_dropped_total{tenant="') == 1
    text = (await client.get("/metrics", headers={"Authorization": "Bearer other"})).body.decode()
    assert 'fairlead_unread_answers_dropped_total{tenant="' not in text


def test_each_of_several_fronts_has_its_part_of_the_budget():
    limits = Limits(answers_bytes=1000)
    assert of_one_front(Config(models=(), fronts=4, limits=limits)).limits.answers_bytes == 250
    assert of_one_front(Config(models=(), fronts=1, limits=limits)).limits.answers_bytes == 1000
