"""The configuration of a simulated server, its users and the servers around it: drawn from a seed."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulation.engine_child import ChildPlan
from simulation.node_server import ServerPlan
from simulation.parent import SERVER_PROGRAM, STOP_PROGRAM, model_folder, text

ENGINES = ("alpha", "beta")
COMMANDS = {"cmd": 5801, "dmc": 5802}
FAR = "far"  # a model that only remote nodes have
NODES = {f"node-{number}": f"10.0.2.{number}" for number in (1, 2, 3)}
NODE_PORT = 8080
OPERATOR = "operator-key"
_OPERATORS_KEY = {"key": OPERATOR, "user": "operator", "role": "admin"}


@dataclass
class Person:
    """A user, with an API key or with a name in a header. None: no limit."""

    name: str
    key: str | None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    priority: str | None = None


@dataclass
class Deployment:
    """One configuration. `document` is the content of its file; `servers` are those of commands, by port."""

    document: dict[str, Any]
    people: list[Person]
    child: ChildPlan
    servers: dict[int, ServerPlan]
    nodes: dict[str, ServerPlan]
    models: list[str]
    is_watched: bool
    has_keys: bool
    latency_s: float = 0.0
    ragged: bool = False
    removed: set[str] = field(default_factory=set)

    @property
    def queue_timeout_s(self) -> float:
        """`queue.timeout`."""
        return float(self.document["queue"]["timeout"])

    @property
    def request_timeout_s(self) -> float:
        """`requestTimeout`."""
        return float(self.document["requestTimeout"])

    def holders(self, model: str) -> list[str]:
        """Return the remote nodes that have a model."""
        return [node for node, plan in self.nodes.items() if model in plan.names.values()]


def draw_deployment(seed: int) -> Deployment:
    """Return the seed's deployment."""
    random = Random(f"world {seed}")
    engines = [name for name in ENGINES if random.random() < 0.75] or ["alpha"]
    commands = [name for name in COMMANDS if random.random() < 0.35]
    far = [node for node in NODES if random.random() < 0.5]
    if is_lonely := random.random() < 0.1:
        engines, commands, far = engines[:1], [], []
    people = _people(random)
    has_keys = any(person.key for person in people)
    nodes = {node: _server(random, engines) for node in far}
    models = [*engines, *commands]
    if any(FAR in plan.names.values() for plan in nodes.values()):
        models.append(FAR)
    document = {
        "host": "10.0.0.1",
        "port": 8000,
        "tenantNames": "plain",
        "allowedHosts": ["fairlead.test"],
        "models": {
            **{name: _engine(random, name, is_preloaded=is_lonely) for name in engines},
            **{name: _command(random, COMMANDS[name]) for name in commands},
        },
        "nodes": [_node(random, node, nodes[node]) for node in far],
        "queue": _queue(random),
        "limits": {
            "connections": random.choice((64, 4096)),
            "headerTimeout": random.choice((2, 20)),
            "bodyTimeout": random.choice((5, 60)),
            "idleTimeout": random.choice((5, 75)),
            "stall": random.choice((5, 30)),
            "drain": random.choice((0, 5, 30)),
        },
        "requestTimeout": random.choice((20, 60, 600)),
        "healthCheck": {
            "interval": random.choice((5, 20, 60, 60)),
            "failures": random.choice((1, 2, 3)),
            "timeout": 5,
        },
        "whileLoading": "reject" if random.random() < 0.1 else "wait",
        "routing": {"router": _router(random)},
    }
    if has_keys:
        document["apiKeys"] = [*(_key(person) for person in people), _OPERATORS_KEY]
    return Deployment(
        document=document,
        people=people,
        child=ChildPlan(
            slots=random.randrange(1, 5),
            load_s=random.choice((0.1, 1.0, 3.0)),
            step_s=random.choice((0.02, 0.1, 0.4)),
        ),
        servers={COMMANDS[name]: _server(random, [name], [name]) for name in commands},
        nodes=nodes,
        models=models,
        is_watched=random.random() < 0.2,
        has_keys=has_keys,
        latency_s=random.choice((0.0, 0.0, 0.002, 0.05)),
        ragged=random.random() < 0.3,
    )


