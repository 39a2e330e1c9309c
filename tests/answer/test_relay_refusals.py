"""A remote server that refuses a job for lack of capacity has not failed."""

import json

import pytest

from fairlead.answer import relay
from fairlead.config import ConfigError, NodeConfig
from fairlead.errors import NodeFailed, NodeFull, NodeRefused
from nodes.listening import RecordingListener, generated, ready_node, relayed_job, stub
from nodes.stub_server import whole


async def refused(monkeypatch, status: int, body: bytes, headers: str = ""):
    """Return the error of a job that gets this response, and the reports of its node."""
    answer = whole(status, body).replace(b"\r\n", f"\r\n{headers}".encode(), 1)

    async def send_answer(self, path, document):
        await self.stream.send_all(answer)

    listener = RecordingListener()
    async with stub() as server:
        monkeypatch.setattr("nodes.stub_server._ResponseScript.answer", send_answer)
        result = await generated(ready_node(server, listener), relayed_job())
    return result.error, listener.reports


def refusal_event(code: object) -> bytes:
    return json.dumps({"error": {"message": "not now", "type": "x", "param": None, "code": code}}).encode()


@pytest.mark.parametrize("code", ["model_loading", "draining", "no_node"])
async def test_fairlead_without_capacity_is_full_and_stays_up(monkeypatch, code):
    error, reports = await refused(monkeypatch, 503, refusal_event(code), "Retry-After: 7\r\n")
    assert isinstance(error, NodeFull)
    assert (7 if code == "draining" else None) == error.retry_after_s
    assert [report[0] for report in reports] == ["up"]


async def test_job_for_a_model_being_unloaded_can_go_to_another_node(monkeypatch):
    error, reports = await refused(monkeypatch, 409, refusal_event("unloaded"), "Retry-After: 2\r\n")
    assert isinstance(error, NodeFull)
    assert [report[0] for report in reports] == ["up"]


async def test_other_409_is_a_refusal_for_the_client(monkeypatch):
    error, _ = await refused(monkeypatch, 409, refusal_event("conflict"))
    assert isinstance(error, NodeRefused)
    assert error.status == 409


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"\xff", refusal_event("other"), refusal_event(503), refusal_event(None)]
)
async def test_other_503_is_a_failure_of_the_node(monkeypatch, body):
    error, _ = await refused(monkeypatch, 503, body)
    assert isinstance(error, NodeFailed)
    assert not isinstance(error, NodeFull)


@pytest.mark.parametrize("value", ["soon", "-1", "1e3", "٣", "9" * 40, ""])
async def test_invalid_retry_after_is_ignored(monkeypatch, value):
    value = value if value.isascii() else ""
    error, _ = await refused(monkeypatch, 503, refusal_event("draining"), f"Retry-After: {value}\r\n")
    assert isinstance(error, NodeFull)
    assert error.retry_after_s is None


def test_codes_of_a_full_node_are_those_that_fairlead_sends():
    assert {"model_loading", "draining", "no_node", "unloaded"} == relay.BUSY


@pytest.mark.parametrize("url", ["http://me:secret@host:1", "http://me@host", "https://:secret@host/v1"])
def test_url_with_a_user_name_or_password_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match="nodes") as refusal:
        NodeConfig(id="a", url=url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_key_that_is_invalid_in_a_header_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="apiKey") as refusal:
        NodeConfig(id="a", url="http://host:1", api_key=key)
    assert key not in str(refusal.value)
