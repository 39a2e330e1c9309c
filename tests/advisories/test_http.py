"""Malformed and excessive HTTP, sent over raw connections because no client library would send it."""

import contextlib
import json
import socket

import pytest

from advisories.target import CANARY, CHAT, COMPLETIONS, Target, chat, completion, read_all, read_answer
from advisories.tries import tries

# The preface of HTTP/2, then its SETTINGS, then streams that are opened and reset at once.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
RESETS = b"".join(
    bytes.fromhex("00000101050000") + stream.to_bytes(2, "big") + b"\x82"
    + bytes.fromhex("00000403000000") + stream.to_bytes(2, "big") + bytes(4)
    for stream in range(1, 2001, 2)
)  # fmt: skip
BOUNDARY = "-" * 70
MANY_HEADERS = "".join(f"X-{index}: y\r\n" for index in range(20_000))


def request(path: str = "/health", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]
    return "\r\n".join(head).encode() + body


@tries("CVE-2025-48956")
@pytest.mark.parametrize(
    "headers", [f"X-Forwarded-For: {'A' * 5_000_000}\r\n", MANY_HEADERS], ids=["big", "many"]
)
def test_huge_headers_are_refused(server: Target, headers):
    answer = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers.encode() + b"\r\n")
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")


@tries("CVE-2025-48956")
def test_endless_header_is_refused_and_not_buffered(server: Target):
    before = server.peak_memory_bytes()
    with server.connection() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: ")
        with contextlib.suppress(ConnectionError):  # the server may close while this is being sent
            for _ in range(128):
                sock.sendall(b"A" * 1024 * 1024)
        assert read_answer(sock).status == 431
    assert server.peak_memory_bytes() - before < 32 * 1024 * 1024


@tries("CVE-2025-43859")
@pytest.mark.parametrize(
    "chunk", [b"5\r\nAAAAAXX2\r\n45\r\n0\r\n\r\n", b"5\r\nAAAAAXX0\r\n\r\n"], ids=["spill", "end"]
)
def test_chunk_that_exceeds_its_stated_length_is_refused(server: Target, chunk):
    smuggled = request("/version")
    with server.connection() as sock:
        sock.sendall(request("/tokenize", "Transfer-Encoding: chunked", method="POST", body=chunk) + smuggled)
        assert read_answer(sock).status == 400
        assert read_all(sock) == b""  # no request after it is answered


@tries("CVE-2025-43859")
@pytest.mark.parametrize(
    "framing",
    [
        ["Transfer-Encoding: chunked", "Content-Length: 5"],
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: +5"],
        ["Content-Length: 0x5"],
        ["Transfer-Encoding: chunked, identity"],
        ["Transfer-Encoding: xchunked"],
        ["Transfer-Encoding : chunked"],
    ],
    ids=str,
)
def test_body_with_an_ambiguous_length_is_refused(server: Target, framing):
    with server.connection() as sock:
        body = b"5\r\nAAAAA\r\n0\r\n\r\n"
        sock.sendall(request("/tokenize", *framing, method="POST", body=body) + request("/version"))
        assert read_answer(sock).status in {400, 501}
        assert read_all(sock) == b""


@tries("CVE-2026-71554", "CVE-2026-48746")
@pytest.mark.parametrize("first", ["localhost", "127.0.0.1", ""])
def test_a_second_host_header_is_refused(server: Target, first):
    answer = server.raw(f"GET /version HTTP/1.1\r\nHost: {first}\r\nHost: evil.example\r\n\r\n".encode())
    assert answer.status == 400


@tries("CVE-2025-57804")
@pytest.mark.parametrize(
    "value", [b"a\rX-Smuggled: 1", b"a\x00b", b"a\nX-Smuggled: 1", b"a\n\nGET /version HTTP/1.1"]
)
def test_line_break_inside_a_header_is_refused(server: Target, value):
    with server.connection() as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Header: " + value + b"\r\n\r\n")
        assert read_answer(sock).status == 400
        assert read_all(sock) == b""


@tries("CVE-2023-44487", "CVE-2025-57804", "CVE-2026-71554")
@pytest.mark.parametrize("follows", [b"", SETTINGS, SETTINGS + RESETS], ids=["preface", "settings", "resets"])
def test_http_2_is_refused_before_its_first_frame(server: Target, follows):
    with server.connection() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(PREFACE + follows)
        received = read_all(sock)
    assert received.startswith((b"HTTP/1.1 505 ", b"HTTP/1.1 400 "))
    assert received.count(b"HTTP/1.1 ") == 1


@tries("CVE-2023-44487")
def test_upgrade_to_http_2_is_declined(server: Target):
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    assert server.raw(request("/health", *upgrade)).status == 200


@tries("pgjones/hypercorn#277")
def test_connect_opens_no_tunnel(server: Target):
    answer = server.raw(b"CONNECT victim.example:443 HTTP/1.1\r\nHost: victim.example\r\n\r\n")
    assert answer.status in {400, 405}


