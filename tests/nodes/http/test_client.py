"""The pool of connections: bounded, reused, and with correct counts."""

from functools import partial

import pytest
import trio

from fairlead.nodes.http.client import Upstream, UpstreamFailed
from nodes.listening import CHAT, stub, tls_contexts, upstream_for


async def fetch(upstream, how="well", *, stream=False, **stub_options):
    """Return the status and the whole body of one response."""
    import json

    body = json.dumps({"stub": {"how": how, **stub_options}, "stream": stream}).encode()
    async with upstream.exchange("POST", CHAT, body) as answer:
        return answer.head.status, await answer.read_all(1_000_000)


async def test_connection_is_reused():
    async with stub() as server:
        upstream = upstream_for(server)
        for stream in (False, True, False):
            assert (await fetch(upstream, stream=stream))[0] == 200
        counts = upstream.statistics()
        assert (counts.busy, counts.idle, counts.waiting, counts.opened, counts.reused) == (0, 1, 0, 1, 2)
        assert server.accepted == 1


async def test_open_connections_are_bounded_and_waiters_are_served_in_order():
    async with stub() as server:
        upstream = upstream_for(server, capacity=2)

        async def request(number):
            await fetch(upstream, waits=True, number=number)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(request, number)
                await trio.testing.wait_all_tasks_blocked()
                assert upstream.statistics().busy <= 2
            for number in (2, 3, 4, 5, 6, 7, 8, 8):
                while len(server.jobs) < number:
                    await trio.lowlevel.checkpoint()
                assert server.connections <= 2
                server.go.release()  # one request completes and frees its connection for the next
    order = [request.stub["number"] for request in server.jobs]
    assert sorted(order[:2]) == [0, 1]
    assert order[2:] == [2, 3, 4, 5, 6, 7]
    assert server.accepted == 2


async def test_larger_capacity_admits_waiters():
    async with stub() as server:
        upstream = upstream_for(server, capacity=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, upstream, "silent")
            nursery.start_soon(fetch, upstream, "silent")
            await trio.testing.wait_all_tasks_blocked()
            assert (upstream.statistics().busy, upstream.statistics().waiting) == (1, 1)
            upstream.resize(2)
            await trio.testing.wait_all_tasks_blocked()
            assert (upstream.statistics().busy, upstream.statistics().waiting) == (2, 0)
            nursery.cancel_scope.cancel()


async def test_connection_for_a_cancelled_waiter_goes_to_the_next():
    async with stub() as server:
        upstream = upstream_for(server, capacity=1)
        cancelled_waiter = trio.CancelScope()
        got = []

        async def request_to_cancel():
            with cancelled_waiter:
                await fetch(upstream)

        async def waiting_request():
            got.append(await fetch(upstream))

        async with trio.open_nursery() as nursery:
            holder = trio.CancelScope()

            async def held_request():
                with holder:
                    await fetch(upstream, "silent")

            nursery.start_soon(held_request)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(request_to_cancel)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(waiting_request)
            await trio.testing.wait_all_tasks_blocked()
            # The connection becomes free and its next waiter is cancelled in the same step.
            holder.cancel()
            cancelled_waiter.cancel()
        assert len(got) == 1


async def test_connection_closed_by_the_server_is_not_reused():
    async with stub() as server:
        upstream = upstream_for(server)
        await fetch(upstream, "close")
        assert upstream.statistics().idle == 0
        await fetch(upstream)
        assert server.accepted == 2


