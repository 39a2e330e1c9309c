"""Error responses: statuses, headers, format, request ids."""

import json

import pytest

from fairlead.base import errors
from fairlead.generation.caller import MAX_REQUEST_ID_LENGTH

CHAT = "/v1/chat/completions"


def leaves(kind=errors.FairleadError):
    for child in kind.__subclasses__():
        yield child
        yield from leaves(child)


async def test_error_in_an_exception_group_is_found(client, chat):
    inner = ExceptionGroup("", [errors.NodeFailed("gone"), OSError("closed")])
    client.gateway.refusal = ExceptionGroup("", [inner])
    reply = await client.post(CHAT, chat())
    assert (reply.status, reply.error["code"]) == (502, "node_failed")


@pytest.mark.parametrize("group", [False, True])
async def test_bug_is_a_500_without_internals_and_is_logged_once(client, chat, log, group):
    bug = ZeroDivisionError("secret detail")
    client.gateway.refusal = ExceptionGroup("", [bug]) if group else bug
    reply = await client.post(CHAT, chat(), headers={"X-Request-Id": "abc"})
    assert (reply.status, reply.error["code"], reply.error["type"]) == (500, "internal_error", "server_error")
    assert b"secret" not in reply.body
    assert b"ZeroDivision" not in reply.body
    (entry,) = log
    assert entry["log_level"] == "error"
    assert entry["request_id"] == "abc"
    assert entry["exc_info"] is bug


async def test_expected_error_is_one_log_line_without_a_traceback(client, log):
    await client.post(CHAT, b"{")
    (entry,) = log
    assert (entry["log_level"], entry["outcome"]) == ("info", "invalid_request")
    assert "exc_info" not in entry


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/chat/completions/", "/static/x", "/v1/models/"])
async def test_unknown_path_is_a_404_in_json(client, path):
    reply = await client.get(path)
    assert (reply.status, reply.error["code"], reply.error["type"]) == (404, "not_found", "not_found_error")
    assert "x-request-id" in reply.headers


async def test_unknown_model_is_a_404(client, chat):
    for name in ("huge", "x" * 100_000):
        reply = await client.post(CHAT, chat(model=name))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
        assert len(reply.body) < 400
    reply = await client.get("/v1/models/some/where")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "given", ["a", "!~", "x" * MAX_REQUEST_ID_LENGTH, "0f8fad5b-d9cb-469f-a165-70867728950e"]
)
async def test_clients_request_id_is_used(client, chat, given):
    for reply in (
        await client.get("/health", headers={"X-Request-Id": given}),
        await client.get("/nowhere", headers={"X-Request-Id": given}),
        await client.post(CHAT, chat(stream=True), headers={"X-Request-Id": given}),
    ):
        assert reply.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", " ", "a b", "é", "x" * (MAX_REQUEST_ID_LENGTH + 1), "a\x7f", "a\tb"])
async def test_request_id_that_is_not_safe_in_a_log_line_is_replaced(client, given):
    reply = await client.get("/health", headers={"X-Request-Id": given})
    made = reply.headers["x-request-id"]
    assert made != given
    assert len(made) == 32
    assert made != (await client.get("/health", headers={"X-Request-Id": given})).headers["x-request-id"]


async def test_answers_are_compact_json(client):
    reply = await client.get("/nowhere")
    assert reply.body == json.dumps(reply.json, separators=(",", ":")).encode()
