"""Every route has one spelling. Any other is a 404 in JSON for every method."""

import re
from operator import attrgetter
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from werkzeug.exceptions import MethodNotAllowed, NotFound
from werkzeug.routing import Map, Rule

from fairlead.base.config import ApiKey
from fairlead.server.routes.paths import RouteMatcher, without_root
from fairlead.server.routes.route import Route
from fairlead.server.routes.route_table import ROUTES
from server.routes.conftest import Client, client_of
from server.routes.raw_http import get, post, serving

METHODS = ("GET", "POST", "DELETE", "OPTIONS", "BREW")
NAMES = {
    "{name}": "small",
    "{request_id}": "mine",
    "{response_id}": "resp_1",
    "{node_id}": "big",
    "{upstream_path}": "small/x",
    "{digest}": "sha256:12",
    "{key_id}": "key_1",
    "{file_id}": "file-1",
    "{batch_id}": "batch_1",
    "{project_id}": "research",
    "{budget_id}": "budget_1",
    "{conversation_id}": "conv_1",
    "{item_id}": "item_1",
}


def misspelled(path: str) -> set[str]:
    """Return paths that a careless server or proxy could treat as this one."""
    slashes = [index for index, character in enumerate(path) if character == "/"]
    found = {
        f"/{path}",
        f"//{path}",
        f"/.{path}",
        f"/..{path}",
        f"/x/..{path}",
        f"/%2e{path}",
        f"/%2E%2e{path}",
    }
    found |= {
        f"{path}/.",
        f"{path}/..",
        f"{path}/%2e",
        f"{path}%00",
        f"{path}%0a",
        f"{path}%0D",
        f"{path}%7f",
    }
    found |= {
        f"{path}%ff",
        f"{path}%c0%af",
        f"{path}%ed%a0%80",
        f"{path}%",
        f"{path}%2",
        f"{path}%zz",
        f"{path}%u002f",
    }
    found |= {f"{path}#x", f"{path}\\", f"{path}|", f"{path}^", f"{path}{{", path.replace("/", "\\")}
    for at in slashes:
        before, after = path[:at], path[at + 1 :]
        found |= {f"{before}//{after}", f"{before}/./{after}", f"{before}/x/../{after}", f"{before}\\{after}"}
    if path != "/":
        fixed = slashes[: 2 if path.startswith("/v1") else 1]  # those before a parameter, if there is one
        found |= {f"{path[:at]}%2f{path[at + 1 :]}" for at in fixed}
        # Paths below /upstream/ belong to another server and may end in a slash.
        found |= set() if path.startswith("/upstream/") else {f"{path}/"}
    return {each for each in found if each.startswith("/")}


def paths_of(app) -> set[str]:
    """Return a path of every route that the application has."""
    found = set()
    for _, routed in app._views:
        path = routed
        for placeholder, name in NAMES.items():
            path = path.replace(placeholder, name)
        assert "{" not in path
        found.add(path)
    return found


async def test_every_misspelled_path_is_a_404_in_json_for_every_method(client, log):
    tried = 0
    for path in sorted(paths_of(client.app)):
        for wrong in sorted(misspelled(path)):
            for method in METHODS:
                reply = await client.send(method, wrong, b"{}")
                assert (wrong, reply.status) == (wrong, 404)
                is_ollamas = unquote(wrong).startswith("/api/")  # its errors have only a message
                found = reply.error if is_ollamas else reply.error["code"]
                expected = "there is no such route" if is_ollamas else "not_found"
                assert (found, reply.headers["content-type"]) == (expected, "application/json")
                assert "location" not in reply.headers
                tried += 1
    assert tried > 3000
    assert client.gateway.jobs == []
    assert {entry["event"] for entry in log} == {"request refused"}


async def test_every_route_is_found_by_its_own_spelling(client):
    for path in sorted(paths_of(client.app)):
        reply = await client.send("BREW", path, b"")
        assert (path, reply.status) == (path, 405)


async def test_misspelled_generating_route_is_a_404_over_a_socket_too(client):
    async with serving(client.app) as server:
        for path in ("//v1/completions", "/v1%2fcompletions", "/v1/completions/", "/v1/x/../completions"):
            answer = await server.fetch(post(b"{}", path))
            assert (answer.status, answer.error["code"]) == (404, "not_found")
        answer = await server.fetch(get("*").replace(b"GET", b"OPTIONS"))
        assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_needlessly_escaped_route_is_the_same_route(client, chat):
    assert (await client.post("/v1/%63hat/completions", chat())).status == 200
    assert (await client.get("/%68ealth")).status == 200


@pytest.mark.parametrize(
    "name", ["org/small", "org%2Fsmall", "org%2fsmall", "a%5Cb", "%E6%A8%A1", "a%20b", "a;b=c"]
)
async def test_name_may_be_anything_printable_and_escaped_slashes_are_a_part_of_it(client, name):
    reply = await client.get(f"/v1/models/{name}")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_misspelled_path_is_a_401_without_a_key(client_with):
    client = client_with(ApiKey("sk"))
    for path in ("//v1/models", "/v1/models/"):
        assert (await client.get(path)).status == 401
        assert (await client.get(path, headers={"Authorization": "Bearer sk"})).status == 404


async def test_malformed_query_causes_no_failure(client):
    for query in (
        "model=%ff",
        "%ff=%ff",
        "model",
        "=",
        "&&",
        "model=small&model=%00",
        "model=" + "x" * 60_000,
    ):
        reply = await client.get(f"/queue/estimate?{query}")
        assert reply.status in {200, 404}
        assert len(reply.body) < 500


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/v1/models/" + "x" * 60_000, "/a.b/..c/.d/...", "/~a!$&'()*+,;=:@"]
)
def test_plain_paths_are_routed(path):
    assert RouteMatcher(()).is_spelled(path.encode(), path)


