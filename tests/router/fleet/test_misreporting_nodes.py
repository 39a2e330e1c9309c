"""False reports of a node about itself or its usage change no counts of others, and break nothing."""

import json
from itertools import chain, cycle
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from nodes.scripted import STREAM_HEAD, chunk, full_response, head, stream
from router.fleet.misreporting_fleet import CHAT, TRUE_TOKENS, misreporting_fleet

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, -5, 1.5, 7, 10, 11, 2**31, 2**53, 2**63, 10**30, 10**4000, True, "7", None]),
)
VALUES = st.recursive(
    NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
USAGES = st.one_of(
    st.fixed_dictionaries({"completion_tokens": NUMBERS}),
    st.fixed_dictionaries({"output_tokens": NUMBERS}),
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("completion_tokens", "output_tokens", "prompt_tokens"), VALUES),
    ),
    VALUES,
)
TEXT = "hi hi "


def in_fleet(body: Any) -> None:
    """Run a test in a fleet on a virtual clock."""

    async def run_checks() -> None:
        async with misreporting_fleet() as made:
            await body(made)

    trio.run(run_checks, clock=trio.testing.MockClock(autojump_threshold=0))


def document(usage: Any, **members: Any) -> bytes:
    # As servers in Python write it: NaN, and numbers of any length.
    return json.dumps({**members, "usage": usage}).encode()


def whole_answer(usages: list[Any]) -> bytes:
    return full_response(document(usages[0], choices=[{"index": 0, "message": {"content": TEXT}}]))


def streamed(usages: list[Any]) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": TEXT}}
    events = [document(usage, choices=[choice]) for usage in usages]
    events.append(document(usages[0], choices=[{**choice, "delta": {}, "finish_reason": "stop"}]))
    return stream(*(b"data: %s\n\n" % event for event in [*events, b"[DONE]"]))


@given(usages=st.lists(USAGES, min_size=1, max_size=3), streams=st.booleans())
def test_reported_usage_is_charged_to_its_own_tenant_within_bounds(usages, streams):
    answer = streamed(usages) if streams else whole_answer(usages)

    async def run_checks(made):
        await made.post_chat("bob", "truth")
        bob, before = made.account("bob"), made.spent("ann")
        made.responses = {CHAT: [answer]}
        await made.post_chat("ann", "lies", stream=streams)
        # At most the allowed tokens, or one for each byte; plus the estimate for the bytes of the prompt.
        assert 0 <= made.spent("ann") - before <= max(10, len(answer)) + 20
        assert made.account("bob") == bob
        made.check()
        reply = await made.post_chat("bob", "truth")
        assert reply.status == 200
        assert made.spent("bob") == 2 * bob[1]

    in_fleet(run_checks)


RUNNING = st.lists(
    st.fixed_dictionaries(
        {"model": VALUES | st.just("lies")},
        optional=dict.fromkeys(("seats", "sequences", "waiting"), VALUES),
    ),
    max_size=3,
)
LISTINGS = st.fixed_dictionaries({"data": st.lists(st.fixed_dictionaries({"id": VALUES}), max_size=4)})


@given(health=VALUES, running=RUNNING | VALUES, models=LISTINGS | VALUES)
def test_reports_of_a_node_about_itself_do_not_affect_others(health, running, models):
    async def run_checks(made):
        await made.post_chat("bob", "truth")
        bob = made.account("bob")
        probes = {"/health": health, "/running": running, "/v1/models": models}
        made.responses = {path: [full_response(json.dumps(value).encode())] for path, value in probes.items()}
        await trio.sleep(11)  # two probes
        made.check()
        await made.post_chat("ann", "lies")
        assert made.account("bob") == bob
        made.responses = {}
        await trio.sleep(11)
        made.check()
        assert next(node.state for node in made.fleet.nodes() if node.id == "liar") == "up"
        assert (await made.post_chat("ann", "lies")).status == 200
        assert (await made.post_chat("bob", "truth")).status == 200

    in_fleet(run_checks)


