"""Shared by tests of nodes: a recording listener and sink, jobs, and a stub server in a nursery."""

import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from fairlead.base.config import HealthConfig
from fairlead.base.errors import FairleadError
from fairlead.base.job import ChatRelay, Delta, Job, Relay, Sampling
from fairlead.nodes.http.client import Upstream, UpstreamTimeouts
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import Node
from fairlead.nodes.remote_node import RemoteNode
from fairlead.nodes.streams.sink import Sink
from fairlead.server.routes import route_table  # noqa: F401  # defines the dialects, which read nodes' answers
from nodes.stub_server import StubServer

CHAT = "/v1/chat/completions"


class RecordingListener:
    """A listener that records what a node reports, in order."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.changed = trio.Event()
        self._up: set[str] = set()

    def __call__(self, node: Node, limits: NodeLimits | None) -> None:
        """See `NodeReport`."""
        if limits is None or not limits.seats:
            report: tuple[Any, ...] = ("down" if limits is None else "closed", node.id)
            self._up.discard(node.id)
        elif node.id in self._up:
            report = ("seats", node.id, limits.seats, sorted(node.models))
        else:
            report = ("up", node.id, limits.seats)
            self._up.add(node.id)
        self.reports.append(report)
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, kind: str, times: int = 1) -> None:
        """Wait until there are that many reports of that kind."""
        while sum(report[0] == kind for report in self.reports) < times:
            await self.changed.wait()


class CollectedDeltas(Sink):
    """A sink that keeps everything, with events for the first delta and the end."""

    def __init__(self, choices: int = 1) -> None:
        self.deltas: list[Delta] = []
        self.error: FairleadError | None = None
        self.first = trio.Event()
        self.over = trio.Event()
        self._open = choices

    def put(self, delta: Delta) -> None:
        assert not self.over.is_set(), "nothing comes after the end"
        self.deltas.append(delta)
        self._open -= delta.finish_reason is not None
        self.first.set()
        if not self._open:
            self.over.set()

    def backpressure(self) -> None:
        return None

    def fail(self, error: FairleadError) -> None:
        self.error = error
        self.first.set()
        self.over.set()

    @property
    def raw(self) -> bytes:
        """All bytes that would be relayed."""
        return b"".join(piece for delta in self.deltas for piece in delta.raw)

    @property
    def tokens(self) -> int:
        return sum(delta.relayed_tokens + len(delta.token_ids) for delta in self.deltas)

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)


def relayed_job(
    path: str = CHAT,
    *,
    stream: bool = True,
    n: int = 1,
    request_id: str = "r1",
    model: str = "m",
    stop: tuple[str, ...] = (),
    **body: Any,
) -> Job:
    """Return a job with a client's request; `stub` in its body selects the stub's response."""
    document = {"model": model, "messages": [], "stream": stream, **({"n": n} if n > 1 else {}), **body}
    return Job(
        id="chatcmpl-1",
        tenant="A",
        model=model,
        prompts=(),
        sampling=Sampling(max_tokens=10),
        n=n,
        stop=stop,
        stream=stream,
        request_id=request_id,
        relay=Relay(path, msgspec.json.encode(document), stream),
    )


def translated_job(**options: Any) -> Job:
    """Return a job with a client's message, which is also a chat for nodes that speak no messages."""
    job = relayed_job("/v1/messages", **options)
    assert job.relay is not None
    body = msgspec.json.decode(job.relay.body) | {"stream_options": {"include_usage": True}}
    chat = ChatRelay(msgspec.json.encode(body))
    return msgspec.structs.replace(
        job, relay=msgspec.structs.replace(job.relay, dialect="messages", chat=chat)
    )


@asynccontextmanager
async def stub() -> AsyncIterator[StubServer]:
    """Run a stub server on a free port. No pool may have an open exchange at the end."""
    server = StubServer()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        yield server
        for upstream in _upstreams.pop(server.url, []):
            counts = upstream.statistics()
            assert (counts.busy, counts.waiting) == (0, 0)
            upstream.close()
            assert upstream.statistics().idle == 0
        nursery.cancel_scope.cancel()


_upstreams: dict[str, list[Upstream]] = {}


def upstream_for(server: StubServer, **options: Any) -> Upstream:
    """Return a pool of connections to the stub; timeouts are options, in seconds."""
    names = {"connect_s", "first_byte_s", "between_bytes_s", "idle_s"}
    timeouts = UpstreamTimeouts(**{name: options.pop(name) for name in names & options.keys()})
    upstream = Upstream(server.url, name="stub", timeouts=timeouts, **options)
    _upstreams.setdefault(server.url, []).append(upstream)
    return upstream


def ready_node(server: StubServer, listener: RecordingListener | None = None, **options: Any) -> RemoteNode:
    """Return a node for the stub which is up and is not probed."""
    names = options.pop("names", {"m": "m"})
    seats = options.pop("seats", 4)
    own = {name: options.pop(name) for name in {"filters", "answer_bytes", "dialects"} & options.keys()}
    node = RemoteNode(
        "stub",
        upstream_for(server, **options),
        listener or RecordingListener(),
        names=names,
        seats=seats,
        **own,
    )
    node.came_up()
    return node


def quick_health(**options: Any) -> HealthConfig:
    """Return settings with an interval short enough for a test without a virtual clock."""
    return HealthConfig(**{"interval_s": 0.05, "timeout_s": 60.0, **options})


async def generated(node: RemoteNode, job: Job) -> CollectedDeltas:
    """Run a job to its end and return its sink."""
    into = CollectedDeltas(job.sequences)
    async with node.generate(job, into):
        await into.over.wait()
    return into


def tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server at `localhost` and of a client that trusts its certificate."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    return server_side, ssl.create_default_context(cafile=str(certificate))
