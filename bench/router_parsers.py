"""What reading an answer costs, for `router.py`: by our parser, by h11 and by httptools."""

import importlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11

from fairlead.nodes.answer_parser import AnswerParser
from router_parts import EVENT, STREAM_HEAD, WHOLE, framed

READ = framed(EVENT) * 100
Parse = Callable[[bytes, int], None]


def by_ours(data: bytes, more: int) -> None:
    """Parse an answer and so many more reads of its body."""
    parser = AnswerParser()
    parser.feed(data)
    for _ in range(more):
        parser.feed(READ)


def by_h11(data: bytes, more: int) -> None:
    """The same."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    for number in range(more + 1):
        while not isinstance(parser.next_event(), h11.EndOfMessage | type(h11.NEED_DATA)):
            pass
        if number < more:
            parser.receive_data(READ)


def by_httptools(httptools: Any) -> Parse:
    """The same."""

    class Taken:
        def on_body(self, data: bytes) -> None:
            pass

        def on_header(self, name: bytes, value: bytes) -> None:
            pass

    def parse(data: bytes, more: int) -> None:
        parser = httptools.HttpResponseParser(Taken())
        parser.feed_data(data)
        for _ in range(more):
            parser.feed_data(READ)

    return parse


def parsers() -> dict[str, dict[str, float]]:
    """Return microseconds for an answer and for a chunk of a stream, in reads of 100, by each parser."""
    ways: dict[str, Parse] = {"ours": by_ours, "h11": by_h11}
    with suppress(ImportError):
        ways["httptools"] = by_httptools(importlib.import_module("httptools"))
    return {
        name: {
            "answer_us": 1e6 * min(_timed(way, WHOLE, 0) for _ in range(300)),
            "chunk_us": 1e6 * min(_timed(way, STREAM_HEAD, 20) for _ in range(10)) / 2000,
        }
        for name, way in ways.items()
    }


def _timed(way: Parse, data: bytes, more: int) -> float:
    began = time.perf_counter()
    way(data, more)
    return time.perf_counter() - began
