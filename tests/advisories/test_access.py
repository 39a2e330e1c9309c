"""API keys, the rights of their owners, secrets in responses and logs, and isolation of tenants."""

import json

import pytest

from advisories.conftest import KEYS
from advisories.target import CHAT, COMPLETIONS, HEAD, MODEL, Target, chat, completion
from advisories.tries import tries, tries_each
from fairlead.config import ApiKey, Config
from fairlead.errors import InvalidApiKey
from fairlead.http.headers import FirstHeaders
from fairlead.tenancy import access
from fairlead.tenancy.access import Authenticator, owner_of

LONG_PROMPT = "The owl and the fox went to sea " * 20
NO_KEY = {"Authorization": ""}
PROTECTED = ["/v1/models", "/running", "/nodes", "/queue", "/metrics", "/events", "/version", "/openapi.json"]
# A server that joins `Host` and path to one URL would take these for requests of another path.
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
    for presented in ("first", "third-and-longer", "f", "x" * 10_000):
        compared.clear()
        headers = FirstHeaders([(b"authorization", f"Bearer {presented}".encode())])
        try:
            found = authenticator.authenticate(headers)
        except InvalidApiKey:
            found = None
        assert (found is not None) == (presented in {"first", "third-and-longer"})
        assert len(compared) == 3  # whichever key matches, and even if none does
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
    "presented",
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
def test_an_invented_key_is_refused_by_every_protected_route(guarded: Target, presented):
    for path in PROTECTED:
        assert guarded.request("GET", path, headers={"Authorization": presented}).status_code == 401
    for path in (CHAT, COMPLETIONS, "/tokenize", "/models/unload", "/nodes"):
        assert guarded.post(path, {}, headers={"Authorization": presented}).status_code == 401


@tries("CVE-2026-35030")
def test_keys_with_the_same_beginning_are_different_keys(guarded: Target):
    first, second = KEYS["ana"], KEYS["bob"]
    assert first[:27] == second[:27]
    assert guarded.request("GET", "/v1/models", headers=bearer(first[:27])).status_code == 401
    assert owner_of(ApiKey(first)) != owner_of(ApiKey(second))
    for key in (first, second, first):
        assert guarded.post(COMPLETIONS, completion(), headers=bearer(key)).status_code == 200


@tries("CVE-2025-34351", "CVE-2025-63389", "CVE-2023-48022", "CVE-2026-15977", "CVE-2026-15978")
def test_every_route_except_probes_and_the_dashboard_needs_the_key(guarded: Target):
    for path, methods in json.loads(guarded.request("GET", "/openapi.json").text)["paths"].items():
        for method in methods:
            answer = guarded.request(method.upper(), path.replace("{", "").replace("}", ""), headers=NO_KEY)
            is_open = path in {"/health", "/ready", "/"} or path.startswith("/dashboard")
            assert answer.status_code == 401 or is_open, (method, path, answer.status_code)


@tries("CVE-2025-34351")
def test_a_server_listens_on_the_loopback_unless_configured_otherwise():
    assert Config(models=()).host == "127.0.0.1"