MANY = b'{"data": [%s]}'
PROBES = {
    "no UTF-8": {"/v1/models": b'{"data": [{"id": "\xff"}]}'},
    "no UTF-8 in health": {"/health": b'{"instance": "\xff"}'},
    "no UTF-8 in running": {"/running": b'[{"model": "\xff", "seats": 1}]'},
    "deep": dict.fromkeys(("/health", "/running", "/v1/models"), b'{"data":' + b"[" * 50000),
    "endless": dict.fromkeys(("/health", "/running", "/v1/models"), b" " * 3000000),
    "seats": {"/running": b'[{"model": "lies", "seats": 1%s}]' % (b"0" * 400)},
    "load": {"/running": b'[{"model": "lies", "seats": 1, "sequences": 1%s}]' % (b"0" * 400)},
    "negative load": {"/running": b'[{"model": "lies", "seats": 1, "sequences": -5, "waiting": -5}]'},
    "negative seats": {"/running": b'[{"model": "lies", "seats": -5}]'},
    "many models": {"/v1/models": MANY % b",".join(b'{"id": "m%d"}' % index for index in range(100_000))},
    "a long name": {"/v1/models": MANY % (b'{"id": "%s"}, {"id": "lies"}' % (b"x" * 1_000_000))},
    "odd names": {"/v1/models": MANY % rb'{"id": ""}, {"id": "a\nb"}, {"id": "\u001b[31m"}, {"id": "lies"}'},
    "many entries": {
        "/running": b'[{"model": "lies", "seats": 4096}%s]' % (b', {"model":"","seats":9}' * 50_000)
    },
}


@pytest.mark.parametrize("name", PROBES)
def test_invalid_probe_response_has_no_lasting_effect(name):
    async def run_checks(made):
        made.responses = {path: [full_response(body)] for path, body in PROBES[name].items()}
        await trio.sleep(11)
        made.check()
        assert (await made.post_chat("bob", "truth")).status == 200
        made.responses = {}
        await trio.sleep(11)
        made.check()
        assert (await made.post_chat("ann", "lies")).status == 200

    in_fleet(run_checks)


def test_at_most_a_thousand_models_of_a_node_are_accepted():
    async def run_checks(made):
        made.responses = {"/v1/models": [full_response(PROBES["many models"]["/v1/models"])]}
        await trio.sleep(6)
        (status,) = (node for node in made.fleet.nodes() if node.id == "liar")
        assert len(status.models) == 1000
        assert "m0" in status.models

    in_fleet(run_checks)


def test_model_names_that_no_request_could_have_are_left_out():
    async def run_checks(made):
        for probe in ("a long name", "odd names"):
            made.responses = {"/v1/models": [full_response(PROBES[probe]["/v1/models"])]}
            await trio.sleep(6)
            (status,) = (node for node in made.fleet.nodes() if node.id == "liar")
            assert status.models == ("lies",)

    in_fleet(run_checks)


