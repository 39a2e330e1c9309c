"""The route table: each row has a view, each path one meaning, and a request is matched once."""

import re
from collections import Counter
from pathlib import Path

import pytest
from werkzeug.routing import MapAdapter

from fairlead.server import routes as api
from fairlead.server.routes.paths import RouteMatcher
from fairlead.server.routes.route import KEYLESS, Permission
from fairlead.server.routes.route_table import ROUTES


def test_no_method_of_a_path_occurs_twice():
    assert max(Counter((route.method, route.path) for route in ROUTES).values()) == 1


def test_only_probes_and_the_dashboard_need_no_key():
    assert {route.path for route in ROUTES if route.permission in KEYLESS} == {
        "/health",
        "/ping",
        "/ready",
        "/",
        "/dashboard/{name}",
    }


def test_pages_of_others_may_not_use_the_routes_of_models_nodes_keys_and_usage():
    unsafe = {(route.method, route.path) for route in ROUTES if route.permission.is_strict}
    changing = {
        (route.method, route.path)
        for route in ROUTES
        if (route.method != "GET" and route.path.startswith(("/models/", "/nodes")))
        or route.path.startswith("/v1/organization/")
    }
    read = ("/nodes", "/models/{name}/logs", "/v1/requests", "/tenants", "/timings")
    assert unsafe - changing == {("GET", path) for path in read}
    assert changing - unsafe == set()


def test_only_administrators_add_and_remove_nodes_and_only_operators_drain_them():
    changing = {
        (route.method, route.path): route.permission
        for route in ROUTES
        if route.path.startswith("/nodes") and route.method != "GET"
    }
    assert changing == {
        ("POST", "/nodes"): Permission.ADMIN,
        ("DELETE", "/nodes/{node_id}"): Permission.ADMIN,
        ("POST", "/nodes/{node_id}/drain"): Permission.ALL_MODELS,
    }


def test_every_documented_route_has_a_summary_that_is_a_sentence():
    summaries = [route.summary for route in ROUTES if route.tag is not None]
    assert [text for text in summaries if not re.fullmatch(r"[A-Z2].+\.", text)] == []


def test_only_the_application_and_its_adapter_import_quart():
    modules = Path(api.__file__).parent.rglob("*.py")
    knowing = {
        path.name for path in modules if re.search(r"^(from|import) quart", path.read_text(), re.MULTILINE)
    }
    assert knowing == {"exchange.py", "routes.py"}


@pytest.mark.parametrize("path", ["/health", "/v1/models/small", "/nowhere", "//health", "/tokenize"])
async def test_request_is_matched_once_and_not_by_werkzeug(client, monkeypatch, path):
    matched = []
    match = RouteMatcher.match

    def count(matcher, *arguments):
        matched.append(arguments)
        return match(matcher, *arguments)

    monkeypatch.setattr(RouteMatcher, "match", count)
    monkeypatch.delattr(MapAdapter, "match")
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        matched.clear()
        await client.send(method, path, b"")
        assert [arguments[0] for arguments in matched] == [method]
