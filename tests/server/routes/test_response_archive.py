"""Responses in the store, from the side of one process: what it writes, and what it makes of others' rows."""

import json
import re
import time

import pytest
import trio

from fairlead.base.errors import InvalidRequest, StoreUnavailable
from fairlead.server.responses.archive import ResponseArchive
from fairlead.server.responses.conversations import items_of, with_turn
from fairlead.server.responses.store import ResponseStore, StoredResponse
from fairlead.store.database import Database
from fairlead.store.kept import KeptChange, KeptResponsesStore, KeptRow, KeptTables
from fairlead.store.sqlite import Sqlite
from server.routes.responses_client import PATH, body_of, events_of, running

NOW = 1_800_000_000
MEGA = 1 << 20
DONE = {"id": "resp_1", "status": "completed", "error": None, "output": [{"id": "msg_1", "type": "message"}]}
CONVERSATION = json.dumps({"id": "conv_1", "created_at": 1}).encode()


class Kept(KeptResponsesStore):
    """A store that fails the next `failures` writes after it has done them, as if the answer was lost.

    `meanwhile` is called once, in a write that has its changes already; writes after it take 0.1 s.
    """

    meanwhile = None
    pause_s = 0.0
    failures = 0
    refused = ""  # the id of a response, or of a conversation with another turn, that no table can hold
    refuses_word = b"\0"  # in the object of a response that no table can hold

    async def write(self, changes):
        if any(each.row.id == self.refused or self.refuses_word in each.row.document for each in changes):
            raise InvalidRequest("it has a value that no table can hold")
        await trio.sleep(self.pause_s)
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile, self.pause_s = None, 0.1
            meanwhile()
        gone = await super().write(changes)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable
        return gone

    async def change(self, response_id, *arguments):
        if response_id == self.refused:
            raise InvalidRequest("it has a value that no table can hold")
        return await super().change(response_id, *arguments)


class Front:
    """One process: its memory and its connection."""

    def __init__(self, path, now=lambda: NOW) -> None:
        tables = [
            KeptTables(Database(Sqlite(path), usage_days=1), max_bytes=MEGA, keep_s=60, now=now)
            for _ in range(2)
        ]
        self.kept = Kept(*tables)
        self.memory = ResponseStore(MEGA, 60)
        self.archive = ResponseArchive(self.memory, self.kept, ttl_s=60, now=now)
        self.archive.with_turn = with_turn

    def begin(self, **fields) -> StoredResponse:
        response = StoredResponse("resp_1", "ana", "ana", input=b'"hello"', **fields)
        self.memory.begin(response)
        return response

    def end(self, response: StoredResponse) -> None:
        self.memory.end(response, json.dumps(DONE).encode(), trio.current_time())


@pytest.fixture
async def fronts(tmp_path, nursery):
    fronts = [Front(tmp_path / "store.db") for _ in range(2)]
    for front in fronts:
        nursery.start_soon(front.archive.run)
    yield fronts
    nursery.cancel_scope.cancel()


async def test_ended_response_moves_from_memory_to_the_store(fronts):
    mine, other = fronts
    response = mine.begin()
    assert await other.archive.find("resp_1", "ana") is None
    mine.end(response)
    await mine.archive.settle(response)
    assert len(mine.memory) == 0
    for front in fronts:
        found = await front.archive.find("resp_1", "ana")
        assert json.loads(found.document) == DONE
        assert found.has_ended
        assert await front.archive.find("resp_1", "ben") is None


async def test_answer_does_not_wait_for_a_store_that_is_away_and_is_written_later(fronts):
    mine, other = fronts
    mine.kept.failures = 2
    response = mine.begin()
    mine.end(response)
    await mine.archive.settle(response)
    assert len(mine.memory) == 1
    await mine.archive.settle(response)  # known to be away: at once
    with trio.fail_after(10):
        while len(mine.memory):  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert (await other.archive.find("resp_1", "ana")).has_ended


