"""Fairlead beside one peer: which node it has, who stands in front of it, and what the peer is doing."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.real_server import TIMEOUT_S, RealServer, real_server, until
from peers.backend import MODEL, Backend
from peers.dialects import DIALECTS, OPENAI, TOKENS, Dialect
from peers.programs import ENGINES, ROUTERS, SLOTS, Program, missing

NODE_KEY = "sk-backend"
KEEP_ALIVE_S = 1
PROBE_S = 0.2
ENDLESS = {"llama.cpp": 16_000, "vllm": 16_000, "fairlead": 16_000}  # tokens of answers that last for seconds


def marks(name: str, place: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test with a peer: skipped where it is missing, in one process with its others."""
    return (
        pytest.mark.skipif(bool(missing(name)), reason=missing(name)),
        pytest.mark.xdist_group(f"{place}-{name}"),
    )


@dataclass
class Rig:
    """A running Fairlead and its peer.

    `url`, `key`: where clients ask, and with which key.
    `backend`: the server behind the peer, or the peer itself; None: the peer is an engine.
    `program`: the peer; None: it is the backend.
    """

    name: str
    server: RealServer
    url: str
    key: str
    dialect: Dialect
    backend: Backend | None
    program: Program | None

    def running(self) -> int:
        """Return how many requests the peer, or the server behind it, is working on."""
        if self.backend is not None:
            return self.backend.running
        program = self.program
        assert program is not None
        headers = {"Authorization": f"Bearer {program.key}"}
        if self.name == "llama.cpp":
            slots = httpx.get(f"{program.url}/slots", headers=headers).json()
            return sum(slot["is_processing"] for slot in slots)
        if self.name == "vllm":
            metrics = httpx.get(f"{program.url}/metrics").text
            lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")]
            return int(sum(float(line.rpartition(" ")[2]) for line in lines))
        return int(httpx.get(f"{program.url}/queue", headers=headers).json()["running"])

    def slow_down(self, *, first_s: float = 0, pause_s: float = 0) -> None:
        """Make answers slow, where the peer allows that; engines are slow by long answers."""
        if self.backend is not None:
            self.backend.first_s, self.backend.pause_s = first_s, pause_s

    def long_body(self, *, stream: bool = True) -> dict[str, Any]:
        """Return a request whose answer lasts for seconds."""
        return self.dialect.body(stream=stream, tokens=ENDLESS.get(self.name, TOKENS))

    @contextmanager
    def asking(self, body: dict[str, Any], **options: Any) -> Iterator[Iterator[str]]:
        """Send a request; yield the lines of its answer with 200. Leave at the end of the block.

        httpx leaves as soon as nothing refers to the lines any more.
        """
        with self.client() as client, client.stream("POST", self.dialect.path, json=body, **options) as got:
            assert got.status_code == 200, got.read()
            yield got.iter_lines()

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)

    def ask(self, body: dict[str, Any] | None = None) -> httpx.Response:
        """Return the whole answer to a request."""
        with self.client() as client:
            return client.post(self.dialect.path, json=body or self.dialect.body(stream=False))

    def node(self) -> dict[str, Any]:
        return next(node for node in self.server.http.get("/nodes").json() if node["id"] == "peer")

    def restart(self) -> Iterator[None]:
        """Stop the peer, yield, and start it again."""
        peer = self.program or self.backend
        assert peer is not None
        peer.stop()
        yield
        peer.start()


def configuration(url: str, key: str | None, **node: Any) -> dict[str, Any]:
    """Return the settings of a Fairlead with one node."""
    peer = {"id": "peer", "url": url, "seats": SLOTS, **({"apiKey": key} if key else {}), **node}
    return {
        "nodes": [peer],
        "healthCheck": {"interval": f"{PROBE_S}s"},
        "queue": {"keepAlive": f"{KEEP_ALIVE_S}s", "timeout": "30s"},
    }


@contextmanager
def fairlead(folder: Path, settings: dict[str, Any]) -> Iterator[RealServer]:
    """Run a Fairlead with these settings."""
    file = folder / "fairlead.yaml"
    file.write_text(json.dumps(settings))
    file.chmod(0o600)
    with real_server("--config", str(file)) as server:
        yield server


@contextmanager
def peer(name: str, folder: Path) -> Iterator[tuple[Program | None, Backend | None, dict[str, Any]]]:
    """Run a peer; yield it, what is behind it, and the settings of a Fairlead whose node it is."""
    with ExitStack() as stack:
        backend, program = None, None
        if name in ROUTERS:
            backend = Backend(key=None if name == "litellm" else NODE_KEY)
        elif name not in ENGINES:
            backend = Backend("messages" if name == "anthropic" else "ollama", key=NODE_KEY)
        if backend is not None:
            stack.callback(backend.stop)
        make: Callable[[Path, str], Program] | None = (ROUTERS | ENGINES).get(name)
        if make is not None:
            program = make(folder, "" if backend is None else backend.url)
            program.start()
            stack.callback(program.stop)
        url = (program or backend).url  # type: ignore[union-attr]
        key = (program and program.key) or NODE_KEY
        dialects = {"anthropic": ["messages"], "ollama": ["ollama"]}.get(name)
        yield program, backend, configuration(url, key, **({"dialects": dialects} if dialects else {}))


@contextmanager
def as_node(name: str, folder: Path, *, fronts: int = 1) -> Iterator[Rig]:
    """Run a peer, and a Fairlead whose node it is."""
    with ExitStack() as stack:
        program, backend, settings = stack.enter_context(peer(name, folder))
        server = stack.enter_context(fairlead(folder, {**settings, "fronts": fronts}))
        rig = Rig(name, server, server.url, "unused", DIALECTS.get(name, OPENAI), backend, program)
        until(lambda: rig.node()["state"] == "up" and MODEL in rig.node()["models"])
        yield rig


@contextmanager
def in_front(name: str, folder: Path) -> Iterator[Rig]:
    """Run a Fairlead whose node is a backend, and a peer in front of it."""
    with ExitStack() as stack:
        backend = Backend(key=NODE_KEY)
        stack.callback(backend.stop)
        server = stack.enter_context(fairlead(folder, configuration(backend.url, NODE_KEY)))
        program = ROUTERS[name](folder, server.url)
        program.start()
        stack.callback(program.stop)
        rig = Rig(name, server, program.url, program.key or "unused", OPENAI, backend, program)
        until(lambda: rig.node()["state"] == "up" and MODEL in rig.node()["models"])
        yield rig