def test_raw_path_may_be_missing():
    matcher = RouteMatcher(ROUTES)
    assert matcher.match("GET", None, "/v1/models/a b").parameters == {"name": "a b"}
    assert matcher.match("GET", None, "/v1//models").route is None


def test_long_hostile_paths_are_refused_quickly():
    matcher = RouteMatcher(ROUTES)
    for piece in ("/", "/.", "%2", "/%2e", "/a%", "a%2f"):
        path = "/v1/models/" + piece * 30_000
        assert matcher.match("GET", path.encode() + b"\\", path).route is None
    for piece in ("/logs", "/a/logs", "/drain", "/cancel"):
        path = "/models/" + (piece * 30_000).strip("/") + "/x"
        assert matcher.match("GET", path.encode(), path).parameters == {"name": path.removeprefix("/models/")}


# The matcher, and Werkzeug's as its oracle ----------------------------------------------------------

WORDS = sorted(
    {word for route in ROUTES for word in route.path.strip("/").split("/") if word and "{" not in word}
)
METHODS_ASKED = st.sampled_from(["GET", "HEAD", "POST", "DELETE", "PUT", "BREW"])
PATHS = st.lists(st.sampled_from([*WORDS, "small", "a b", "é"]), min_size=1, max_size=6).map(
    lambda words: "/" + "/".join(words)
)


def oracle() -> Map:
    """Return Werkzeug's table of the same routes."""
    rules = [
        Rule(re.sub(r"\{(\w+)\}", r"<path:\1>", route.path), endpoint=index, methods=[route.method])
        for index, route in enumerate(ROUTES)
    ]
    return Map(rules, merge_slashes=False)


def matched(table: Map, method: str, path: str) -> tuple[Route | None, dict[str, str], tuple[str, ...]]:
    adapter = table.bind("localhost", path_info=path)
    try:
        index, parameters = adapter.match(method=method)
    except (NotFound, MethodNotAllowed):
        return None, {}, tuple(sorted(adapter.allowed_methods()))
    return ROUTES[index], parameters, ()


@given(
    st.sampled_from(["GET", "HEAD", "POST", "DELETE", "PUT", "BREW"]),
    PATHS | st.sampled_from(ROUTES).map(attrgetter("path")),
)
@example("GET", "/models/a/b/logs")
@example("GET", "/models/load")
@example("POST", "/models/other")
@example("DELETE", "/nodes/a/drain")
def test_matcher_finds_what_werkzeug_finds(method, path):
    path = path.replace("{", "").replace("}", "")
    found = MATCHER.match(method, None, path)
    route, parameters, methods = matched(ORACLE, method, path)
    assert (found.route, dict(found.parameters)) == (route, parameters)
    if route is None:
        assert set(found.methods) - {"OPTIONS"} == set(methods)


ORACLE, MATCHER = oracle(), RouteMatcher(ROUTES)


def test_request_for_options_gets_the_methods_of_all_routes_of_its_path():
    assert MATCHER.match("OPTIONS", None, "/nodes").methods == ("GET", "HEAD", "OPTIONS", "POST")
    assert MATCHER.match("OPTIONS", None, "/models/load").methods == ("GET", "HEAD", "OPTIONS", "POST")
    assert MATCHER.match("OPTIONS", None, "/nowhere").methods == ()


@pytest.mark.parametrize(
    ("root", "path", "raw_path", "inner"),
    [
        ("/llm", "/llm/v1/models", b"/llm/v1/models", ("/v1/models", b"/v1/models")),
        ("/llm/", "/llm/v1/models", b"/llm/v1/models", ("/v1/models", b"/v1/models")),
        ("/a/b", "/a/b/ready", b"/a/b/ready", ("/ready", b"/ready")),
        ("/l m", "/l m/ready", b"/l%20m/ready", ("/ready", b"/ready")),
        ("/llm", "/llm/", b"/llm/", ("/", b"/")),
        ("/llm", "/llm/v1/models/a/b", b"/llm/v1/models/a%2Fb", ("/v1/models/a/b", b"/v1/models/a%2Fb")),
        ("/llm", "/llm/../ready", b"/llm/../ready", ("/../ready", b"/../ready")),
        ("/llm", "/llm/ready", None, ("/ready", None)),
        # Already removed by a proxy or an outer application.
        ("/llm", "/ready", b"/ready", ("/ready", b"/ready")),
        # Not below the prefix.
        ("/llm", "/llm", b"/llm", ("/llm", b"/llm")),
        ("/llm", "/llmx/ready", b"/llmx/ready", ("/llmx/ready", b"/llmx/ready")),
        ("/a/b", "/a/b/v1/models", b"/a%2Fb/v1/models", ("/a/b/v1/models", b"/a%2Fb/v1/models")),
    ],
)
def test_prefix_is_removed_from_a_path_once(root, path, raw_path, inner):
    scope = {"type": "http", "root_path": root, "path": path, "raw_path": raw_path}
    found = without_root(scope)
    assert (found["path"], found["raw_path"]) == inner
    assert found["root_path"] == ""


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_routes_are_found_below_a_prefix_and_nowhere_else(model, bypasses_quart, chat):
    app = client_of(model, bypasses_quart=bypasses_quart).app

    async def below(scope, receive, send):
        await app({**scope, "root_path": "/llm"}, receive, send)

    client = Client(below, None)
    assert (await client.get("/llm/v1/models")).status == 200
    assert (await client.post("/llm/v1/chat/completions", chat())).status == 200
    assert (await client.post("/llm/../v1/chat/completions", chat())).status == 404
    assert (await client.post("/other/v1/chat/completions", chat())).status == 404
    assert (await client.post("/llm/llm/v1/chat/completions", chat())).status == 404
