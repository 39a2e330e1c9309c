"""What a server elsewhere says when it has no room: that is no failure of it."""

import json

import pytest

from fairlead.config import ConfigError, NodeConfig
from fairlead.errors import NodeFailed, NodeFull, NodeRefused
from fairlead.nodes import relay
from nodes.listening import Listening, generated, ready_node, relayed_job, stub
from nodes.stub_server import whole


async def refused(monkeypatch, status: int, body: bytes, headers: str = ""):
    """Return the error of a job that is answered so, and what its node reported."""
    answer = whole(status, body).replace(b"\r\n", f"\r\n{headers}".encode(), 1)

    async def say(self, path, document):
        await self.stream.send_all(answer)

    listening = Listening()
    async with stub() as server:
        monkeypatch.setattr("nodes.stub_server._Misbehaviour.answer", say)
        got = await generated(ready_node(server, listening), relayed_job())
    return got.error, listening.reports


def told(code: object) -> bytes:
    return json.dumps({"error": {"message": "not now", "type": "x", "param": None, "code": code}}).encode()


@pytest.mark.parametrize("code", ["model_loading", "draining", "no_node"])
async def test_a_fairlead_without_room_is_full_and_not_ill(monkeypatch, code):
    error, reports = await refused(monkeypatch, 503, told(code), "Retry-After: 7\r\n")
    assert isinstance(error, NodeFull)
    assert (7 if code == "draining" else None) == error.retry_after_s
    assert ["up"] == [report[0] for report in reports]


async def test_a_fairlead_that_unloads_the_model_gives_the_job_back_for_another_node(monkeypatch):
    error, reports = await refused(monkeypatch, 409, told("unloaded"), "Retry-After: 2\r\n")
    assert isinstance(error, NodeFull)
    assert [report[0] for report in reports] == ["up"]


async def test_any_other_409_is_the_clients_answer(monkeypatch):
    error, _ = await refused(monkeypatch, 409, told("conflict"))
    assert isinstance(error, NodeRefused)
    assert error.status == 409


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", told("other"), told(503), told(None)])
async def test_any_other_503_is_a_failure(monkeypatch, body):
    error, _ = await refused(monkeypatch, 503, body)
    assert isinstance(error, NodeFailed)
    assert not isinstance(error, NodeFull)


@pytest.mark.parametrize("said", ["soon", "-1", "1e3", "٣", "9" * 40, ""])
async def test_a_time_that_is_none_is_not_taken(monkeypatch, said):
    said = said if said.isascii() else ""
    error, _ = await refused(monkeypatch, 503, told("draining"), f"Retry-After: {said}\r\n")
    assert isinstance(error, NodeFull)
    assert error.retry_after_s is None


def test_a_full_node_has_the_codes_that_a_fairlead_gives():
    assert {"model_loading", "draining", "no_node", "unloaded"} == relay.FULL


@pytest.mark.parametrize("url", ["http://me:secret@host:1", "http://me@host", "https://:secret@host/v1"])
def test_a_url_with_a_name_or_a_password_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match="nodes") as refusal:
        NodeConfig(id="a", url=url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_may_have_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="apiKey") as refusal:
        NodeConfig(id="a", url="http://host:1", api_key=key)
    assert key not in str(refusal.value)
