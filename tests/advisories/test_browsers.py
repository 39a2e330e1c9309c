"""Requests that a web page of another site makes through a visitor's browser are refused."""

import json

import pytest

from advisories.target import CHAT, COMPLETIONS, MODEL, Target, chat, completion
from advisories.tries import tries

FOREIGN = {"Host": "evil.example"}
PAGE = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
# A peer's guard checked the `User-Agent`, which a page can choose.
AGENTS = ["Mozilla/5.0", "Fetch", ""]


@tries("CVE-2024-28224", "CVE-2025-62593")
@pytest.mark.parametrize("agent", AGENTS)
def test_page_with_a_host_name_that_resolves_to_the_server_is_refused(server: Target, agent):
    headers = FOREIGN | {"User-Agent": agent}
    for path in ("/v1/models", "/running", "/nodes", "/queue", "/metrics", "/events", "/version"):
        answer = server.request("GET", path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "Host"), path
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion()), ("/tokenize", {"prompt": "a"})):
        assert server.post(path, body, headers=headers).status_code == 403
    for path in ("/models/load", "/models/unload"):
        assert server.post(path, {"model": MODEL}, headers=headers).status_code == 403


@tries("CVE-2024-28224", "CVE-2025-62593")
@pytest.mark.parametrize("agent", AGENTS)
def test_page_of_another_server_is_refused(server: Target, agent):
    headers = PAGE | {"User-Agent": agent}
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion()), ("/tokenize", {"prompt": "a"})):
        assert server.post(path, body, headers=headers).status_code == 403, path
    for path in ("/models/load", "/models/unload"):
        assert server.post(path, {"model": MODEL}, headers=headers).status_code == 403


@tries("CVE-2026-27482")
@pytest.mark.parametrize("page", [FOREIGN, PAGE, {"Origin": "null"}], ids=["host", "origin", "null"])
def test_page_cannot_delete_anything_either(server: Target, page):
    for method, path in (("DELETE", "/nodes/a"), ("POST", "/nodes/a/drain"), ("POST", "/nodes")):
        body = {"id": "a", "url": "http://127.0.0.1:9"}
        answer = server.request(method, path, content=json.dumps(body), headers=page)
        assert answer.status_code == 403
    for method in ("DELETE", "PUT", "PATCH"):
        for path in ("/models/load", "/v1/models", f"/v1/models/{MODEL}", "/running"):
            assert server.request(method, path, headers=page).status_code in {403, 404, 405}


@tries("GHSA-hhww-mrg2-969h")
def test_client_text_is_never_returned_as_html(server: Target):
    script = "<script>alert(1)</script>"
    answers = [
        server.request("GET", f"/{script}"),
        server.request("GET", f"/v1/models/{script}"),
        server.request("GET", f"/dashboard/{script}"),
        server.post(CHAT, chat(model=script)),
        server.request("GET", "/queue/estimate", params={"model": script}),
    ]
    for answer in answers:
        assert answer.status_code in {400, 404}
        assert answer.headers["content-type"].startswith("application/json")