async def test_end_during_a_write_of_the_progress_waits_for_its_own_write(fronts):
    mine, other = fronts
    response = mine.begin()
    mine.kept.meanwhile = lambda: mine.end(response)
    mine.memory.set_document(response, b'{"id":"resp_1","status":"in_progress"}')
    with trio.fail_after(10):
        while not response.has_ended:  # noqa: ASYNC110
            await trio.sleep(0.001)
    assert (await mine.archive.find("resp_1", "ana")).has_ended
    assert (await other.archive.find("resp_1", "ana")).has_ended


async def test_response_that_no_table_can_hold_loses_no_others(fronts):
    mine, _ = fronts
    mine.kept.refused = "resp_2"
    responses = [
        StoredResponse(f"resp_{number}", user, user, input=b'"hello"') for number, user in enumerate("abc", 1)
    ]
    for response in responses:
        mine.memory.begin(response)
        mine.end(response)
    for response in responses:
        await mine.archive.settle(response)
    for front in fronts:
        found = [await front.archive.find(response.id, response.owner) for response in responses]
        assert [each is not None for each in found] == [True, False, True]
    assert len(mine.memory) == 0


async def test_response_in_progress_whose_process_has_gone_has_failed(fronts):
    mine, _ = fronts
    document = json.dumps({**DONE, "status": "in_progress", "output": []}).encode()
    row = KeptRow("resp_1", "ana", "ana", document=document, is_background=True, expires=NOW - 1)
    await mine.kept.write([KeptChange(row, is_new=True)])
    found = await mine.archive.find("resp_1", "ana")
    assert found.has_ended
    failed = json.loads(found.document)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


async def test_response_that_another_front_removes_is_cancelled(fronts):
    mine, other = fronts
    removed = trio.Event()
    response = mine.begin(is_background=True, on_removed=removed.set)
    mine.memory.set_document(response, b'{"status": "queued"}')
    await mine.archive.settle(response)
    await other.archive.remove("resp_1", "ana")
    mine.memory.set_document(response, b'{"status": "in_progress"}')
    with trio.fail_after(10):
        await removed.wait()
    assert await mine.archive.find("resp_1", "ana") is None


async def test_events_of_another_front_are_followed_to_their_end(fronts):
    mine, other = fronts
    response = mine.begin(is_background=True, keeps_events=True)
    mine.memory.set_document(response, b'{"status": "queued"}')
    mine.memory.append(response, [b"0", b"1"])
    await mine.archive.settle(response)
    reader = other.archive.events(await other.archive.find("resp_1", "ana"), 1)
    assert await anext(reader) == b"1"
    mine.memory.append(response, [b"2"])
    with trio.fail_after(10):
        assert await anext(reader) == b"2"
        mine.memory.append(response, [b"3"])
        mine.end(response)
        assert b"".join([piece async for piece in reader]) == b"3"


async def test_turn_is_added_to_its_conversation_once_although_its_write_is_repeated(fronts):
    mine, other = fronts
    conversation = StoredResponse("conv_1", "ana", "ana")
    assert await mine.archive.add(conversation, CONVERSATION)
    mine.kept.failures = 2
    response = mine.begin(conversation="conv_1")
    mine.end(response)
    with trio.fail_after(10):
        while len(mine.memory):  # noqa: ASYNC110
            await trio.sleep(0.01)
    found = await other.archive.find("conv_1", "ana")
    assert [item["type"] for item in items_of(found.document)] == ["message", "message"]


async def test_response_is_kept_although_its_conversation_cannot_hold_its_turn(fronts):
    mine, other = fronts
    assert await mine.archive.add(StoredResponse("conv_1", "ana", "ana"), CONVERSATION)
    mine.kept.refused = "conv_1"
    response = mine.begin(conversation="conv_1")
    mine.end(response)
    with pytest.raises(InvalidRequest, match="resp_1 is kept, but the conversation") as refused:
        await mine.archive.settle_or_raise(response)
    assert refused.value.param == "conversation"
    assert (await other.archive.find("resp_1", "ana")).has_ended
    assert items_of((await other.archive.find("conv_1", "ana")).document) == []
    assert len(mine.memory) == 0


