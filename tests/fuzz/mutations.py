"""Valid requests, and what a hostile client makes of them. All from one seeded source of randomness."""

from random import Random

from api.raw_http import get, post

REQUESTS = (
    get(),
    get("/echo?query=1", "Connection: close"),
    get("/drip"),
    get("/drip", version="1.0"),
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

SPICE = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\x00",
    b"\xff",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"%",
    b"-1",
    b"9" * 30,
    b"chunked",
)


def conversation(random: Random) -> bytes:
    """Return what one client sends: one to three requests, each perhaps spoiled."""
    return b"".join(_spoiled(random, random.choice(REQUESTS)) for _ in range(random.randint(1, 3)))


def pieces(random: Random, data: bytes) -> list[bytes]:
    """Return `data` cut at random places."""
    cuts = sorted(random.randint(0, len(data)) for _ in range(random.randint(0, 5)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _spoiled(random: Random, request: bytes) -> bytes:
    for _ in range(random.choice([0, 1, 1, 2, 8])):
        at = random.randrange(len(request) + 1)
        to = min(len(request), at + random.choice([1, 1, 4, 50]))
        request = (
            random.choice(
                [
                    request[:at] + random.randbytes(to - at) + request[to:],  # other bytes
                    request[:at] + request[to:],  # fewer
                    request[:to] + request[at:],  # twice
                    request[:at] + random.choice(SPICE) + request[at:],  # more
                    request[:at],  # an early end
                ]
            )
            or b"\r\n"
        )
    return request