@tries("CVE-2025-23310", "CVE-2025-23311")
def test_body_in_chunks_of_one_byte_is_read_like_any_other(server: Target):
    body = json.dumps(CANARY | {"user": "x" * 500}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    chunked = request(COMPLETIONS, "Transfer-Encoding: chunked", method="POST", body=chunks)
    answer = server.raw(chunked)
    assert answer.status == 200
    assert json.loads(answer.body)["choices"][0]["text"] == server.canary_text


@tries("CVE-2025-23331", "CVE-2025-33201", "CVE-2025-33202", "CVE-2026-55646")
@pytest.mark.parametrize("length", [16 * 1024 * 1024 + 1, 2**31, 2**63, 10**30])
def test_body_that_is_too_large_is_refused_before_it_arrives(server: Target, length):
    answer = server.raw(request(CHAT, f"Content-Length: {length}", method="POST"))
    assert answer.status in {400, 413}


@tries("CVE-2025-23325", "CVE-2026-25048")
@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["lists", "objects"])
def test_deeply_nested_body_is_refused(server: Target, opening):
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/embeddings", "/models/load", "/nodes"):
        server.refuses(path, opening * 500_000, None)


def form(boundary: str, parts: int) -> bytes:
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
    return part.encode() * parts + f"--{boundary}--".encode()


@tries("CVE-2024-8984", "CVE-2024-9840", "CVE-2023-25577", "CVE-2023-46136", "CVE-2024-49767")
@pytest.mark.parametrize(
    ("boundary", "body"),
    [
        (BOUNDARY, form(BOUNDARY, 10_000)),
        (BOUNDARY, form(BOUNDARY, 1) + b"-" * 1_000_000),
        ("a", b"\r" * 2_000_000),
        ("a", b"\n" * 2_000_000),
        ("-" * 10_000, form("-" * 10_000, 20)),
    ],
    ids=["parts", "dashes", "returns", "lines", "boundary"],
)
def test_hostile_form_is_refused(server: Target, boundary, body):
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    for path in (CHAT, "/tokenize"):
        server.refuses(path, body, None, headers=headers)
    server.refuses("/v1/audio/transcriptions", body, None, headers=headers)


def metric_lines(server: Target) -> set[str]:
    """Return the metric names and labels that `/metrics` shows."""
    lines = server.request("GET", "/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


@tries("CVE-2026-105759")
def test_unknown_methods_paths_and_models_add_no_metric_labels(server: Target):
    lines = set()
    for index in range(20):
        server.raw(request("/health", method=f"INVENTED{index}"))
        server.raw(request(f"/nowhere-{index}", f"X-Request-Id: id-{index}", f"User-Agent: agent-{index}"))
        server.post(CHAT, chat(model=f"model-{index}"))
        lines = lines or metric_lines(server)
    assert metric_lines(server) == lines


@tries("CVE-2026-9540", "CVE-2025-23322")
@pytest.mark.parametrize("read_first", [True, False], ids=["while it is answered", "at once"])
def test_streams_of_clients_that_disconnect_free_their_resources(server: Target, read_first):
    body = json.dumps(completion(max_tokens=900, ignore_eos=True, stream=True)).encode()
    request_headers = request(COMPLETIONS, f"Content-Length: {len(body)}", method="POST", body=body)
    for _ in range(16):
        with server.connection() as sock:
            sock.sendall(request_headers)
            if read_first:
                assert sock.recv(1024).startswith(b"HTTP/1.1 200")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


@tries("CVE-2026-105755")
def test_requests_with_the_same_id_get_their_own_answers(server: Target):
    bodies = [json.dumps(CANARY | {"prompt": f"The number {index} is"}).encode() for index in range(6)]
    expected = [server.post(COMPLETIONS, body).json()["choices"][0]["text"] for body in bodies]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connection()) for _ in bodies]
        for sock, body in zip(connections, bodies, strict=True):
            headers = (f"Content-Length: {len(body)}", "X-Request-Id: the-same")
            sock.sendall(request(COMPLETIONS, *headers, method="POST", body=body))
        answers = [json.loads(read_answer(sock).body) for sock in connections]
    assert [answer["choices"][0]["text"] for answer in answers] == expected


@tries("CVE-2024-0095")
def test_client_cannot_forge_lines_of_the_log(server: Target):
    forged = "2026-01-01T00:00:00Z [info     ] forged by a client"
    before = len(server.running.log)
    server.post(CHAT, chat(model=f"a\n{forged}", user=f"a\r\n{forged}"))
    server.post(CHAT, chat(user=f"a\n{forged}"))
    server.raw(request(f"/a%0a{forged.replace(' ', '%20')}", f"X-Request-Id: a%0a{forged}"))
    server.canary()
    assert not any(line.startswith(forged) for line in server.running.log[before:])
