"""Every route of the route table as a request, and the roles that may send it: what the matrix tests use.

`ROLE_OF` is written by hand. The route table has the same facts, and a row that lost its permission would
otherwise agree with itself.
"""

import json
import re
from typing import Any, NamedTuple

from fairlead.base.config import ROLES, ApiKey, Role
from fairlead.server.routes.route import Route
from fairlead.server.routes.route_table import ROUTES

KEYS: dict[Role, ApiKey] = {role: ApiKey(f"sk-{role}", user=f"{role}-1", role=role) for role in ROLES}
OWNED = ("response_id", "conversation_id", "item_id", "file_id", "batch_id", "request_id")
"""Parameters of paths that name an object of one key and user. `test_roles.py` has a test for each."""
SHARED = ("name", "node_id", "upstream_path", "digest")
"""Parameters of paths that name what everybody with the right to the route may see."""
OTHER = ApiKey("sk-other", user="other")  # the owner of objects that are not the caller's

KEYLESS = {
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/ready"),
    ("GET", "/"),
    ("GET", "/dashboard/{name}"),
}
ROLE_OF: dict[tuple[str, str], Role] = {
    ("POST", "/models/load"): "operator",
    ("POST", "/models/unload"): "operator",
    ("GET", "/models/{name}/logs"): "operator",
    ("POST", "/nodes/{node_id}/drain"): "operator",
    ("POST", "/nodes"): "admin",
    ("DELETE", "/nodes/{node_id}"): "admin",
    ("GET", "/v1/organization/api_keys"): "admin",
    ("POST", "/v1/organization/api_keys"): "admin",
    ("GET", "/v1/organization/api_keys/{key_id}"): "admin",
    ("DELETE", "/v1/organization/api_keys/{key_id}"): "admin",
    ("POST", "/v1/organization/api_keys/{key_id}/rotate"): "admin",
    ("GET", "/v1/organization/admin_api_keys"): "admin",
    ("POST", "/v1/organization/admin_api_keys"): "admin",
    ("GET", "/v1/organization/admin_api_keys/{key_id}"): "admin",
    ("DELETE", "/v1/organization/admin_api_keys/{key_id}"): "admin",
    ("GET", "/v1/organization/projects/{project_id}/api_keys"): "admin",
    ("GET", "/v1/organization/projects/{project_id}/api_keys/{key_id}"): "admin",
    ("DELETE", "/v1/organization/projects/{project_id}/api_keys/{key_id}"): "admin",
    ("GET", "/v1/organization/budgets"): "admin",
    ("POST", "/v1/organization/budgets"): "admin",
    ("GET", "/v1/organization/budgets/{budget_id}"): "admin",
    ("DELETE", "/v1/organization/budgets/{budget_id}"): "admin",
    ("GET", "/v1/organization/projects/{project_id}/spend_limit"): "admin",
    ("POST", "/v1/organization/projects/{project_id}/spend_limit"): "admin",
    ("DELETE", "/v1/organization/projects/{project_id}/spend_limit"): "admin",
}

