"""API keys, the rights of their owners, secrets in responses and logs, and isolation of tenants."""

import json

import pytest

from advisories.conftest import KEYS
from advisories.target import CHAT, COMPLETIONS, HEAD, MODEL, Target, chat, completion
from advisories.tries import tries, tries_each
from fairlead.base.config import ApiKey, Config
from fairlead.base.errors import InvalidApiKey
from fairlead.base.formats.headers import FirstHeaders
from fairlead.router.quotas import access
from fairlead.router.quotas.access import Authenticator, owner_of

LONG_PROMPT = "The owl and the fox went to sea " * 20
NO_KEY = {"Authorization": ""}
PROTECTED = ["/v1/models", "/running", "/nodes", "/queue", "/metrics", "/events", "/version", "/openapi.json"]
# If a server joined `Host` and path to a URL, these would be requests for another path.
HOSTS = [
    "localhost/health?",
    "localhost/health#",
    "localhost/dashboard/",
    "localhost@health",
    "/health",
    "a/../health",
]
# Other spellings of a path that needs a key.
SPELLINGS = [
    "//v1/models",
    "/./v1/models",
    "/health/../v1/models",
    "/%76%31/models",
    "/v1//models",
    "/v1/models/",
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Keys ----------------------------------------------------------------------------------------------


@tries("CVE-2025-59425")
def test_all_keys_are_compared_and_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        access, "compare_digest", lambda one, other: compared.append((one, other)) or one == other
    )
    authenticator = Authenticator([ApiKey("first"), ApiKey("second"), ApiKey("third-and-longer")])
    for header in ("first", "third-and-longer", "f", "x" * 10_000):
        compared.clear()
        headers = FirstHeaders([(b"authorization", f"Bearer {header}".encode())])
        try:
            identity = authenticator.authenticate(headers)
        except InvalidApiKey:
            identity = None
        assert (identity is not None) == (header in {"first", "third-and-longer"})
        assert len(compared) == 3  # independent of the match
        assert {len(one) for pair in compared for one in pair} == {32}  # digests hide the keys' lengths


@tries(
    "CVE-2026-42208",
    "CVE-2024-4890",
    "CVE-2024-5225",
    "CVE-2025-45809",
    "CVE-2026-59822",
    "CVE-2026-93355",
    "GHSA-7hp6-4w63-5g45",
)
@pytest.mark.parametrize(
    "header",
    [
        "Bearer ' OR '1'='1",
        "Bearer sk-' UNION SELECT key FROM keys --",
        "Bearer eyJhbGciOiJub25lIn0.eyJyb2xlIjoiYWRtaW4ifQ.",
        f"Bearer {KEYS['ana'][:-1]}",
        f"Bearer {KEYS['ana']}x",
        f"Bearer {KEYS['ana']},{KEYS['bob']}",
        f"Basic {KEYS['ana']}",
        "Bearer ana",
        "Bearer null",
        "Bearer *",
    ],
)
def test_invalid_key_is_refused_by_every_protected_route(server_with_keys: Target, header):
    for path in PROTECTED:
        assert server_with_keys.request("GET", path, headers={"Authorization": header}).status_code == 401
    for path in (CHAT, COMPLETIONS, "/tokenize", "/models/unload", "/nodes"):
        assert server_with_keys.post(path, {}, headers={"Authorization": header}).status_code == 401


@tries("CVE-2026-35030")
def test_keys_with_the_same_beginning_are_different_keys(server_with_keys: Target):
    first, second = KEYS["ana"], KEYS["bob"]
    assert first[:27] == second[:27]
    assert server_with_keys.request("GET", "/v1/models", headers=bearer(first[:27])).status_code == 401
    assert owner_of(ApiKey(first)) != owner_of(ApiKey(second))
    for key in (first, second, first):
        assert server_with_keys.post(COMPLETIONS, completion(), headers=bearer(key)).status_code == 200


@tries("CVE-2025-34351", "CVE-2025-63389", "CVE-2023-48022", "CVE-2026-15977", "CVE-2026-15978")
def test_every_route_except_probes_and_the_dashboard_needs_the_key(server_with_keys: Target):
    for path, methods in json.loads(server_with_keys.request("GET", "/openapi.json").text)["paths"].items():
        for method in methods:
            answer = server_with_keys.request(
                method.upper(), path.replace("{", "").replace("}", ""), headers=NO_KEY
            )
            is_open = path in {"/health", "/ping", "/ready", "/"} or path.startswith("/dashboard")
            assert answer.status_code == 401 or is_open, (method, path, answer.status_code)


@tries("CVE-2025-34351")
def test_server_listens_on_the_loopback_unless_configured_otherwise():
    assert Config(models=()).host == "127.0.0.1"


