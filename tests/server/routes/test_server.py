"""The listener over real sockets: binding, serving, refusals, failures and chunked bodies."""

import errno
import resource
import socket

import pytest
import structlog
import trio

from fairlead.base.config import ConfigError, Limits
from fairlead.server.listener import listener
from fairlead.server.listener.listener import bind, serve_http
from server.routes.raw_http import Apps, Client, get, post, serving

# Binding -------------------------------------------------------------------------------------------


def close_all(sockets):
    for sock in sockets:
        sock.close()


def test_port_0_picks_one_port_for_all_addresses_of_the_host():
    sockets = bind("localhost", 0)
    ports = {sock.getsockname()[1] for sock in sockets}
    close_all(sockets)
    assert len(ports) == 1
    assert 0 not in ports


def test_port_that_is_free_on_one_address_and_taken_on_another_is_not_picked(monkeypatch):
    two = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.1", "127.6.1.8")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: two)
    listen, taken = listener._listen, []

    def late(family, address, *, is_shared):
        if address[0] == "127.6.1.8" and len(taken) < 3:
            taken.append(listen(family, address, is_shared=is_shared))
        return listen(family, address, is_shared=is_shared)

    monkeypatch.setattr(listener, "_listen", late)
    sockets = bind("localhost", 0)
    ports = [{sock.getsockname()[1] for sock in these} for these in (sockets, taken)]
    close_all(sockets + taken)
    assert (len(ports[0]), len(ports[1]), ports[0] & ports[1]) == (1, 3, set())


def test_port_in_use_is_reported_with_advice():
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    with pytest.raises(OSError) as caught:
        bind("127.0.0.1", port)
    close_all(sockets)
    assert caught.value.errno == errno.EADDRINUSE
    assert str(caught.value) == (
        f"port {port} of 127.0.0.1 is in use by another program, perhaps another Fairlead (`fairlead ps`): "
        "stop that one, or choose another port with --port"
    )


def test_address_of_another_machine_is_reported_with_the_systems_reason():
    with pytest.raises(OSError, match=r"^cannot listen on 192\.0\.2\.1, port 80: "):
        bind("192.0.2.1", 80)


