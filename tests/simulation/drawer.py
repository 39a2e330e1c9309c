"""Draws the requests of a run."""

from random import Random
from typing import Any

from simulation.visits import NEVER_S, Kind, Visit
from simulation.world import NODE_PORT, NODES, OPERATOR, Person, World

LOOKS = (
    *("/health", "/ready", "/running", "/nodes", "/queue", "/queue/estimate?model=alpha", "/v1/models"),
    *("/metrics", "/version", "/events", "/", "/openapi.json"),
)


KINDS: dict[Kind, int] = {  # with their weights
    "chat": 60,
    "completion": 12,
    "embeddings": 4,
    "look": 10,
    "cancel": 4,
    "tokenize": 3,
    "change": 4,
    "junk": 3,
}
RAW = (
    b"\x16\x03\x01\x02\x00\x01",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n\r\n\x00\xff",
)


class Drawer:
    """Draws requests and keeps them. `always_streams`: every text is streamed."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random
        self.visits: list[Visit] = []
        self.always_streams = False

    def draw(self, person: Person) -> Visit:
        """Return a request of any kind."""
        random = self._random
        (kind,) = random.choices(list(KINDS), list(KINDS.values()))
        visit = Visit(len(self.visits), kind, person)
        getattr(self, f"_{kind}")(visit)
        self._keep(visit)
        if visit.generates:
            self._vary(visit)
        return visit

    def _vary(self, visit: Visit) -> None:
        """Make some clients disconnect early, read slowly, or send `X-No-Queue` or `X-Priority`."""
        random = self._random
        if random.random() < 0.1:
            visit.leaves_after_s = random.choice((0.0, 0.01, 0.2, 2.0, 10.0))
        elif random.random() < 0.06:
            visit.leaves_after_bytes = random.randrange(1, 600)
        visit.is_rude = random.random() < 0.5
        visit.reads_slowly = visit.stream and random.random() < 0.05
        if random.random() < 0.04:
            visit.headers["X-No-Queue"] = "1"
        if random.random() < 0.1:
            visit.headers["X-Priority"] = random.choice(("high", "normal", "low"))

    def canary(self, person: Person, model: str) -> Visit:
        """Return a simple request that a healthy server answers."""
        visit = Visit(len(self.visits), "chat", person, model)
        self._fill_chat(visit)
        self._keep(visit)
        return visit

    def look(self, path: str, *, method: str = "GET", body: object = None) -> Visit:
        """Return a request of the operator."""
        kind: Kind = "look" if method == "GET" else "change"
        visit = Visit(len(self.visits), kind, self.operator, method=method, path=path, body=body)
        self._keep(visit)
        return visit

    @property
    def operator(self) -> Person:
        """The user with all permissions."""
        return Person("operator", OPERATOR if self._world.has_keys else None)

    def is_nowhere(self, model: str) -> bool:
        """Return whether only remote nodes have a model, and all of them are drained or removed now."""
        changes = sorted((visit for visit in self.visits if visit.node), key=lambda visit: visit.ended_s)
        out: set[str] = set()
        for visit in changes:
            is_back = visit.path == "/nodes" and visit.answer is not None and visit.answer.status == 201
            (out.discard if is_back else out.add)(visit.node)
        return model not in self._world.document["models"] and out.issuperset(self._world.holders(model))

    def was_nowhere(self, visit: Visit) -> bool:
        """Return whether `is_nowhere` may have been true during a request."""
        out = {other.node for other in self.visits if other.node and other.began_s <= visit.ended_s}
        is_ours = visit.model in self._world.document["models"]
        return not is_ours and out.issuperset(self._world.holders(visit.model))

    def _keep(self, visit: Visit) -> None:
        self.visits.append(visit)
        visit.headers |= {**self._identity(visit.person), "X-Request-Id": visit.request_id}

    def _identity(self, person: Person) -> dict[str, str]:
        if person.key is not None:
            return {"Authorization": f"Bearer {person.key}"}
        return {"X-OpenWebUI-User-Id": person.name}

    def _chat(self, visit: Visit) -> None:
        random = self._random
        visit.model = random.choice(self._world.models)
        visit.stream = self.always_streams or random.random() < 0.5
        visit.max_tokens = random.choice((3, 64, 64, 64))
        visit.n = random.choice((1, 1, 1, 1, 2))
        self._fill_chat(visit)
        if random.random() < 0.3:
            visit.body["temperature"] = 0

    def _fill_chat(self, visit: Visit) -> None:
        visit.path = "/v1/chat/completions"
        visit.body = {
            "model": visit.model,
            "messages": [{"role": "user", "content": f"please {visit.ticket}"}],
            **self._common(visit),
        }

    def _completion(self, visit: Visit) -> None:
        random = self._random
        visit.model = random.choice(self._world.models)
        visit.stream = self.always_streams or random.random() < 0.5
        visit.path = "/v1/completions"
        filler = "word " * random.choice((0, 0, 200))
        visit.body = {"model": visit.model, "prompt": f"{filler}please {visit.ticket}", **self._common(visit)}

    def _common(self, visit: Visit) -> dict[str, Any]:
        return {"max_tokens": visit.max_tokens, "stream": visit.stream, "n": visit.n}

    def _embeddings(self, visit: Visit) -> None:
        visit.model = self._random.choice(self._world.models)
        visit.path = "/v1/embeddings"
        visit.body = {"model": visit.model, "input": f"please {visit.ticket}"}

    def _look(self, visit: Visit) -> None:
        visit.method = "GET"
        visit.path = self._random.choice(LOOKS)
        if visit.path == "/events":
            visit.leaves_after_s = self._random.choice((0.1, 3.0, 20.0))

    def _cancel(self, visit: Visit) -> None:
        others = [other for other in self.visits if other.generates and other.ended_s == NEVER_S]
        if others and self._random.random() < 0.9:
            other = self._random.choice(others)
            visit.person = other.person
            other.was_cancelled = True
            visit.path = f"/v1/requests/{other.request_id}/cancel"
        else:
            visit.path = "/v1/requests/nobody/cancel"

    def _tokenize(self, visit: Visit) -> None:
        visit.model = self._random.choice(self._world.models)
        visit.path = "/tokenize"
        visit.body = {"model": visit.model, "prompt": f"please {visit.ticket}"}

    def _change(self, visit: Visit) -> None:
        """Load or unload a model; drain or remove a node, or add it again."""
        random = self._random
        visit.person = self.operator
        nodes = sorted(self._world.nodes)
        what = random.choice(("load", "unload", "drain", "remove", "add") if nodes else ("load", "unload"))
        if what in ("load", "unload"):
            visit.model = random.choice(self._world.models)
            visit.path = f"/models/{what}"
            visit.body = {"model": visit.model}
            if what == "unload":
                visit.body["force"] = random.random() < 0.3
        elif what == "drain":
            visit.path = f"/nodes/{random.choice(nodes)}/drain"
        elif what == "remove":
            visit.method, visit.path = "DELETE", f"/nodes/{random.choice(nodes)}"
        else:
            node = random.choice(nodes)
            names = self._world.nodes[node].names
            visit.path = "/nodes"
            visit.body = {
                "id": node,
                "url": f"http://{NODES[node]}:{NODE_PORT}",
                "models": list(names.values()),
                "model_names": {ours: theirs for theirs, ours in names.items()},
            }

    def _junk(self, visit: Visit) -> None:
        random = self._random
        if random.random() < 0.3:
            visit.raw = random.choice(RAW)
            visit.leaves_after_s = 30.0
            return
        visit.path = random.choice(("/v1/chat/completions", "/nowhere", "/v1/completions", "/models/load"))
        bodies = (b"{", b"[]", b'{"model":7}', b'{"model":"nobody","messages":[]}', b"\xff\x00")
        visit.body = random.choice(bodies)
        if random.random() < 0.3:
            visit.method = random.choice(("PUT", "DELETE", "PATCH", "OPTIONS"))
