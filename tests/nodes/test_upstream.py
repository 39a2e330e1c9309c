"""The pool of connections: bounded, reused, and never wrong about what is left of it."""

import ssl

import pytest
import trio

from fairlead.nodes.upstream import Upstream, UpstreamFailed
from nodes.listening import CHAT, stub, upstream_of


async def asked(upstream, how="well", *, stream=False, **stub_options):
    """The status and the whole body of one answer."""
    import json

    body = json.dumps({"stub": {"how": how, **stub_options}, "stream": stream}).encode()
    async with upstream.exchange("POST", CHAT, body) as answer:
        return answer.head.status, await answer.read_all(1_000_000)


async def test_a_connection_is_used_again():
    async with stub() as server:
        upstream = upstream_of(server)
        for stream in (False, True, False):
            assert 200 == (await asked(upstream, stream=stream))[0]
        counts = upstream.statistics()
        assert (0, 1, 0, 1, 2) == (counts.busy, counts.idle, counts.waiting, counts.opened, counts.reused)
        assert 1 == server.accepted


async def test_no_more_than_its_capacity_are_open_and_the_rest_wait_their_turn():
    async with stub() as server:
        upstream = upstream_of(server, capacity=2)

        async def visitor(number):
            await asked(upstream, waits=True, number=number)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(visitor, number)
                await trio.testing.wait_all_tasks_blocked()
                assert upstream.statistics().busy <= 2
            for there in (2, 3, 4, 5, 6, 7, 8, 8):
                while len(server.jobs) < there:
                    await trio.lowlevel.checkpoint()
                assert server.connections <= 2
                server.go.release()  # one is answered, and makes way for the next
    order = [request.stub["number"] for request in server.jobs]
    assert [0, 1] == sorted(order[:2])
    assert [2, 3, 4, 5, 6, 7] == order[2:]
    assert 2 == server.accepted


async def test_a_larger_capacity_lets_those_in_who_wait():
    async with stub() as server:
        upstream = upstream_of(server, capacity=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, upstream, "silent")
            nursery.start_soon(asked, upstream, "silent")
            await trio.testing.wait_all_tasks_blocked()
            assert (1, 1) == (upstream.statistics().busy, upstream.statistics().waiting)
            upstream.resize(2)
            await trio.testing.wait_all_tasks_blocked()
            assert (2, 0) == (upstream.statistics().busy, upstream.statistics().waiting)
            nursery.cancel_scope.cancel()


async def test_a_waiter_that_leaves_makes_way_for_the_next():
    async with stub() as server:
        upstream = upstream_of(server, capacity=1)
        leaving = trio.CancelScope()
        got = []

        async def leaver():
            with leaving:
                await asked(upstream)

        async def stayer():
            got.append(await asked(upstream))

        async with trio.open_nursery() as nursery:
            holder = trio.CancelScope()

            async def hold():
                with holder:
                    await asked(upstream, "silent")

            nursery.start_soon(hold)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(leaver)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(stayer)
            await trio.testing.wait_all_tasks_blocked()
            # The place becomes free and its first heir leaves in the same breath.
            holder.cancel()
            leaving.cancel()
        assert 1 == len(got)


async def test_a_connection_that_the_server_has_closed_is_not_used():
    async with stub() as server:
        upstream = upstream_of(server)
        await asked(upstream, "close")
        assert 0 == upstream.statistics().idle
        await asked(upstream)
        assert 2 == server.accepted


async def test_a_connection_that_closes_under_the_request_is_tried_again_once():
    # The server closes each connection when its second request comes, as one does whose time is just over.
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
            assert (200, b"{}") == await asked(upstream)
        assert 3 == upstream.statistics().opened
        assert 5 == len(requests)
        upstream.close()
        nursery.cancel_scope.cancel()


async def test_a_new_connection_that_closes_unanswered_is_not_tried_again():
    async with stub() as server:
        upstream = upstream_of(server)
        with pytest.raises(UpstreamFailed, match="closed the connection unanswered"):
            await asked(upstream, "gone")
        assert 1 == len(server.jobs)