@pytest.mark.parametrize("host", ["no such host", "a..b", "256.1.1.1.1"])
def test_host_that_does_not_exist_is_a_configuration_error(host):
    with pytest.raises(ConfigError, match="host"):
        bind(host, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_host_is_bound_with_and_without_brackets(host):
    try:
        sockets = bind(host, 0)
    except OSError as error:
        pytest.skip(str(error))
    families = [sock.family for sock in sockets]
    close_all(sockets)
    assert families == [socket.AF_INET6]


def test_all_addresses_of_ipv6_mean_those_of_ipv4_too():
    sockets = bind("::", 0)
    families = {sock.family for sock in sockets}
    (port,) = {sock.getsockname()[1] for sock in sockets}
    with socket.create_connection(("127.0.0.1", port)):
        close_all(sockets)
    assert families - {socket.AF_INET6} == {socket.AF_INET}


def test_all_addresses_are_those_of_ipv4_on_a_machine_without_ipv6(monkeypatch):
    class WithoutIpv6(socket.socket):
        def __init__(self, family=socket.AF_INET, *arguments, **options):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", WithoutIpv6)
    sockets = bind("::", 0)
    close_all(sockets)
    assert [sock.family for sock in sockets] == [socket.AF_INET]


def test_ipv4_host_is_bound_alone():
    sockets = bind("0.0.0.0", 0)
    close_all(sockets)
    assert [sock.family for sock in sockets] == [socket.AF_INET]


def test_accepted_connections_have_tcp_nodelay_and_keepalive():
    (listening,) = bind("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        listening.settimeout(60)  # the connection may not have arrived yet
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# Serving -------------------------------------------------------------------------------------------


async def test_one_connection_serves_request_after_request():
    async with serving(Apps()) as server:
        client = await server.connect()
        bodies = [(await client.fetch(post(b"%d" % n, "/echo"))).body for n in range(20)]
    assert [b"%d" % n for n in range(20)] == bodies


async def test_pipelined_requests_are_answered_in_order():
    async with serving(Apps()) as server:
        client = await server.connect()
        await client.send(b"".join(post(b"%d" % n, "/echo") for n in range(50)))
        bodies = [(await client.answer()).body for _ in range(50)]
    assert [b"%d" % n for n in range(50)] == bodies


async def test_empty_line_after_a_body_is_not_the_next_request():
    async with serving(Apps()) as server:
        client = await server.connect()
        first = await client.fetch(post(b"one", "/echo") + b"\r\n")
        second = await client.fetch(b"\r\n" + post(b"two", "/echo"))
    assert [first.body, second.body] == [b"one", b"two"]


async def test_chunked_body_arrives_whole_byte_by_byte():
    head = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with serving(Apps()) as server:
        client = await server.connect()
        for index in range(len(request)):
            await client.send(request[index : index + 1])
        answer = await client.answer()
    assert answer.body == b"abcde"


async def test_client_that_expects_100_continue_gets_it_before_it_sends_its_body():
    async with serving(Apps()) as server:
        client = await server.connect()
        head, _, body = post(b"hello", "/echo", "Expect: 100-continue").partition(b"\r\n\r\n")
        go_on = await client.fetch(head + b"\r\n\r\n")
        answer = await client.fetch(body)
    assert (go_on.status, answer.body) == (100, b"hello")


async def test_large_body_is_read_ahead_in_part_and_the_rest_when_the_app_reads():
    apps = Apps()
    body = bytes(1_000_000)

    async def late(receive, send):
        apps.waiting.set()
        await apps.go.wait()
        await apps.echo(receive, send)

    apps.late = late
    async with serving(apps) as server:
        client = await server.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, post(body, "/late"))
            await apps.waiting.wait()
            apps.go.set()
            answer = await client.answer()
    assert body == answer.body


async def test_connection_close_is_honored():
    async with serving(Apps()) as server:
        client = await server.connect()
        answer = await client.fetch(get("/", "Connection: close"))
        rest = await client.end()
    assert (answer.body, rest, answer.headers["connection"]) == (b"hello", b"", "close")


async def test_stream_for_http_1_0_ends_with_the_connection():
    apps = Apps()
    apps.go.set()
    async with serving(apps) as server:
        answer = await server.fetch(get("/stream_in_two_parts", version="1.0"))
    assert answer.body == b"first last"


async def test_connection_of_http_1_0_stays_open_if_the_client_asks_and_the_length_is_known():
    apps = Apps()
    apps.go.set()

    async def sized(receive, send):
        await receive()
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    apps.sized = sized
    kept = get("/sized", "Connection: Keep-Alive", version="1.0")
    async with serving(apps) as server:
        client = await server.connect()
        for request in (kept, kept + kept, b""):  # the third is answered as the second one of two together
            answer = await (client.fetch(request) if request else client.answer())
            assert (answer.body, answer.headers["connection"]) == (b"hello", "keep-alive")
        last = await client.fetch(get("/stream_in_two_parts", "Connection: keep-alive", version="1.0"))
        assert (last.body, last.headers["connection"]) == (b"first last", "close")
        assert "transfer-encoding" not in last.headers

        for options in ((), ("Connection: close",), ("Connection: keep-alive, close",)):
            client = await server.connect()
            answer = await client.fetch(get("/sized", *options, version="1.0"))
            rest = await client.end()
            assert (answer.body, rest, answer.headers["connection"]) == (b"hello", b"", "close")


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_stream_that_is_always_ready_does_not_block_others(method):
    async with serving(Apps()) as server:
        greedy = await server.connect()
        await greedy.send(get("/flood").replace(b"GET", method))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(greedy.end)
            answers = [await server.fetch(get()) for _ in range(5)]
            nursery.cancel_scope.cancel()
    assert [answer.status for answer in answers] == [200] * 5


async def test_app_that_fails_to_start_frees_its_port():
    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    own = "127.6.1.8"  # an address that no other process uses
    sockets = bind(own, 0)
    port = sockets[0].getsockname()[1]
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="no model"), flatten_subgroups=True):
        await serve_http(app, sockets, limits=Limits(), shutdown=trio.Event())
    (again,) = bind(own, port)
    again.close()
    assert [sock.fileno() for sock in sockets] == [-1]


async def test_app_is_started_before_the_first_request_and_stopped_after_the_last():
    events = []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            events.append("started")
            await send({"type": "lifespan.startup.complete"})
            await receive()
            events.append("stopped")
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await Apps().hello(receive, send)
            events.append("request")

    async with serving(app) as server:
        await server.fetch(get())
    assert events == ["started", "request", "stopped"]