@tries("CVE-2026-48746", "CVE-2026-48710", "CVE-2026-49468")
@pytest.mark.parametrize("host", HOSTS)
def test_no_host_header_changes_the_requested_path(server_with_keys: Target, host):
    for path in PROTECTED:
        answer = server_with_keys.raw(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
        assert answer.status in {400, 401, 403}
    body = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    assert server_with_keys.raw(head.encode() + body).status in {400, 401, 403}


@tries("CVE-2026-24206", "CVE-2026-24207", "CVE-2026-48746")
@pytest.mark.parametrize("path", SPELLINGS)
def test_no_other_spelling_of_a_path_bypasses_the_key(server_with_keys: Target, path):
    for method, spelled in (("GET", path), ("POST", path.replace("models", "completions"))):
        head, rest = f"{method} {spelled} {HEAD}", "Content-Length: 2\r\n\r\n{}"
        assert server_with_keys.raw((head + rest).encode()).status in {400, 401, 404}
        key = f"Authorization: Bearer {KEYS['ana']}\r\n"
        assert server_with_keys.raw((head + key + rest).encode()).status in {200, 400, 404}


@tries("CVE-2024-5710", "CVE-2025-0628", "CVE-2026-35029", "CVE-2026-47101", "CVE-2026-47102")
def test_claims_in_a_request_give_a_limited_key_no_rights(server_with_keys: Target):
    headers = bearer(KEYS["limited"])
    claims = {"models": [MODEL], "user_role": "proxy_admin", "allowed_routes": ["*"], "role": "admin"}
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        body = (chat(model=MODEL) if path == CHAT else completion(model=MODEL)) | claims
        assert server_with_keys.post(path, body, headers=headers).status_code == 403
    for path in ("/models/load", "/models/unload"):
        assert server_with_keys.post(path, {"model": MODEL}, headers=headers).status_code == 403
    node = {"id": "a", "url": "http://127.0.0.1:9"}
    assert server_with_keys.post("/nodes", node, headers=headers).status_code == 403
    assert server_with_keys.request("DELETE", "/nodes/a", headers=headers).status_code == 403
    shown = server_with_keys.request("GET", "/v1/models", headers=headers).json()["data"]
    assert shown == []


@tries("CVE-2026-105755", "CVE-2024-5710")
def test_one_key_cannot_cancel_a_request_of_another(server_with_keys: Target):
    headers = bearer(KEYS["ana"]) | {"X-Request-Id": "of-ana"}
    body = completion(max_tokens=900, ignore_eos=True, stream=True)
    with server_with_keys.http.stream("POST", COMPLETIONS, json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        answer = server_with_keys.post("/v1/requests/of-ana/cancel", {}, headers=bearer(KEYS["bob"]))
        assert answer.status_code == 404
        assert [line for line in lines if line][-1] == "data: [DONE]"


# Secrets -------------------------------------------------------------------------------------------


@tries(
    "CVE-2024-9606",
    "CVE-2025-1979",
    "CVE-2025-0330",
    "CVE-2025-11203",
    "CVE-2026-15977",
    "GHSA-69x8-hrgq-fjj8",
)
def test_no_key_is_shown_or_logged(server_with_keys: Target):
    invalid_key = "sk-wrong-0123456789abcdef"
    node_key = "sk-node-0123456789abcdef"
    server_with_keys.request("GET", "/v1/models", headers=bearer(invalid_key))
    node = {"id": "remote", "url": "http://127.0.0.1:9", "api_key": node_key, "models": ["remote"]}
    added = server_with_keys.post("/nodes", node)
    server_with_keys.post("/nodes", node | {"id": "", "api_key": node_key})
    shown = [
        server_with_keys.request("GET", path).text
        for path in ("/nodes", "/running", "/v1/models", "/metrics", "/health")
    ]
    shown += [
        server_with_keys.request("GET", path).text for path in ("/queue", "/version", "/openapi.json", "/")
    ]
    server_with_keys.request("DELETE", "/nodes/remote")
    output = "".join([added.text, *shown, *server_with_keys.running.log])
    for secret in (*KEYS.values(), invalid_key, node_key):
        assert secret[:12] not in output


@tries("CVE-2026-15574", "CVE-2024-9606")
def test_prompts_and_answers_are_not_logged(server_with_keys: Target):
    before = len(server_with_keys.running.log)
    secret = "MY-SECRET-PROMPT"
    answer = server_with_keys.post(CHAT, chat(content=f"say {secret}", user="MY-SECRET-USER"))
    text = answer.json()["choices"][0]["message"]["content"]
    server_with_keys.post(CHAT, b'{"messages": "' + secret.encode() + b'"}')
    server_with_keys.canary()
    logged = "".join(server_with_keys.running.log[before:])
    assert secret not in logged
    assert len(text) < 4 or text not in logged


# The prefix cache ----------------------------------------------------------------------------------


@tries_each("CVE-2025-46570", "CVE-2026-105752")
def test_no_tenant_hits_the_cached_prefixes_of_another(server_with_keys: Target, number):
    body = completion(prompt=f"{number} {LONG_PROMPT}")

    def prefix_hits(key: str, **fields: str) -> int:
        before = server_with_keys.running.running()["engine"]["prefix_hits"]
        assert server_with_keys.post(COMPLETIONS, body | fields, headers=bearer(KEYS[key])).status_code == 200
        return server_with_keys.running.running()["engine"]["prefix_hits"] - before

    assert prefix_hits("ana") == 0
    assert prefix_hits("ana") > 0
    assert prefix_hits("bob", user="ana") == 0
