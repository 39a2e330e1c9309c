"""OpenAI's package with responses in the store: after a restart, at every front, and without the store."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from clients.conftest import MODEL
from e2e.real_server import RealServer, configured, real_server, until
from store.databases import refuse_large, start_postgres

openai = pytest.importorskip("openai")

ASK = {"model": MODEL, "input": "Count from 1 to 5.", "temperature": 0}
ENDLESS = {"model": MODEL, "input": "hello", "extra_body": {"ignore_eos": True}, "background": True}
KEYS = [{"key": "sk-ana", "user": "ana"}, {"key": "sk-ben", "user": "ben"}]
FRONTS = (1, 2)
ROUNDS = 12  # new connections, so that both fronts get some


def started(folder: Path, store: object, fronts: int) -> contextlib.AbstractContextManager[RealServer]:
    settings = {"fronts": fronts, "apiKeys": KEYS, "responses": {"inStore": True}}
    return real_server(*configured(folder, {}, **settings), "--store", str(store))


def connect(server: RealServer, key: str = "sk-ana") -> "openai.OpenAI":
    """Return a client without kept connections: each request is one of its own, at any front."""
    http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=http)


@pytest.fixture(scope="module", params=FRONTS)
def server(request, tmp_path_factory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("in_store")
    with started(folder, folder / "fairlead.db", request.param) as running:
        yield running


@pytest.fixture
def client(server: RealServer) -> Iterator["openai.OpenAI"]:
    with connect(server) as client:
        yield client


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def store(kind, tmp_path) -> Iterator[object]:
    """The path of a new file of SQLite, or the URL of a new server of PostgreSQL."""
    if kind == "sqlite":
        yield tmp_path / "fairlead.db"
        return
    postgres = start_postgres()
    yield postgres.url
    postgres.remove()


@pytest.mark.parametrize("fronts", FRONTS)
def test_responses_survive_a_restart(tmp_path, fronts, store):
    with started(tmp_path, store, fronts) as server, connect(server) as client:
        first = client.responses.create(**ASK)
        second = client.responses.create(**ASK | {"input": "Again."}, previous_response_id=first.id)
        (*_, event) = client.responses.create(**ASK, stream=True)
        streamed = event.response
        assert server.stop() == 0
    with started(tmp_path, store, fronts) as server, connect(server) as client:
        for response in (first, second, streamed):
            assert client.responses.retrieve(response.id) == response
        third = client.responses.create(**ASK | {"input": "Again."}, previous_response_id=second.id)
        assert third.usage.input_tokens > second.usage.input_tokens
        (item,) = client.responses.input_items.list(second.id)
        assert item.content[0].text == "Again."
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ASK, previous_response_id=third.id)
        assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize("fronts", FRONTS)
def test_client_is_told_of_a_response_that_its_store_cannot_hold(tmp_path, fronts, kind, store):
    with started(tmp_path, store, fronts) as server, connect(server) as client:
        first = client.responses.create(**ASK)
        refuse_large(store, kind)
        large = {"extra_headers": {"X-Request-Id": "large"}}
        for _ in range(ROUNDS // 4):
            with pytest.raises(openai.BadRequestError, match="cannot keep the response resp_") as refused:
                client.responses.create(**ASK, **large)
            assert refused.value.param == "store"
            with client.responses.create(**ASK, **large, stream=True) as events:
                ends = ("response.completed", "response.failed")
                last = next(event for event in events if event.type in ends)
            assert last.type == "response.failed"
            assert "cannot keep the response" in last.response.error.message
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(last.response.id)
            with pytest.raises(openai.BadRequestError, match="cannot keep the response"):
                client.responses.create(**ENDLESS, **large)
            assert client.responses.create(**ASK, **large, store=False).status == "completed"
            first = client.responses.create(**ASK, previous_response_id=first.id, max_output_tokens=1)


@pytest.mark.parametrize("fronts", FRONTS)
def test_any_text_and_any_name_may_be_in_a_response(tmp_path, fronts, store):
    with started(tmp_path, store, fronts) as server, connect(server) as client:
        texts = {"input": "nul \0, \U0001f600", "metadata": {"nul \0": "\U0001f600"}}
        response = client.responses.create(**ASK | texts)
        for _ in range(ROUNDS // 4):
            assert client.responses.retrieve(response.id) == response
            (item,) = client.responses.input_items.list(response.id)
            assert item.content[0].text == texts["input"]
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(**ASK, previous_response_id="nul \0")
            assert refused.value.code == "previous_response_not_found"
            with pytest.raises(openai.NotFoundError) as missing:
                client.responses.create(**ASK, conversation="conv_nul \0")
            assert missing.value.param == "conversation"


@pytest.mark.parametrize("stream", [False, True])
def test_response_is_found_at_every_front_at_once(client, stream):
    for _ in range(ROUNDS):
        if stream:
            (*_, event) = client.responses.create(**ASK, stream=True)
            response = event.response
        else:
            response = client.responses.create(**ASK)
        assert client.responses.retrieve(response.id) == response
        follow_up = {"input": "Again.", "max_output_tokens": 1, "previous_response_id": response.id}
        client.responses.create(**ASK | follow_up)


def test_response_in_the_background_is_read_and_cancelled_at_every_front(client, server):
    for _ in range(ROUNDS // 2):
        created = client.responses.create(**ENDLESS)
        until(lambda: client.responses.retrieve(created.id).status == "in_progress")  # noqa: B023
        assert client.responses.cancel(created.id).status == "cancelled"
        assert client.responses.retrieve(created.id).status == "cancelled"


def test_deleted_response_in_the_background_ends(client, server):
    for _ in range(ROUNDS // 4):
        created = client.responses.create(**ENDLESS)
        until(lambda: client.responses.retrieve(created.id).status == "in_progress")  # noqa: B023
        client.responses.delete(created.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(created.id)


def test_events_in_the_background_are_the_same_at_every_front(client):
    for cursor in range(4):
        begun = []
        stream = client.responses.create(**ASK, background=True, stream=True)
        for event in stream:
            begun.append(event)
            if event.sequence_number == cursor:
                break
        stream.close()
        response_id = begun[0].response.id
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=cursor))
        assert [event.sequence_number for event in (*begun, *rest)] == list(range(cursor + 1 + len(rest)))
        assert rest[-1].type == "response.completed"
        for _ in range(4):
            assert list(client.responses.retrieve(response_id, stream=True)) == [*begun, *rest]
            assert client.responses.retrieve(response_id) == rest[-1].response


def test_response_of_another_key_is_not_found_at_any_front(client, server):
    response = client.responses.create(**ASK)
    background = client.responses.create(**ENDLESS)
    with connect(server, "sk-ben") as ben:
        for _ in range(ROUNDS // 2):
            for response_id in (response.id, background.id):
                for of in (
                    ben.responses.retrieve,
                    ben.responses.delete,
                    ben.responses.cancel,
                    ben.responses.input_items.list,
                ):
                    with pytest.raises(openai.NotFoundError):
                        of(response_id)
            with pytest.raises(openai.BadRequestError):
                ben.responses.create(**ASK, previous_response_id=response.id)
    assert client.responses.retrieve(response.id) == response
    # On a slow machine it has reached the end of its context.
    assert client.responses.cancel(background.id).status in ("cancelled", "incomplete")


@pytest.mark.parametrize("fronts", FRONTS)
def test_store_that_is_away_fails_reads_and_not_answers(tmp_path, fronts):
    store = tmp_path / "fairlead.db"
    with started(tmp_path, store, fronts) as server, connect(server) as client:
        kept = client.responses.create(**ASK)
        with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other:
            # An answer does not wait for a slow write; until then its front has the response.
            find = "SELECT 1 FROM fairlead_responses WHERE id = ? AND has_ended = 1"
            until(lambda: other.execute(find, (kept.id,)).fetchone())
            other.execute("BEGIN IMMEDIATE")
            missed = [client.responses.create(**ASK) for _ in range(5)]  # before the store is back
            with pytest.raises(openai.APIStatusError) as refused:
                client.responses.create(**ASK, previous_response_id=kept.id)
            assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
            other.execute("ROLLBACK")
        assert all(response.status == "completed" for response in missed)
        for response in missed:

            def is_found(response_id: str = response.id) -> bool:
                with contextlib.suppress(openai.APIStatusError):
                    return client.responses.retrieve(response_id).id == response_id
                return False

            until(is_found)