@tries("CVE-2026-48746", "CVE-2026-48710", "CVE-2026-49468")
@pytest.mark.parametrize("host", HOSTS)
def test_no_host_header_changes_the_requested_path(guarded: Target, host):
    for path in PROTECTED:
        answer = guarded.raw(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.status in {400, 401, 403}
    body = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    assert guarded.raw(head.encode() + body).status in {400, 401, 403}


@tries("CVE-2026-24206", "CVE-2026-24207", "CVE-2026-48746")
@pytest.mark.parametrize("path", SPELLINGS)
def test_no_other_spelling_of_a_path_bypasses_the_key(guarded: Target, path):
    for method, spelled in (("GET", path), ("POST", path.replace("models", "completions"))):
        head, rest = f"{method} {spelled} {HEAD}", "Content-Length: 2\r\n\r\n{}"
        assert guarded.raw((head + rest).encode()).status in {400, 401, 404}
        key = f"Authorization: Bearer {KEYS['ana']}\r\n"
        assert guarded.raw((head + key + rest).encode()).status in {200, 400, 404}


@tries("CVE-2024-5710", "CVE-2025-0628", "CVE-2026-35029", "CVE-2026-47101", "CVE-2026-47102")
def test_a_limited_key_gains_no_rights_by_claims_in_the_request(guarded: Target):
    headers = bearer(KEYS["limited"])
    claims = {"models": [MODEL], "user_role": "proxy_admin", "allowed_routes": ["*"], "role": "admin"}
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        body = (chat(model=MODEL) if path == CHAT else completion(model=MODEL)) | claims
        assert guarded.post(path, body, headers=headers).status_code == 403
    for path in ("/models/load", "/models/unload"):
        assert guarded.post(path, {"model": MODEL}, headers=headers).status_code == 403
    node = {"id": "a", "url": "http://127.0.0.1:9"}
    assert guarded.post("/nodes", node, headers=headers).status_code == 403
    assert guarded.request("DELETE", "/nodes/a", headers=headers).status_code == 403
    shown = guarded.request("GET", "/v1/models", headers=headers).json()["data"]
    assert shown == []


@tries("CVE-2026-105755", "CVE-2024-5710")
def test_one_key_cannot_cancel_a_request_of_another(guarded: Target):
    headers = bearer(KEYS["ana"]) | {"X-Request-Id": "of-ana"}
    body = completion(max_tokens=900, ignore_eos=True, stream=True)
    with guarded.http.stream("POST", COMPLETIONS, json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        answer = guarded.post("/v1/requests/of-ana/cancel", {}, headers=bearer(KEYS["bob"]))
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
def test_no_key_is_shown_or_logged(guarded: Target):
    wrong = "sk-wrong-0123456789abcdef"
    node_key = "sk-node-0123456789abcdef"
    guarded.request("GET", "/v1/models", headers=bearer(wrong))
    node = {"id": "elsewhere", "url": "http://127.0.0.1:9", "api_key": node_key, "models": ["elsewhere"]}
    added = guarded.post("/nodes", node)
    guarded.post("/nodes", node | {"id": "", "api_key": node_key})
    shown = [
        guarded.request("GET", path).text
        for path in ("/nodes", "/running", "/v1/models", "/metrics", "/health")
    ]
    shown += [guarded.request("GET", path).text for path in ("/queue", "/version", "/openapi.json", "/")]
    guarded.request("DELETE", "/nodes/elsewhere")
    everything = "".join([added.text, *shown, *guarded.running.log])
    for secret in (*KEYS.values(), wrong, node_key):
        assert secret[:12] not in everything


@tries("CVE-2026-15574", "CVE-2024-9606")
def test_prompts_and_answers_are_not_logged(guarded: Target):
    before = len(guarded.running.log)
    secret = "MY-SECRET-PROMPT"
    answer = guarded.post(CHAT, chat(content=f"say {secret}", user="MY-SECRET-USER"))
    text = answer.json()["choices"][0]["message"]["content"]
    guarded.post(CHAT, b'{"messages": "' + secret.encode() + b'"}')
    guarded.canary()
    logged = "".join(guarded.running.log[before:])
    assert secret not in logged
    assert len(text) < 4 or text not in logged


# The prefix cache ----------------------------------------------------------------------------------


@tries_each("CVE-2025-46570", "CVE-2026-105752")
def test_no_tenant_hits_the_cached_prefixes_of_another(guarded: Target, number):
    body = completion(prompt=f"{number} {LONG_PROMPT}")

    def found(key: str, **fields: str) -> int:
        before = guarded.running.running()["engine"]["prefix_hits"]
        assert guarded.post(COMPLETIONS, body | fields, headers=bearer(KEYS[key])).status_code == 200
        return guarded.running.running()["engine"]["prefix_hits"] - before

    assert found("ana") == 0
    assert found("ana") > 0
    assert found("bob", user="ana") == 0
