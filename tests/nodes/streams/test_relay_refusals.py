"""A remote server that refuses a job for lack of capacity has not failed."""

import json

import pytest
import trio

from fairlead.base.config import ConfigError, NodeConfig
from fairlead.base.errors import NodeFull, NodeLimited, NodeRefused, NodeUnsuited, QuotaExhausted
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
    assert error.retry_after_s == 7
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
    "reason",
    [
        {"code": "insufficient_quota", "type": "insufficient_quota"},
        {"code": None, "type": "insufficient_quota"},
        {"code": "billing_hard_limit_reached", "type": "invalid_request_error"},
        {"code": "429", "type": "budget_exceeded"},
    ],
)
async def test_429_of_a_key_without_money_is_no_full_node_but_an_unsuited_one(monkeypatch, reason):
    body = json.dumps({"error": {"message": "You exceeded your current quota", "param": None, **reason}})
    error, reports = await refused(monkeypatch, 429, body.encode(), "Retry-After: 7\r\n")
    assert isinstance(error, NodeUnsuited)
    assert isinstance(error.answer, NodeRefused)
    assert (error.answer.status, error.answer.body) == (429, body.encode())
    assert [report[0] for report in reports] == ["up"]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"\xff", refusal_event("other"), refusal_event(503), refusal_event(None)]
)
async def test_other_503_is_a_full_node_too(monkeypatch, body):
    error, reports = await refused(monkeypatch, 503, body)
    assert isinstance(error, NodeFull)
    assert " answered 503" in error.message
    assert [report[0] for report in reports] == ["up"]


@pytest.mark.parametrize(
    ("member", "kind"),
    [({"code": "insufficient_quota"}, NodeUnsuited), ({"type": "insufficient_quota"}, NodeUnsuited)]
    + [({"code": value}, NodeLimited) for value in ("rate_limit_exceeded", None, 429)],
)
async def test_job_does_not_wait_for_a_node_without_quota(monkeypatch, member, kind):
    body = json.dumps({"error": {"message": "pay", **member}}).encode()
    error, reports = await refused(monkeypatch, 429, body, "Retry-After: 7\r\n")
    assert type(error) is kind
    assert [report[0] for report in reports] == ["up"]
    if kind is NodeUnsuited:
        assert (type(error.answer), error.answer.status) == (QuotaExhausted, 429)
        assert "pay" in error.answer.message


@pytest.mark.parametrize("value", ["soon", "-1", "1e3", "٣", "9" * 40, ""])
async def test_invalid_retry_after_is_ignored(monkeypatch, value):
    value = value if value.isascii() else ""
    error, _ = await refused(monkeypatch, 503, refusal_event("draining"), f"Retry-After: {value}\r\n")
    assert isinstance(error, NodeFull)
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"error":"the server is busy: too many requests wait"}',
            "the server is busy: too many requests wait",
        ),
        (b'{"error":{"message":"slow down","code":429}}', "slow down"),
        (b'{"detail":"not now"}', "not now"),
        (b"<h1>503</h1>", "<h1>503</h1>"),
    ],
)
async def test_message_of_a_full_node_is_kept_in_any_form(monkeypatch, body, message):
    error, _ = await refused(monkeypatch, 503, body)
    assert error.message.endswith(f" answered 503: {message}")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ("Retry-After: 5\r\n", 5),
        ("Date: Fri, 27 Nov 2026 10:00:00 GMT\r\nRetry-After: Fri, 27 Nov 2026 10:00:20 GMT\r\n", 20),
        ("Date: Fri, 27 Nov 2026 10:00:00 GMT\r\nRetry-After: Fri, 27 Nov 2026 09:00:00 GMT\r\n", 1),
        ("Date: Fri, 27 Nov 2026 10:00:00 GMT\r\nRetry-After: Fri, 27 Nov 2099 10:00:00 GMT\r\n", 60),
        ("Retry-After: Fri, 99 Nov 2026 10:00:00 GMT\r\n", None),
    ],
)
async def test_time_of_a_full_node_is_a_number_or_a_date_within_a_bound(monkeypatch, headers, seconds):
    error, _ = await refused(monkeypatch, 503, b"", headers)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize("how", ["cut off", "late"])
async def test_status_alone_is_an_answer_if_its_body_is_cut_off_or_late(monkeypatch, autojump_clock, how):
    autojump_clock.autojump_threshold = 0.05

    async def send_answer(self, path, document):
        await self.stream.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 100\r\n\r\nhalf")
        if how == "late":
            await trio.sleep(100)
        await self.stream.aclose()

    async with stub() as server:
        monkeypatch.setattr("nodes.stub_server._ResponseScript.answer", send_answer)
        node = ready_node(server)
        for _ in range(3):
            result = await generated(node, relayed_job())
            assert isinstance(result.error, NodeRefused)
        assert node.status().is_up


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
