"""Measure the parsing of responses for `router.py`: by Fairlead's parser, and by the libraries alone."""

import time
from collections.abc import Callable

import h11
import httptools

from fairlead.nodes.http.response_parser import ResponseParser
from router_parts import EVENT, STREAM_HEAD, WHOLE, framed

READ = framed(EVENT) * 100
Parse = Callable[[bytes, int], None]


def by_fairlead(data: bytes, more: int) -> None:
    """Parse a response with Fairlead's parser: the data, then `more` further reads of the body."""
    parser = ResponseParser()
    parser.feed(data)
    for _ in range(more):
        parser.feed(READ)


def by_h11(data: bytes, more: int) -> None:
    """Parse a response with h11."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    for number in range(more + 1):
        while not isinstance(parser.next_event(), h11.EndOfMessage | type(h11.NEED_DATA)):
            pass
        if number < more:
            parser.receive_data(READ)


class _Callbacks:
    """The callbacks that httptools requires."""

    def on_body(self, data: bytes) -> None:
        """Ignore a piece of the body."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore a header."""


def by_httptools(data: bytes, more: int) -> None:
    """Parse a response with httptools alone, without bounds."""
    parser = httptools.HttpResponseParser(_Callbacks())
    parser.feed_data(data)
    for _ in range(more):
        parser.feed_data(READ)


def parsers() -> dict[str, dict[str, float]]:
    """Return each parser's microseconds for a response, and for a chunk in reads of 100 chunks."""
    functions: dict[str, Parse] = {"ours": by_fairlead, "h11": by_h11, "httptools": by_httptools}
    return {
        name: {
            "answer_us": 1e6 * min(_timed(way, WHOLE, 0) for _ in range(300)),
            "chunk_us": 1e6 * min(_timed(way, STREAM_HEAD, 20) for _ in range(10)) / 2000,
        }
        for name, way in functions.items()
    }


def _timed(way: Parse, data: bytes, more: int) -> float:
    began = time.perf_counter()
    way(data, more)
    return time.perf_counter() - began
