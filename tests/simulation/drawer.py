"""Draws the requests of a run."""

from random import Random
from typing import Any

from simulation.deployment import NODE_PORT, NODES, OPERATOR, Deployment, Person
from simulation.exchanges import NEVER_S, Exchange, Kind

READ_PATHS = (
    *("/health", "/ready", "/running", "/nodes", "/queue", "/queue/estimate?model=alpha", "/v1/models"),
    *("/metrics", "/version", "/events", "/", "/openapi.json"),
)


KINDS: dict[Kind, int] = {  # with their weights
    "chat": 60,
    "completion": 12,
    "embeddings": 4,
    "read": 10,
    "cancel": 4,
    "tokenize": 3,
    "change": 4,
    "malformed": 3,
}
RAW = (
    b"\x16\x03\x01\x02\x00\x01",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n\r\n\x00\xff",
)


class Drawer:
    """Draws requests and keeps them. `always_streams`: every text is streamed."""

    def __init__(self, deployment: Deployment, random: Random) -> None:
        self._deployment = deployment
        self._random = random
        self.exchanges: list[Exchange] = []
        self.always_streams = False

    def draw(self, person: Person) -> Exchange:
        """Return a request of any kind."""
        random = self._random
        (kind,) = random.choices(list(KINDS), list(KINDS.values()))
        exchange = Exchange(len(self.exchanges), kind, person)
        getattr(self, f"_{kind}")(exchange)
        self._keep(exchange)
        if exchange.generates:
            self._vary(exchange)
        return exchange

    def _vary(self, exchange: Exchange) -> None:
        """Make some clients disconnect early, read slowly, or send `X-No-Queue` or `X-Priority`."""
        random = self._random
        if random.random() < 0.1:
            exchange.leaves_after_s = random.choice((0.0, 0.01, 0.2, 2.0, 10.0))
        elif random.random() < 0.06:
            exchange.leaves_after_bytes = random.randrange(1, 600)
        exchange.resets = random.random() < 0.5
        exchange.reads_slowly = exchange.stream and random.random() < 0.05
        if random.random() < 0.04:
            exchange.headers["X-No-Queue"] = "1"
        if random.random() < 0.1:
            exchange.headers["X-Priority"] = random.choice(("high", "normal", "low"))

    def canary(self, person: Person, model: str) -> Exchange:
        """Return a simple request that a healthy server answers."""
        exchange = Exchange(len(self.exchanges), "chat", person, model)
        self._fill_chat(exchange)
        self._keep(exchange)
        return exchange

    def read(self, path: str, *, method: str = "GET", body: object = None) -> Exchange:
        """Return a request of the operator."""
        kind: Kind = "read" if method == "GET" else "change"
        exchange = Exchange(len(self.exchanges), kind, self.operator, method=method, path=path, body=body)
        self._keep(exchange)
        return exchange

    @property
    def operator(self) -> Person:
        """The user with all permissions."""
        return Person("operator", OPERATOR if self._deployment.has_keys else None)

    def lacks_node(self, model: str) -> bool:
        """Return whether only remote nodes have a model, and all of them are drained or removed now."""
        changes = sorted(
            (exchange for exchange in self.exchanges if exchange.node), key=lambda exchange: exchange.ended_s
        )
        out: set[str] = set()
        for exchange in changes:
            is_back = (
                exchange.path == "/nodes" and exchange.answer is not None and exchange.answer.status == 201
            )
            (out.discard if is_back else out.add)(exchange.node)
        return model not in self._deployment.document["models"] and out.issuperset(
            self._deployment.holders(model)
        )

    def may_have_lacked_node(self, exchange: Exchange) -> bool:
        """Return whether `lacks_node` may have been true during a request."""
        out = {other.node for other in self.exchanges if other.node and other.began_s <= exchange.ended_s}
        is_ours = exchange.model in self._deployment.document["models"]
        return not is_ours and out.issuperset(self._deployment.holders(exchange.model))

    def _keep(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        exchange.headers |= {**self._identity(exchange.person), "X-Request-Id": exchange.request_id}

    def _identity(self, person: Person) -> dict[str, str]:
        if person.key is not None:
            return {"Authorization": f"Bearer {person.key}"}
        return {"X-OpenWebUI-User-Id": person.name}

    def _chat(self, exchange: Exchange) -> None:
        random = self._random
        exchange.model = random.choice(self._deployment.models)
        exchange.stream = self.always_streams or random.random() < 0.5
        exchange.max_tokens = random.choice((3, 64, 64, 64))
        exchange.n = random.choice((1, 1, 1, 1, 2))
        self._fill_chat(exchange)
        if random.random() < 0.3:
            exchange.body["temperature"] = 0

    def _fill_chat(self, exchange: Exchange) -> None:
        exchange.path = "/v1/chat/completions"
        exchange.body = {
            "model": exchange.model,
            "messages": [{"role": "user", "content": f"please {exchange.ticket}"}],
            **self._common(exchange),
        }

    def _completion(self, exchange: Exchange) -> None:
        random = self._random
        exchange.model = random.choice(self._deployment.models)
        exchange.stream = self.always_streams or random.random() < 0.5
        exchange.path = "/v1/completions"
        filler = "word " * random.choice((0, 0, 200))
        exchange.body = {
            "model": exchange.model,
            "prompt": f"{filler}please {exchange.ticket}",
            **self._common(exchange),
        }

    def _common(self, exchange: Exchange) -> dict[str, Any]:
        return {"max_tokens": exchange.max_tokens, "stream": exchange.stream, "n": exchange.n}

    def _embeddings(self, exchange: Exchange) -> None:
        exchange.model = self._random.choice(self._deployment.models)
        exchange.path = "/v1/embeddings"
        exchange.body = {"model": exchange.model, "input": f"please {exchange.ticket}"}

    def _read(self, exchange: Exchange) -> None:
        exchange.method = "GET"
        exchange.path = self._random.choice(READ_PATHS)
        if exchange.path == "/events":
            exchange.leaves_after_s = self._random.choice((0.1, 3.0, 20.0))

    def _cancel(self, exchange: Exchange) -> None:
        others = [other for other in self.exchanges if other.generates and other.ended_s == NEVER_S]
        if others and self._random.random() < 0.9:
            other = self._random.choice(others)
            exchange.person = other.person
            other.was_cancelled = True
            exchange.path = f"/v1/requests/{other.request_id}/cancel"
        else:
            exchange.path = "/v1/requests/nobody/cancel"

    def _tokenize(self, exchange: Exchange) -> None:
        exchange.model = self._random.choice(self._deployment.models)
        exchange.path = "/tokenize"
        exchange.body = {"model": exchange.model, "prompt": f"please {exchange.ticket}"}

    def _change(self, exchange: Exchange) -> None:
        """Load or unload a model; drain or remove a node, or add it again."""
        random = self._random
        exchange.person = self.operator
        nodes = sorted(self._deployment.nodes)
        change = random.choice(("load", "unload", "drain", "remove", "add") if nodes else ("load", "unload"))
        if change in ("load", "unload"):
            exchange.model = random.choice(self._deployment.models)
            exchange.path = f"/models/{change}"
            exchange.body = {"model": exchange.model}
            if change == "unload":
                exchange.body["force"] = random.random() < 0.3
        elif change == "drain":
            exchange.path = f"/nodes/{random.choice(nodes)}/drain"
        elif change == "remove":
            exchange.method, exchange.path = "DELETE", f"/nodes/{random.choice(nodes)}"
        else:
            node = random.choice(nodes)
            names = self._deployment.nodes[node].names
            exchange.path = "/nodes"
            exchange.body = {
                "id": node,
                "url": f"http://{NODES[node]}:{NODE_PORT}",
                "models": list(names.values()),
                "model_names": {ours: theirs for theirs, ours in names.items()},
            }

    def _malformed(self, exchange: Exchange) -> None:
        random = self._random
        if random.random() < 0.3:
            exchange.raw = random.choice(RAW)
            exchange.leaves_after_s = 30.0
            return
        exchange.path = random.choice(("/v1/chat/completions", "/nowhere", "/v1/completions", "/models/load"))
        bodies = (b"{", b"[]", b'{"model":7}', b'{"model":"nobody","messages":[]}', b"\xff\x00")
        exchange.body = random.choice(bodies)
        if random.random() < 0.3:
            exchange.method = random.choice(("PUT", "DELETE", "PATCH", "OPTIONS"))
