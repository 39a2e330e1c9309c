"""Valid requests, and spoiled versions of them. All randomness comes from one seeded source."""

from random import Random

from hostile_client.spoiling import spoiled
from server.routes.raw_http import get, post

REQUESTS = (
    get(),
    get("/echo?query=1", "Connection: close"),
    get("/stream_in_two_parts"),
    get("/stream_in_two_parts", version="1.0"),
    get("/wait"),
    get("/flood"),
    get("/fail"),
    get("/fail_later"),
    post(b'{"model":"x"}', "/echo", "Content-Type: application/json"),
    post(b"x" * 3000, "/echo", "Expect: 100-continue"),
    b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: 1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    get("/", "Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    get("/", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: AAAA") + b"\x81\x85",
    get("http://host/absolute"),
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /flood HTTP/1.1\r\nHost: a\r\n\r\n",
)


def conversation(random: Random) -> bytes:
    """Return the bytes that one client sends: one to three requests, each perhaps spoiled."""
    return b"".join(spoiled(random, random.choice(REQUESTS)) for _ in range(random.randint(1, 3)))