_MESSAGES = [{"role": "user", "content": "hello"}]
_BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": _MESSAGES},
    "/completions": {"prompt": "hello"},
    "/embeddings": {"input": ["hello"]},
    "/messages": {"max_tokens": 9, "messages": _MESSAGES},
    "/messages/count_tokens": {"messages": _MESSAGES},
    "/responses/input_tokens": {"input": "hello"},
    "/responses/compact": {"input": "hello"},
    "/responses": {"input": "hello"},
    "/conversations": {},
    "/conversations/{conversation_id}": {"metadata": {}},
    "/conversations/{conversation_id}/items": {"items": []},
    "/rerank": {"query": "hello", "documents": ["world"]},
    "/v2/rerank": {"query": "hello", "documents": ["world"]},
    "/score": {"text_1": "hello", "text_2": ["world"]},
    "/audio/transcriptions": {},
    "/audio/translations": {},
    "/audio/speech": {"input": "hello"},
    "/images/generations": {"prompt": "hello"},
    "/images/edits": {"prompt": "hello"},
    "/images/variations": {},
    "/moderations": {"input": "hello"},
    "/batches": {"input_file_id": "absent", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/tokenize": {"prompt": "hello"},
    "/apply-template": {"messages": _MESSAGES},
    "/completion": {"prompt": "hello"},
    "/invocations": {"prompt": "hello"},
    "/detokenize": {"tokens": [10]},
    "/api/chat": {"messages": _MESSAGES},
    "/api/generate": {"prompt": "hello"},
    "/api/embed": {"input": ["hello"]},
    "/api/embeddings": {"prompt": "hello"},
    "/api/show": {},
    "/models/load": {},
    "/models/unload": {},
}
_ORGANIZATION: dict[str, dict[str, Any]] = {
    "api_keys": {"name": "ben"},
    "admin_api_keys": {"name": "carla"},
    "budgets": {"team": "research", "tokens_per_day": 1_000_000},
    "spend_limit": {"currency": "USD", "interval": "month", "threshold_amount": 5000},
}
_NAMES = {"node_id": "big", "upstream_path": "small/x", "digest": "sha256:0"}


class Call(NamedTuple):
    """A request for a route."""

    method: str
    path: str
    body: bytes


def call_of(route: Route, *, node_url: str = "http://10.0.0.2:8000", **names: str) -> Call:
    """Return a valid request for a route; `names` are values of the path's parameters."""
    values = {"name": "app.css" if "dashboard" in route.path else "small", **_NAMES, **names}
    path = re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], "absent"), route.path)
    if route.path == "/nodes" and route.method == "POST":
        return Call(route.method, path, json.dumps({"id": "big", "url": node_url}).encode())
    if "/organization/" in route.path:
        fields = _ORGANIZATION.get(route.path.rpartition("/")[2], {})
        query = "?start_time=0" if "/usage/" in path or path.endswith("/costs") else ""
        return Call(route.method, path + query, json.dumps(fields).encode() if route.body else b"")
    fields = _BODIES.get(route.path.removeprefix("/v1")) if route.method == "POST" else None
    if route.path.endswith("/audio/voices"):
        path += "?model=remote"
    model = "remote" if route.tag == "media" else "small"
    body = b"" if fields is None else json.dumps({"model": model, **fields}).encode()
    return Call(route.method, path, body)


def role_of(route: Route) -> Role | None:
    """Return the role that a route needs; None if it needs no key."""
    at = (route.method, route.path)
    return None if at in KEYLESS else ROLE_OF.get(at, "user")


def owned(parameter: str) -> list[Route]:
    """Return the routes for one object of its key and user, which is named by a parameter of the path."""
    return [route for route in ROUTES if f"{{{parameter}}}" in route.path]


def cells() -> list[tuple[Route, Role | None, Role | None]]:
    """Return each route with each caller's role, None for no key, and the role that the route needs."""
    return [(route, caller, role_of(route)) for route in ROUTES for caller in (None, *ROLES)]


def header_of(caller: Role | None) -> dict[str, str]:
    """Return the header with the key of a role."""
    return {} if caller is None else {"Authorization": f"Bearer {KEYS[caller].key}"}


def check(caller: Role | None, needed: Role | None, status: int, body: bytes) -> None:
    """Check the response to a request for a route that needs a role: 401, 403, or neither of them."""
    if needed is None:
        assert status not in (401, 403)
    elif caller is None:
        assert status == 401
    elif ROLES.index(caller) < ROLES.index(needed):
        assert status == 403
        text = body.decode()
        assert f"an API key with the role {needed}" in text
        assert f"has the role {caller}" in text
        assert KEYS[caller].key not in text
        assert '"insufficient_role"' in text
    else:
        assert status not in (401, 403), body
