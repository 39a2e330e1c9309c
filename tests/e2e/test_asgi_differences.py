"""How an unmodified Hypercorn differs from our listener, as `docs/asgi.md` documents."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.real_server import TIMEOUT_S, configured, until
from e2e.stock_server import StockServer, stock_hypercorn

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # and an empty SETTINGS frame
SETTINGS = 4
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[StockServer]:
    """A server with limits that only our listener enforces."""
    limits = {"connections": 1, "headers": 5, "headerBytes": 300}
    _, file = configured(tmp_path_factory.mktemp("stock"), {"preload": False}, limits=limits)
    with stock_hypercorn(FAIRLEAD_CONFIG=file) as running:
        yield running


def connect(server: StockServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=TIMEOUT_S)


def answer(server: StockServer, data: bytes) -> bytes:
    """Send bytes on a new connection; return everything received until it is closed."""
    with connect(server) as client:
        client.sendall(data)
        received = b""
        while more := client.recv(65536):
            received += more
    return received


def test_connections_have_no_limit(server):
    idle = [connect(server) for _ in range(3)]
    assert server.http.get("/health").status_code == 200
    for client in idle:
        client.close()


def test_headers_have_hypercorns_own_limits(server):
    headers = {f"X-{number}": "x" * 50 for number in range(20)}
    assert server.http.get("/health", headers=headers).status_code == 200
    long = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 17_000
    assert answer(server, long).startswith(b"HTTP/1.1 431 ")


def test_malformed_request_gets_400_without_a_body(server):
    head, _, body = answer(server, b"GET / HTTP/1.1\r\nno header\r\n\r\n").partition(b"\r\n\r\n")
    assert (head.partition(b"\r\n")[0].split(b" ")[1], body) == (b"400", b"")


def test_body_in_very_small_chunks_is_read(server):
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"model": 1}' + b" " * 5000)
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    assert b'"param":"model"' in answer(server, data).replace(b" ", b"")


def test_http_2_is_served(server):
    with connect(server) as client:
        client.sendall(HTTP2_PREFACE)
        frame = client.recv(9, socket.MSG_WAITALL)
    assert frame[3] == SETTINGS


def test_sighup_restarts_the_worker(tmp_path: Path):
    _, file = configured(tmp_path, {"preload": False})
    with stock_hypercorn(FAIRLEAD_CONFIG=file) as server:
        server.process.send_signal(signal.SIGHUP)
        until(lambda: sum("Running on" in line for line in server.log) == 2)