async def test_refused_turn_loses_no_turns_that_are_written_with_it(fronts):
    mine, other = fronts
    for name in ("conv_1", "conv_2"):
        assert await mine.archive.add(StoredResponse(name, "ana", "ana"), CONVERSATION)
    mine.kept.refused = "conv_1"
    for number in (1, 2):
        response = StoredResponse(
            f"resp_{number}", "ana", "ana", input=b'"hello"', conversation=f"conv_{number}"
        )
        mine.memory.begin(response)
        mine.end(response)
    with trio.fail_after(10):
        while len(mine.memory):  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert [await other.archive.find(f"resp_{number}", "ana") is not None for number in (1, 2)] == [
        True,
        True,
    ]
    assert len(items_of((await other.archive.find("conv_2", "ana")).document)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gets_the_error_of_a_refused_turn_and_finds_the_response(client_with, tmp_path, stream):
    kept = Front(tmp_path / "store.db", time.time).kept
    client = client_with(kept=kept)
    async with running(client):
        conversation = (await client.post("/v1/conversations", {})).json["id"]
        kept.refused = conversation
        reply = await client.post(PATH, body_of(conversation=conversation, stream=stream))
        if stream:
            last = events_of(reply)[-1]
            assert last["type"] == "response.failed"
            message, response_id = last["response"]["error"]["message"], last["response"]["id"]
        else:
            assert (reply.status, reply.error["param"]) == (400, "conversation")
            message = reply.error["message"]
            (response_id,) = re.findall("resp_[0-9a-f]+", message)
        assert f"{response_id} is kept" in message
        assert (await client.get(f"{PATH}/{response_id}")).json["status"] == "completed"
        assert (await client.get(f"/v1/conversations/{conversation}/items")).json["data"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gets_the_error_of_a_response_that_no_table_can_hold(client_with, tmp_path, stream):
    kept = Front(tmp_path / "store.db", time.time).kept
    kept.refuses_word = b'"status":"completed"'
    client = client_with(kept=kept)
    async with running(client):
        reply = await client.post(PATH, body_of(stream=stream))
        if stream:
            *_, last = events_of(reply)
            assert last["type"] == "response.failed"
            message = last["response"]["error"]["message"]
        else:
            assert (reply.status, reply.error["param"]) == (400, "store")
            message = reply.error["message"]
        (response_id,) = re.findall("resp_[0-9a-f]+", message)
        assert (await client.get(f"{PATH}/{response_id}")).status == 404
        reply = await client.post(PATH, body_of(stream=stream, store=False))
        assert reply.status == 200


async def test_response_in_the_background_is_refused_if_no_table_can_hold_it(client_with, tmp_path):
    kept = Front(tmp_path / "store.db", time.time).kept
    kept.refuses_word = b'"status":"queued"'
    client = client_with(kept=kept)
    async with running(client):
        reply = await client.post(PATH, body_of(background=True))
        assert (reply.status, reply.error["param"]) == (400, "store")


async def test_response_in_the_background_fails_at_its_end_if_no_table_can_hold_it(fronts):
    mine, _ = fronts
    response = mine.begin(is_background=True, keeps_events=True)
    mine.memory.set_document(response, json.dumps({**DONE, "status": "queued"}).encode())
    await mine.archive.settle(response)
    mine.kept.refuses_word = b'"completed"'
    mine.end(response)
    await mine.archive.settle(response)
    for front in fronts:
        found = await front.archive.find("resp_1", "ana")
        failed = json.loads(found.document)
        assert found.has_ended
        assert (failed["status"], failed["output"]) == ("failed", [])
        assert "no table can hold" in failed["error"]["message"]


async def test_any_time_to_live_fits_the_store(tmp_path):
    front = Front(tmp_path / "store.db")
    front.archive = ResponseArchive(front.memory, front.kept, ttl_s=1e300)
    front.end(front.begin())
    await front.archive.finish()
    assert (await front.archive.find("resp_1", "ana")).has_ended


async def test_last_responses_are_written_when_the_server_stops(tmp_path):
    front = Front(tmp_path / "store.db")
    response = front.begin()
    front.end(response)
    await front.archive.finish()
    assert (await Front(tmp_path / "store.db").archive.find("resp_1", "ana")).has_ended
