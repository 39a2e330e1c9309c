"""Measure the cost of a request and of a streamed chunk in the HTTP server: stock Hypercorn and Fairlead.

The same Quart app is served by two processes: by `hypercorn.trio` with Quart-Trio, and by Fairlead's server.
This process is the client. Rounds alternate between the two servers, and the medians are reported.

    python bench/http_stack.py [--rounds 3] [--out bench/results/http.json]
"""

import argparse
import json
import multiprocessing
import platform
import selectors
import socket
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from quart import Quart, Response
from quart_trio import QuartTrio

CONNECTIONS = 8
REQUESTS = 4000
CHUNKS = 20_000
STEP_S = 0.02  # 50 events a second
STREAMS = (64, 256)
SECONDS = 4.0

HELLO = (
    b"POST /hello HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b'Content-Length: 15\r\n\r\n{"hello":"you"}'
)
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk",'
    b'"choices":[{"delta":{"content":" token"}}]}\n\n'
)


# The server ----------------------------------------------------------------------------------------


def make_app() -> QuartTrio:  # noqa: C901  # it only lists routes
    """Return the app that both servers serve."""
    trio_app = QuartTrio("bench")
    app: Quart = trio_app  # Quart has type annotations
    app.config["RESPONSE_TIMEOUT"] = None
    tick = trio.Event()

    @app.while_serving
    async def engine() -> AsyncGenerator[None, None]:
        async def steps() -> None:
            nonlocal tick
            while True:
                await trio.sleep(STEP_S)
                tick.set()
                tick = trio.Event()

        trio_app.nursery.start_soon(steps)
        yield

    @app.post("/hello")
    async def hello() -> Response:
        return Response(b'{"hello":"you"}', content_type="application/json")

    @app.get("/cpu")
    async def cpu() -> str:
        return f"{time.process_time()}s"

    @app.get("/chunks")
    async def chunks() -> Response:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(CHUNKS):
                yield EVENT

        return Response(body(), content_type="text/event-stream")

    @app.get("/events")
    async def events() -> Response:
        async def body() -> AsyncIterator[bytes]:
            while True:
                await tick.wait()
                yield b"data: %020d %s" % (time.monotonic_ns(), EVENT)

        return Response(body(), content_type="text/event-stream")

    return trio_app


def serve(stack: str, ready: Any) -> None:
    """Serve on a free port until killed; send the port through `ready`."""
    app = make_app()

    async def ours() -> None:
        from fairlead.base.config import Limits
        from fairlead.server.listener.listener import bind, serve_http
        from fairlead.server.routes.exchange import Exchange, FairleadRequest

        app.asgi_http_class = Exchange
        app.request_class = FairleadRequest
        sockets = bind("127.0.0.1", 0)
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(
                partial(serve_http, app, sockets, limits=Limits(), shutdown=trio.Event())
            )
            ready.send(addresses[0][1])

    async def stock() -> None:
        from hypercorn.config import Config
        from hypercorn.trio import serve as hypercorn_serve

        config = Config()
        config.bind = ["127.0.0.1:0"]
        config.errorlog = None
        config.keep_alive_max_requests = 10**9
        async with trio.open_nursery() as nursery:
            binds = await nursery.start(hypercorn_serve, app, config)
            ready.send(int(binds[0].rpartition(":")[2]))

    trio.run({"ours": ours, "stock": stock}[stack])