@pytest.mark.parametrize("retry_after", ["0", "-5", "1" + "0" * 30, "NaN", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_full_node_is_retried_in_time_for_any_retry_after(retry_after):
    async def run_checks(made):
        refusal = b'{"error": {"code": "draining"}}'
        lines = ("application/json", f"Retry-After: {retry_after}")
        made.responses = {CHAT: [full_response(refusal, *lines, status="503 Stopping")]}
        reply = await made.post_chat("ann", "lies")
        assert reply.status == 503
        assert 1 <= int(reply.headers.get("retry-after", "1")) <= 60
        # At most once a second, and at least every minute.
        posts = sum(b"POST" in request for request in made.server.requests)
        assert 1 <= posts <= 65
        made.responses = {}
        assert (await made.post_chat("ann", "lies")).status == 200

    in_fleet(run_checks)


BEGUN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
DRIPS = {
    "head": ([b"HTTP/1.1 200 OK\r\nX: "], b"x"),
    "refusal": ([head(status="400 Bad")], b" "),
    "whole answer": ([head()], b" "),
    "comments": ([STREAM_HEAD], chunk(b":\n\n")),
    "event": ([STREAM_HEAD], chunk(b"x")),
    "chunk extension": ([STREAM_HEAD, b"1;"], b"x"),
    "events without a token": ([STREAM_HEAD], chunk(b'data: {"choices":[]}\n\n')),
    "comments after a token": ([STREAM_HEAD, chunk(BEGUN)], chunk(b":\n\n")),
}


@pytest.mark.parametrize("name", DRIPS)
def test_slow_trickle_of_bytes_does_not_extend_the_timeouts(name):
    async def run_checks(made):
        begin, drip = DRIPS[name]
        made.responses = {CHAT: chain(begin, cycle([1.0, drip]))}
        began = trio.current_time()
        reply = await made.post_chat("ann", "lies", stream=STREAM_HEAD in begin)
        # The first token of a stream has the queue timeout, a whole response the request timeout. A status
        # is an answer, whose body has ten seconds.
        has_token = STREAM_HEAD not in begin or chunk(BEGUN) in begin
        took_s, code = (600, b"request_timeout") if has_token else (60, b"queue_timeout")
        if name == "refusal":
            took_s, code = 10, b"refused"
        assert trio.current_time() - began == pytest.approx(took_s, abs=1)
        assert code in reply.body
        assert made.server.open_links <= 2  # the connections of probes
        made.check()
        made.responses = {}
        assert (await made.post_chat("ann", "lies")).status == 200

    in_fleet(run_checks)


# Headers -----------------------------------------------------------------------------------------------

LOCAL = {
    "content-type",
    "content-length",
    "x-content-type-options",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
}
REMOTE = [
    "Set-Cookie: session=theirs",
    "Access-Control-Allow-Origin: *",
    "Access-Control-Allow-Credentials: true",
    "Content-Security-Policy: default-src *",
    "Location: https://elsewhere.example",
    "Refresh: 0; url=https://elsewhere.example",
    "Clear-Site-Data: *",
    "Strict-Transport-Security: max-age=1",
    "Service-Worker-Allowed: /",
    "Link: </x>; rel=preload",
    "Content-Disposition: attachment",
    "Content-Language: xx",
    "Cache-Control: public, max-age=1000000",
    "Connection: keep-alive",
    "Keep-Alive: timeout=1",
    "Upgrade: h2c",
    "Trailer: X-After",
    "Server: theirs",
    "Alt-Svc: h3=1",
    "X-Request-Id: theirs",
    "X-RateLimit-Remaining-Tokens: 1",
    "X-Content-Type-Options: none",
    "X-Estimated-Wait: 99",
    "X-Queue-Position: 99",
    "Retry-After: 99",
]


@pytest.mark.parametrize("status", ["200 OK", "400 Bad"])
@pytest.mark.parametrize("streams", [False, True])
def test_no_header_of_a_node_is_relayed(status, streams):
    async def run_checks(made):
        kind = "text/event-stream" if streams and status == "200 OK" else "application/json"
        event = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        body = event if kind != "application/json" else b'{"choices": []}'
        made.responses = {CHAT: [head(kind, *REMOTE, f"Content-Length: {len(body)}", status=status) + body]}
        reply = await made.post_chat("ann", "lies", stream=streams)
        assert (f"{reply.status}", reply.body) == (status[:3], body)
        assert reply.headers["content-type"] == kind
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "theirs" not in str(reply.headers)
        own = {"cache-control", "x-accel-buffering"} if kind == "text/event-stream" else set()
        assert set(reply.headers) - own <= LOCAL
        assert reply.headers.get("cache-control", "no-cache") == "no-cache"

    in_fleet(run_checks)


@pytest.mark.parametrize("status", ["200 OK", "302 Found", "400 Bad", "404 None", "500 Bad", "503 Bad"])
@pytest.mark.parametrize("streams", [False, True])
def test_html_page_of_a_node_is_never_relayed(status, streams):
    page = b"<script>alert(document.domain)</script>"

    async def run_checks(made):
        made.responses = {
            CHAT: [full_response(page, "text/html", "Location: https://elsewhere.example", status=status)]
        }
        reply = await made.post_chat("ann", "lies", stream=streams)
        if streams and status.startswith("503"):  # it waits for the node, and has begun by then
            assert b"nodes_full" in reply.body
            assert reply.headers["content-type"].startswith("text/event-stream")
            return
        assert reply.status == (int(status[:3]) if status[:3] in ("400", "404", "503") else 502)
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert json.loads(reply.body)["error"]["message"]
        assert "location" not in reply.headers
        assert made.account("bob")[0] is None

    in_fleet(run_checks)


def test_plausible_usage_of_a_node_is_charged():
    async def run_checks(made):
        before = made.spent("bob")
        await made.post_chat("bob", "truth")
        prompt = len(json.dumps({"model": "truth", "messages": [], "max_tokens": 10})) // 4
        assert made.spent("bob") - before == prompt + TRUE_TOKENS

    in_fleet(run_checks)