async def test_request_is_retried_once_when_a_reused_connection_closes():
    # The server closes each connection at its second request, as if its idle timeout had just expired.
    async with trio.open_nursery() as nursery:
        requests = []

        async def serve(stream):
            answered = False
            async with stream:
                while data := await stream.receive_some():
                    requests.append(data)
                    if answered:
                        return
                    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    answered = True

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        upstream = Upstream(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", name="closing")
        for _ in range(3):
            assert await fetch(upstream) == (200, b"{}")
        assert upstream.statistics().opened == 3
        assert len(requests) == 5
        upstream.close()
        nursery.cancel_scope.cancel()


async def test_request_on_a_new_connection_is_not_retried():
    async with stub() as server:
        upstream = upstream_for(server)
        with pytest.raises(UpstreamFailed, match="closed the connection without a response"):
            await fetch(upstream, "gone")
        assert len(server.jobs) == 1


async def test_request_is_not_retried_after_its_response_has_begun():
    async with stub() as server:
        upstream = upstream_for(server)
        await fetch(upstream)
        with pytest.raises(UpstreamFailed, match=r"reset|in the middle of a response"):
            await fetch(upstream, "reset", after=2, stream=True)
        assert len(server.jobs) == 2


async def test_connection_idle_beyond_the_timeout_is_closed(mock_clock):
    async with stub() as server:
        upstream = upstream_for(server, idle_s=10.0)
        await fetch(upstream)
        mock_clock.jump(9)
        upstream.close_stale()
        assert upstream.statistics().idle == 1
        mock_clock.jump(2)
        upstream.close_stale()
        assert upstream.statistics().idle == 0


async def test_connection_idle_beyond_the_timeout_is_not_reused(mock_clock):
    async with stub() as server:
        upstream = upstream_for(server, idle_s=10.0)
        await fetch(upstream)
        mock_clock.jump(11)
        await fetch(upstream)
        assert server.accepted == 2


async def test_body_over_the_limit_ends_the_exchange():
    async with stub() as server:
        upstream = upstream_for(server)
        with pytest.raises(UpstreamFailed, match="more than 10 bytes"):
            async with upstream.exchange("GET", "/v1/models") as answer:
                await answer.read_all(10)
        assert upstream.statistics().busy == 0


async def test_timeout_covers_the_whole_exchange(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server:
        upstream = upstream_for(server)
        began = trio.current_time()
        with pytest.raises(UpstreamFailed, match="in time"):
            async with upstream.exchange("POST", CHAT, b'{"stub":{"how":"silent"}}', within_s=3.0):
                pytest.fail("there was no answer")
        assert pytest.approx(3.0, abs=0.5) == trio.current_time() - began


@pytest.mark.parametrize("url", ["ftp://x", "http://", "localhost:80", "http://u:p@x", "http://x y/"])
def test_invalid_url_is_refused(url):
    with pytest.raises(ValueError):
        Upstream(url, name="x")


def test_key_that_is_invalid_in_a_header_is_refused():
    with pytest.raises(ValueError, match="characters"):
        Upstream("http://x", name="x", api_key="a\r\nHost: other")


@pytest.mark.parametrize(
    ("base", "path", "sent"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/", "/v1/models", "/v1/models"),
        ("/api", "/v1/models", "/api/v1/models"),
        ("/v1", "/v1/models", "/v1/models"),
        ("/api/v1", "/v1/models", "/api/v1/models"),
        ("/v1/", "/health", "/health"),
        ("/api/paas/v4", "/v1/chat/completions", "/api/paas/v4/chat/completions"),
        ("/api/paas/v4", "/health", "/api/paas/health"),
        ("/v1?a=b", "/v1/models", "/v1/models?a=b"),
        ("?a=b&key=c", "/health", "/health?a=b&key=c"),
        ("/x?a=b", "/v1/models?c=d", "/x/v1/models?c=d&a=b"),
    ],
)
async def test_path_is_appended_to_that_of_the_url_and_its_query_to_both(base, path, sent):
    async with stub() as server:
        upstream = Upstream(server.url + base, name="x")
        async with upstream.exchange("GET", path) as answer:
            await answer.read_all(1000)
        upstream.close()
        assert [sent] == [request.path for request in server.requests]


@pytest.mark.parametrize("path", ["v1", "/a b", "/x\r\nHost: y", "/ü"])
async def test_invalid_path_is_refused(path):
    upstream = Upstream("http://127.0.0.1:1", name="x")
    with pytest.raises(ValueError, match="is not a path"):
        async with upstream.exchange("GET", path):
            pass


async def test_header_that_is_empty_or_has_a_line_break_is_not_sent():
    async with stub() as server:
        upstream = upstream_for(server)
        headers = {"X-Request-Id": "a\r\nX: y", "traceparent": "", "X-Good": "b"}
        async with upstream.exchange("GET", "/health", headers=headers) as answer:
            await answer.read_all(1000)
        got = server.requests[0].headers
        assert list(map(got.get, ("x-request-id", "x", "traceparent", "x-good"))) == [None, None, None, "b"]


@pytest.mark.parametrize(
    ("path", "speaks_messages", "headers", "sent"),
    [
        ("/v1/chat/completions", False, {}, {"authorization": "Bearer sk-1"}),
        ("/v1/chat/completions", True, {}, {"authorization": "Bearer sk-1", "x-api-key": "sk-1"}),
        (
            "/v1/messages",
            True,
            {},
            {"authorization": "Bearer sk-1", "x-api-key": "sk-1", "anthropic-version": "2023-06-01"},
        ),
        (
            "/v1/messages/count_tokens",
            True,
            {"anthropic-version": "2030-01-01"},
            {"authorization": "Bearer sk-1", "x-api-key": "sk-1", "anthropic-version": "2030-01-01"},
        ),
    ],
)
async def test_server_that_may_be_anthropics_gets_key_and_version_as_that_requires(
    path, speaks_messages, headers, sent
):
    names = ("authorization", "x-api-key", "api-key", "anthropic-version")
    async with stub() as server:
        upstream = upstream_for(server, api_key="sk-1", speaks_messages=speaks_messages)
        async with upstream.exchange("POST", path, b"{}", headers=headers) as answer:
            await answer.read_all(10_000)
        got = server.requests[0].headers
    assert {name: got[name] for name in names if name in got} == sent


async def test_deployment_of_azure_gets_the_key_as_it_requires():
    async with stub() as server:
        url = f"{server.url}/openai/deployments/d?api-version=1"
        upstream = Upstream(url, name="x", api_key="sk-1")
        async with upstream.exchange("POST", "/v1/chat/completions", b"{}") as answer:
            await answer.read_all(10_000)
        upstream.close()
        (request,) = server.requests
    assert request.path == "/openai/deployments/d/chat/completions?api-version=1"
    assert request.headers["api-key"] == "sk-1"


async def test_secrets_that_a_server_repeats_in_an_error_or_a_redirect_are_masked():
    async def repeat(stream):
        async with stream:
            target = (await stream.receive_some(10_000)).split(b" ")[1]
            body = b'{"error": {"message": "no %s for sk-12345678"}}' % target
            head = b"HTTP/1.1 404 N\r\nLocation: /login?to=%s\r\nContent-Length: %d\r\n\r\n"
            await stream.send_all(head % (target, len(body)) + body)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, repeat, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/x?version=1&key=SECRET"
        upstream = Upstream(url, name="x", api_key="sk-12345678")
        async with upstream.exchange("GET", "/health") as answer:
            shown = repr(answer.head.headers) + (await answer.read_all(1000)).decode()
        upstream.close()
        nursery.cancel_scope.cancel()
    assert "/x/health?" in shown
    assert "SECRET" not in shown
    assert "sk-1" not in shown


async def test_tls_connections_are_reused_and_an_unknown_certificate_is_refused(tmp_path):
    server_side, client_side = tls_contexts(tmp_path)

    async def serve(stream):
        async with trio.SSLStream(stream, server_side, server_side=True, https_compatible=True) as secure:
            try:
                while await secure.receive_some():
                    await secure.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            except trio.BrokenResourceError:
                return

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        url = f"https://localhost:{listeners[0].socket.getsockname()[1]}"
        known = Upstream(url, name="known", tls=client_side)
        for _ in range(3):
            assert await fetch(known) == (200, b"{}")
        assert (known.statistics().opened, known.statistics().idle) == (1, 1)
        known.close()
        other = Upstream(url, name="stranger")
        with pytest.raises(UpstreamFailed, match=r"(?i)certificate"):
            await fetch(other)
        nursery.cancel_scope.cancel()