@contextmanager
def server(stack: str) -> Any:
    """Run a server; yield its port."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(stack, sender), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.kill()
        process.join()


# The client ----------------------------------------------------------------------------------------


def connect(port: int) -> socket.socket:
    """Return a connected socket."""
    return socket.create_connection(("127.0.0.1", port))


def cpu_s(port: int) -> float:
    """Return the CPU time the server has used."""
    with connect(port) as sock:
        sock.sendall(b"GET /cpu HTTP/1.1\r\nHost: bench\r\n\r\n")
        answer = b""
        while not answer.endswith(b"s"):  # the stock server may keep the connection open
            answer += sock.recv(65536)
        return float(answer.rpartition(b"\r\n")[2][:-1])


def hello(port: int) -> dict[str, float]:
    """Send POST requests and wait for their responses, on a few connections at once."""
    left = REQUESTS
    with selectors.DefaultSelector() as selector:
        socks = [connect(port) for _ in range(CONNECTIONS)]
        before, start = cpu_s(port), time.perf_counter()
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ, sock)
            sock.sendall(HELLO)
        while left > 0:
            for key, _ in selector.select():
                sock = key.data
                answer = sock.recv(65536)
                while not answer.endswith(b'{"hello":"you"}'):
                    answer += sock.recv(65536)
                left -= 1
                sock.sendall(HELLO)
        wall = time.perf_counter() - start
        used = cpu_s(port) - before
        for sock in socks:
            sock.close()
    return {"requests_per_s": REQUESTS / wall, "cpu_us_per_request": used / REQUESTS * 1e6}


def chunks(port: int) -> dict[str, float]:
    """Read one stream without pauses between its chunks."""
    with connect(port) as sock:
        before, start = cpu_s(port), time.perf_counter()
        sock.sendall(b"GET /chunks HTTP/1.1\r\nHost: bench\r\n\r\n")
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            tail = (tail + sock.recv(1 << 20))[-5:]
        wall = time.perf_counter() - start
    return {"chunks_per_s": CHUNKS / wall, "cpu_us_per_chunk": (cpu_s(port) - before) / CHUNKS * 1e6}


def fan_out(port: int, streams: int) -> dict[str, float]:
    """Read many streams of 50 events a second, like those of an engine with as many slots."""
    delays: list[float] = []
    with selectors.DefaultSelector() as selector:
        socks = [connect(port) for _ in range(streams)]
        for sock in socks:
            sock.sendall(b"GET /events HTTP/1.1\r\nHost: bench\r\n\r\n")
            selector.register(sock, selectors.EVENT_READ, sock)
        warmed_up_at = time.perf_counter() + 1.0
        before, start, events = 0.0, 0.0, 0
        while not start or time.perf_counter() < start + SECONDS:
            if not start and time.perf_counter() > warmed_up_at:
                before, start = cpu_s(port), time.perf_counter()
            for key, _ in selector.select(0.1):
                sock = key.data
                data = sock.recv(65536)
                now = time.monotonic_ns()
                if start:
                    stamps = [int(part[:20]) for part in data.split(b"data: ") if part[:20].isdigit()]
                    delays += [(now - stamp) / 1e6 for stamp in stamps]
                    events += len(stamps)
        wall = time.perf_counter() - start
        used = cpu_s(port) - before
        for sock in socks:
            sock.close()
    cuts = statistics.quantiles(delays, n=100)
    return {
        "cpu_percent": used / wall * 100,
        "cpu_us_per_event": used / events * 1e6,
        "delay_p50_ms": cuts[49],
        "delay_p99_ms": cuts[98],
    }


QUESTIONS: dict[str, Callable[[int], dict[str, float]]] = {
    "hello": hello,
    "chunks": chunks,
    **{f"fan_out_{streams}": partial(fan_out, streams=streams) for streams in STREAMS},
}


def measure(rounds: int) -> dict[str, Any]:
    """Return the median of each figure, by question and stack."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(rounds):
        for question, ask in QUESTIONS.items():
            for stack in ("stock", "ours"):
                with server(stack) as port:
                    if question == "hello":
                        hello(port)  # warm-up
                    found.setdefault(question, {}).setdefault(stack, []).append(ask(port))
    return {
        question: {
            stack: {figure: round(statistics.median(run[figure] for run in runs), 2) for figure in runs[0]}
            for stack, runs in stacks.items()
        }
        for question, stacks in found.items()
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median counts")
    parser.add_argument("--out", help="write the result to this file")
    options = parser.parse_args()
    result = {
        "question": "what a request and a streamed chunk cost, stock Hypercorn and Quart-Trio against ours",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": options.rounds,
        "results": measure(options.rounds),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