async def test_what_has_begun_is_not_tried_again():
    async with stub() as server:
        upstream = upstream_of(server)
        await asked(upstream)
        with pytest.raises(UpstreamFailed, match=r"reset|broke off"):
            await asked(upstream, "reset", after=2, stream=True)
        assert 2 == len(server.jobs)


async def test_a_connection_that_was_idle_too_long_is_closed(mock_clock):
    async with stub() as server:
        upstream = upstream_of(server, idle_s=10.0)
        await asked(upstream)
        mock_clock.jump(9)
        upstream.close_stale()
        assert 1 == upstream.statistics().idle
        mock_clock.jump(2)
        upstream.close_stale()
        assert 0 == upstream.statistics().idle


async def test_a_connection_that_was_idle_too_long_is_not_used_either(mock_clock):
    async with stub() as server:
        upstream = upstream_of(server, idle_s=10.0)
        await asked(upstream)
        mock_clock.jump(11)
        await asked(upstream)
        assert 2 == server.accepted


async def test_a_body_that_is_larger_than_wanted_ends_the_exchange():
    async with stub() as server:
        upstream = upstream_of(server)
        with pytest.raises(UpstreamFailed, match="more than 10 bytes"):
            async with upstream.exchange("GET", "/v1/models") as answer:
                await answer.read_all(10)
        assert 0 == upstream.statistics().busy


async def test_an_exchange_has_a_time_for_all_of_it(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server:
        upstream = upstream_of(server)
        began = trio.current_time()
        with pytest.raises(UpstreamFailed, match="in time"):
            async with upstream.exchange("POST", CHAT, b'{"stub":{"how":"silent"}}', within_s=3.0):
                pytest.fail("there was no answer")
        assert pytest.approx(3.0, abs=0.5) == trio.current_time() - began


@pytest.mark.parametrize("url", ["ftp://x", "http://", "localhost:80", "http://u:p@x", "http://x y/"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError):
        Upstream(url, name="x")


def test_a_key_that_no_header_may_have_is_refused():
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
    ],
)
async def test_the_path_goes_behind_that_of_the_url(base, path, sent):
    async with stub() as server:
        upstream = Upstream(server.url + base, name="x")
        async with upstream.exchange("GET", path) as answer:
            await answer.read_all(1000)
        upstream.close()
        assert [sent] == [request.path for request in server.requests]


@pytest.mark.parametrize("path", ["v1", "/a b", "/x\r\nHost: y", "/ü"])
async def test_a_path_that_is_none_is_refused(path):
    upstream = Upstream("http://127.0.0.1:1", name="x")
    with pytest.raises(ValueError, match="is no path"):
        async with upstream.exchange("GET", path):
            pass


async def test_a_header_that_is_empty_or_has_a_line_in_it_is_not_passed_on():
    async with stub() as server:
        upstream = upstream_of(server)
        headers = {"X-Request-Id": "a\r\nX: y", "traceparent": "", "X-Good": "b"}
        async with upstream.exchange("GET", "/health", headers=headers) as answer:
            await answer.read_all(1000)
        got = server.requests[0].headers
        assert [None, None, None, "b"] == list(map(got.get, ("x-request-id", "x", "traceparent", "x-good")))


async def test_over_tls_it_is_the_same_and_a_stranger_is_refused(tmp_path):
    server_side, client_side = _tls(tmp_path)

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
            assert (200, b"{}") == await asked(known)
        assert (1, 1) == (known.statistics().opened, known.statistics().idle)
        known.close()
        stranger = Upstream(url, name="stranger")
        with pytest.raises(UpstreamFailed, match=r"(?i)certificate"):
            await asked(stranger)
        nursery.cancel_scope.cancel()


def _tls(folder):
    import subprocess

    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    return server_side, ssl.create_default_context(cafile=str(certificate))