# Refusing ------------------------------------------------------------------------------------------

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PRIORITY_FLOOD = b"\x00\x00\x05\x02\x00\x00\x00\x00\x03\x00\x00\x00\x00\x0f" * 2000
WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAA",
)
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (HTTP2_PREFACE, 505, "http_version_not_supported"),
        (HTTP2_PREFACE + PRIORITY_FLOOD, 505, "http_version_not_supported"),
        (get("/", version="3.7"), 505, "http_version_not_supported"),
        (get("/", *WEBSOCKET), 400, "invalid_request"),
        (get("/", *WEBSOCKET) + b"\x81", 400, "invalid_request"),
        (b"CONNECT host:443 HTTP/1.1\r\nHost: host\r\n\r\n", 405, "method_not_allowed"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_request"),
        (b"GET /\x00 HTTP/1.1\r\nHost: test\r\n\r\n", 400, "invalid_request"),
        ("GET /ä HTTP/1.1\r\nHost: test\r\n\r\n".encode(), 400, "invalid_request"),
        (b"GET / HTTP/1.1\rHost: test\r\n\r\n", 400, "invalid_request"),
        (b"GET ?path HTTP/1.1\r\nHost: test\r\n\r\n", 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\nHost: test\r\nHost: test\r\n\r\n", 400, "invalid_request"),
        (get("/", "Bad Header: 1"), 400, "invalid_request"),
        (get("/", "Content-Length: -1"), 400, "invalid_request"),
        (get("/", "Content-Length: 1", "Content-Length: 2"), 400, "invalid_request"),
        (get("/", "Content-Length: 1", "Transfer-Encoding: chunked"), 400, "invalid_request"),
        (get("/", "Content-Length: 1", "Content-Length: 1") + b"x", 400, "invalid_request"),
        (get("/", "Content-Length: 1, 1") + b"x", 400, "invalid_request"),
        (get("/", "Content-Length: +1") + b"x", 400, "invalid_request"),
        (get("/", "Content-Length: 0x1") + b"x", 400, "invalid_request"),
        (get("/", "Content-Length : 1") + b"x", 400, "invalid_request"),
        (get("/", "Content-Length:"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding: gzip"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding: gzip, chunked"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding: chunked, chunked"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding: xchunked"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding:"), 400, "invalid_request"),
        (get("/", "Transfer-Encoding: chunked", version="1.0") + b"0\r\n\r\n", 400, "invalid_request"),
        (get("/", "Host: other"), 400, "invalid_request"),
        (get("/", version="1.0").replace(b"localhost", b"a b"), 400, "invalid_request"),
        (get().replace(b"localhost", b"a/b"), 400, "invalid_request"),
        (get().replace(b"localhost", b"user@test"), 400, "invalid_request"),
        (get().replace(b"localhost", b"a,b"), 400, "invalid_request"),
        (get().replace(b"localhost", b"[::1"), 400, "invalid_request"),
        (get().replace(b"localhost", b"test:80x"), 400, "invalid_request"),
        (get("http://user@test/"), 400, "invalid_request"),
        (get("http://[broken/x"), 400, "invalid_request"),
        (get("/", "X-Folded: a\r\n b"), 400, "invalid_request"),
        (get("/", "X-Folded: a\r\n\tb"), 400, "invalid_request"),
        (get("/", "X-Folded: a\r\n "), 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\n Host: test\r\n\r\n", 400, "invalid_request"),
        (get("/", "X-Bare: a\nX-Other: b"), 400, "invalid_request"),
        (get("/", "X-Bare: a\rX-Other: b"), 400, "invalid_request"),
        (get("/", "X-Bare: a\r\r"), 400, "invalid_request"),
        (get().replace(b"\r\n", b"\n"), 400, "invalid_request"),
        (get()[:-2] + b"\n", 400, "invalid_request"),
        (get()[:-4] + b"\n\n", 400, "invalid_request"),
        (get()[:-4] + b"\n\r\n", 400, "invalid_request"),
        (b"\n" + get(), 400, "invalid_request"),
        (b"\r" + get(), 400, "invalid_request"),
        (b"\r\n\n" + get(), 400, "invalid_request"),
        (b"GET  / HTTP/1.1\r\nHost: test\r\n\r\n", 400, "invalid_request"),
        (b"GET /\tHTTP/1.1\r\nHost: test\r\n\r\n", 400, "invalid_request"),
        (b" GET / HTTP/1.1\r\nHost: test\r\n\r\n", 400, "invalid_request"),
        (b"GET / HTTP/1.1 \r\nHost: test\r\n\r\n", 400, "invalid_request"),
        (b"GET /\r\nHost: test\r\n\r\n", 400, "invalid_request"),
        (get("*"), 400, "invalid_request"),
        (get().replace(b"GET", b"get"), 405, "method_not_allowed"),
        (get().replace(b"GET", b"Head"), 405, "method_not_allowed"),
        (get("/", "Expect: something"), 417, "expectation_failed"),
        (get("/", "Expect: 100-continue, something"), 417, "expectation_failed"),
        (get("/", "Expect: 100-continue", "Expect: 200-ok"), 417, "expectation_failed"),
        (get("/", "Expect: something", version="1.0"), 417, "expectation_failed"),
        (get("/", *(f"X-{n}: 1" for n in range(20))), 431, "headers_too_large"),
        (get("/", "X-Large: " + "x" * 5000), 431, "headers_too_large"),
        (get("/" + "x" * 5000), 431, "headers_too_large"),
        (get("/", "X-Endless: ")[:-4] + b"x" * 200_000, 431, "headers_too_large"),
    ],
)
async def test_invalid_http_is_refused_in_json_and_never_reaches_the_app(request_, status, code):
    apps = Apps()
    async with serving(apps, Limits(header_bytes=4096, headers=20)) as server:
        client = await server.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_ignoring_close, request_)
            answer = await client.answer()
        assert (status, code, "close") == (answer.status, answer.error["code"], answer.headers["connection"])
        assert await client.end() == b""
        assert (await server.fetch(get())).body == b"hello"
    assert apps.requests == ["/"]


async def test_upgrade_to_http2_is_declined_by_a_response_in_http_1():
    async with serving(Apps()) as server:
        client = await server.connect()
        for _ in range(2):
            await client.send(get("/", *H2C))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"hello")
        await client.send(get("/", *H2C) + b"\x00garbage")
        assert [(await client.answer()).status, (await client.answer()).status] == [200, 400]
        assert (await server.fetch(get())).body == b"hello"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://other.example/path?x=1", "/path"),
        ("HTTP://other.example", "/"),
        ("/%00%ff%zz%", "/\x00\ufffd%zz%"),
        ("/" + "x" * 3000, "/" + "x" * 3000),
        ("//a//b", "//a//b"),
    ],
)
async def test_unusual_target_is_served_by_its_path(target, path):
    apps = Apps()
    async with serving(apps) as server:
        assert (await server.fetch(get(target))).status == 200
    assert [path] == apps.requests


