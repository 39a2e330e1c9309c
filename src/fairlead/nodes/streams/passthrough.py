"""One request of any kind to a command's own server, and its response as it arrives: head, then body.

Unlike a relayed request it is not parsed: the path, the body and the response may be anything. Headers about
the connection (RFC 9110, 7.6.1), credentials and other origins are not forwarded in either direction.
"""

from collections.abc import Iterable, Mapping

import msgspec

from fairlead.base.job import Delta, Job, Passthrough, Relay
from fairlead.nodes.http.client import Upstream
from fairlead.nodes.streams.sink import Sink

_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
# Keys and cookies are for this server; the others are set by our own client.
_NOT_FORWARDED = _HOP_BY_HOP | {
    *("authorization", "content-length", "cookie", "expect", "host", "user-agent", "x-api-key"),
    *("x-request-id",),
    "content-encoding",  # the body has been decoded
}
# Headers that concern the whole origin, which is ours, or that our listener sets.
_NOT_RETURNED = _HOP_BY_HOP | {
    *("alt-svc", "clear-site-data", "date", "server", "set-cookie", "set-cookie2"),
    *("strict-transport-security", "x-request-id"),
}
_CROSS_ORIGIN = "access-control-"


class PassthroughHead(msgspec.Struct, frozen=True, array_like=True):
    """The status and the headers of a response: the first piece in `Delta.raw` of a passthrough."""

    status: int
    headers: dict[str, str]


encode_head = msgspec.json.Encoder().encode
decode_head = msgspec.json.Decoder(PassthroughHead).decode


async def pass_through(upstream: Upstream, job: Job, relay: Relay, request: Passthrough, sink: Sink) -> None:
    """Send the request and put its response into the sink, whatever its status. Raises `UpstreamFailed`.

    upstream: the server.
    job: the job.
    relay: its request.
    request: what only such requests have.
    sink: gets the response.
    """
    headers = {**dict(request.headers), "X-Request-Id": job.request_id}
    accept = headers.pop("Accept", "*/*")
    async with upstream.exchange(
        request.method, relay.path, relay.body, accept=accept, headers=headers
    ) as response:
        head = PassthroughHead(response.head.status, returned_headers(response.head.headers))
        sink.put(Delta(0, raw=[encode_head(head)]))
        while piece := await response.read():
            sink.put(Delta(0, raw=[piece]))
            if (pressure := sink.backpressure()) is not None:
                await response.pause(pressure.wait)
        sink.put(Delta(0, finish_reason="stop"))


def forwarded_headers(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the client's headers that the model's server gets, each name once and in title case."""
    kept: dict[str, str] = {}
    pairs = [(name.lower(), value) for name, value in headers]
    dropped = _NOT_FORWARDED | _named_by_connection(value for name, value in pairs if name == "connection")
    for name, value in pairs:
        if name not in dropped:
            titled = name.title()
            kept[titled] = f"{kept[titled]}, {value}" if titled in kept else value
    return tuple(kept.items())


def returned_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a server's response that the client gets."""
    dropped = _NOT_RETURNED | _named_by_connection([headers.get("connection", "")])
    return {
        name: value
        for name, value in headers.items()
        if name not in dropped and not name.startswith(_CROSS_ORIGIN) and _is_plain(value)
    }


def _named_by_connection(values: Iterable[str]) -> frozenset[str]:
    return frozenset(name.strip().lower() for value in values for name in value.split(","))


def _is_plain(value: str) -> bool:
    """Return whether a header value is printable Latin-1 or tabs: servers need no control characters."""
    return all(letter == "\t" or (letter.isprintable() and letter <= "\xff") for letter in value)