def _people(random: Random) -> list[Person]:
    has_keys = random.random() < 0.5
    people = []
    for number in range(random.randrange(2, 6)):
        person = Person(f"person-{number}", f"key-{number}" if has_keys else None)
        if has_keys and random.random() < 0.4:
            person.requests_per_minute = random.choice((None, 5, 30))
            person.tokens_per_minute = random.choice((None, 200, 2000))
            person.concurrent = random.choice((None, 1, 3))
        if has_keys and random.random() < 0.3:
            person.priority = random.choice(("high", "normal", "low"))
        people.append(person)
    return people


def _key(person: Person) -> dict[str, Any]:
    limits = {
        "requestsPerMinute": person.requests_per_minute,
        "tokensPerMinute": person.tokens_per_minute,
        "concurrent": person.concurrent,
    }
    key: dict[str, Any] = {"key": person.key, "user": person.name}
    key["limits"] = {name: limit for name, limit in limits.items() if limit is not None}
    if person.priority is not None:
        key["priority"] = person.priority
    return key


def _engine(random: Random, name: str, *, is_preloaded: bool) -> dict[str, Any]:
    return {
        "path": str(model_folder(name)),
        "watchdog": random.choice((10, 30)),
        "ttl": random.choice((0, 0, 60, 600)),
        "preload": is_preloaded or random.random() < 0.5,
        "kvCache": {"isolateTenants": random.random() < 0.3},
    }


def _command(random: Random, port: int) -> dict[str, Any]:
    command = {
        "cmd": f"{SERVER_PROGRAM} {port} {random.choice((0.1, 2.0, 6.0))}",
        "proxy": f"http://127.0.0.1:{port}",
        "ttl": random.choice((0, 60, 600)),
        "unloadTimeout": random.choice((2, 10)),
        "concurrencyLimit": random.randrange(1, 4),
        "preload": random.random() < 0.3,
    }
    if random.random() < 0.3:
        command["cmdStop"] = f"{STOP_PROGRAM} ${{PID}}"
    return command


def _server(random: Random, maybe: list[str], certain: list[str] | None = None) -> ServerPlan:
    names = certain or [name for name in (*maybe, FAR) if random.random() < 0.6] or [FAR]
    renames = certain is None and random.random() < 0.3
    return ServerPlan(
        tokenizer=text().tokenizer,
        names={(f"{name}-there" if renames else name): name for name in names},
        step_s=random.choice((0.02, 0.1, 0.4)),
        is_fairlead=random.random() < 0.4,
        seats=random.randrange(1, 4),
    )


def _node(random: Random, node: str, plan: ServerPlan) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": node,
        "url": f"http://{NODES[node]}:{NODE_PORT}/v1",
        "seats": random.randrange(1, 4),
        "timeouts": {
            "connect": 5,
            "responseHeader": random.choice((0, 10)),
            "betweenBytes": random.choice((10, 60)),
        },
    }
    renamed = {ours: theirs for theirs, ours in plan.names.items() if ours != theirs}
    if renamed or random.random() < 0.5:
        entry["models"] = list(plan.names.values())
        entry["modelNames"] = renamed
    return entry


def _queue(random: Random) -> dict[str, Any]:
    return {
        "capacity": random.choice((0, 3, 10, 100)),
        "timeout": random.choice((20, 60)),
        "fairness": random.choice(("roundRobin", "tokens")),
        "estimate": random.choice(("mean", "quantile")),
        "keepAlive": random.choice((0, 2, 15)),
        "minShare": random.choice((0, 0.2)),
        "maxEstimatedWait": random.choice((0, 0, 0, 10)),
    }


def _router(random: Random) -> dict[str, Any]:
    use = random.choice(("keep", "keep", "lru", "group"))
    if use == "lru":
        return {"use": "lru", "settings": {"lru": {"maxLoaded": random.choice((1, 2))}}}
    return {"use": use}