async def test_server_named_in_the_target_replaces_the_host_header():
    hosts = []

    async def app(scope, receive, send):
        if scope["type"] == "http":
            hosts.append([value for name, value in scope["headers"] if name == b"host"])
            await Apps().hello(receive, send)

    async with serving(app) as server:
        await server.fetch(get("http://other.example:80/path"))
        await server.fetch(get("/path"))
    assert hosts == [[b"other.example:80"], [b"localhost"]]


@pytest.mark.parametrize("expect", ["100-continue", "100-Continue", "", ",100-continue,"])
async def test_expectation_of_100_continue_is_met(expect):
    async with serving(Apps()) as server:
        client = await server.connect()
        await client.send(post(b"hello", "/echo", f"Expect: {expect}"))
        answer = await client.answer()
        if answer.status == 100:
            answer = await client.answer()
    assert answer.body == b"hello"


@pytest.mark.parametrize(
    "chunks",
    [
        b"not a size\r\n",
        b"-1\r\n",
        b"5\nhello\n0\n\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloo\r\n0\r\n\r\n",
        b"5;a=b\nhello\r\n0\r\n\r\n",
        b"5;a\r=b\r\nhello\r\n0\r\n\r\n",
        b"5\rhello\r\n0\r\n\r\n",
        b"5 5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: 1\n\r\n",
        b"5\r\nhello\r\n0\r\nX: 1\n\n",
        b"5\r\nhello\r\n0\r\n\n",
        b"5\r\nhello\r\n0\r\nX: 1\r\n 2\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: 1\rY: 1\r\n\r\n",
        b"f" * 30 + b"\r\n",
    ],
)
async def test_body_with_broken_chunks_is_refused_and_its_request_ends(chunks):
    apps = Apps()
    async with serving(apps) as server:
        client = await server.connect()
        await client.send(b"POST /wait HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        await apps.waiting.wait()
        answer = await client.fetch(chunks)
        await apps.cancelled.wait()
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert apps.requests == ["/wait"]


async def test_chunk_extensions_and_trailers_are_ignored():
    head = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(Apps()) as server:
        client = await server.connect()
        answer = await client.fetch(head + b"5;a=b\r\nhello\r\n0;c\r\nContent-Length: 3\r\nX: 1\r\n\r\n")
        assert (await client.fetch(get())).body == b"hello"
    assert answer.body == b"hello"


async def test_framing_is_strict_for_pipelined_requests_too():
    apps = Apps()
    async with serving(apps) as server:
        client = await server.connect()
        await client.send(
            get("/first") + b"\r\n\r\n" + get("/second") + b"GET /third HTTP/1.1\nHost: test\n\n"
        )
        statuses = [(await client.answer()).status for _ in range(3)]
    assert statuses == [200, 200, 400]
    assert apps.requests == ["/first", "/second"]


async def test_empty_lines_before_a_request_may_arrive_in_pieces():
    async with serving(Apps()) as server:
        client = await server.connect()
        for piece in (b"\r", b"\n\r", b"\n", get()[:1], get()[1:]):
            await client.send(piece)
        assert (await client.answer()).body == b"hello"


async def test_over_the_limit_of_connections_only_new_ones_are_refused():
    apps = Apps()
    with structlog.testing.capture_logs() as logs:
        async with serving(apps, Limits(connections=2)) as server:
            clients = [await server.connect() for _ in range(2)]
            for client in clients:
                assert (await client.fetch(get())).status == 200
            refused = [await (await server.connect()).answer() for _ in range(3)]
            for client in clients:
                assert (await client.fetch(get())).status == 200
            clients[0].socket.close()
            # There is room as soon as the listener has noticed the disconnect.
            while (await server.fetch(get())).status == 503:
                pass
            clients[1].socket.close()
    assert [(each.status, each.error["code"]) for each in refused] == [(503, "too_many_connections")] * 3
    assert {entry["event"] for entry in logs} == {"too many connections"}


async def test_listener_recovers_from_running_out_of_file_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with structlog.testing.capture_logs() as logs:
        async with serving(Apps()) as server:
            with trio.socket.socket() as sock:
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # none, even if one is closed
                try:
                    await sock.connect(server.address)
                    while not logs:  # noqa: ASYNC110  # a log line sets no event
                        await trio.sleep(0.01)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                assert (await Client(sock).fetch(get())).body == b"hello"
    assert [entry["event"] for entry in logs] == ["cannot accept connections"]


# Failing -------------------------------------------------------------------------------------------


async def test_app_that_fails_is_a_500_in_json_and_logged_once():
    with structlog.testing.capture_logs() as logs:
        async with serving(Apps()) as server:
            answer = await server.fetch(get("/fail"))
            assert (await server.fetch(get())).status == 200
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert [entry["event"] for entry in logs] == ["request failed"]


async def test_app_that_fails_during_its_response_leaves_it_incomplete():
    with structlog.testing.capture_logs() as logs:
        async with serving(Apps()) as server:
            answer = await server.fetch(get("/fail_later"))
    assert (answer.body, answer.is_complete) == (b"half", False)
    assert [entry["event"] for entry in logs] == ["request failed"]


@pytest.mark.parametrize(
    "error", [ValueError("bug"), ExceptionGroup("bugs", [KeyError(1), OSError("other")])]
)
async def test_error_in_one_connection_ends_that_connection_and_is_logged_once(monkeypatch, error):
    from fairlead.server.listener.protocol import Protocol

    receive = Protocol.receive

    def stumble(self, data):
        if b"stumble" in data:
            raise error
        receive(self, data)

    monkeypatch.setattr(Protocol, "receive", stumble)
    with structlog.testing.capture_logs() as logs:
        async with serving(Apps()) as server:
            bystander = await server.connect()
            await bystander.fetch(get())
            client = await server.connect()
            await client.send(get("/stumble"))
            assert await client.end() == b""
            assert (await bystander.fetch(get())).status == 200
            client.socket.close()
            bystander.socket.close()
    assert [entry["event"] for entry in logs] == ["connection dropped"]


# Chunks --------------------------------------------------------------------------------------------


def chunked(sizes: list[int]) -> bytes:
    head = b"POST /echo HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (size, b"a" * size) for size in sizes) + b"0\r\n\r\n"


async def test_body_in_very_many_tiny_chunks_is_refused():
    """Reading a chunk costs microseconds: 16 MB of one-byte chunks would keep the loop busy for minutes."""
    async with serving(Apps()) as server:
        answer = await server.fetch(chunked([1] * 5000))
    assert (answer.status, answer.error["message"]) == (
        400,
        "the body comes in chunks of fewer than 64 bytes",
    )


@pytest.mark.parametrize("sizes", [[1] * 1000, [64] * 5000, [1000] * 2000, [1] * 500 + [100] * 3000])
async def test_body_in_chunks_of_ordinary_sizes_is_read(sizes):
    async with serving(Apps()) as server:
        answer = await server.fetch(chunked(sizes))
    assert (answer.status, len(answer.body)) == (200, sum(sizes))
