"""Peers' routes that load models, transfer files or run code do not exist here; names are not paths."""

import pytest

from advisories.target import CHAT, HEAD, MODEL, Target, chat
from advisories.tries import tries, tries_each

# Method, path, and the advisories about that route of a peer.
ROUTES = {
    # SGLang
    "POST /update_weights_from_tensor": ["CVE-2025-10164", "CVE-2026-86793"],
    "POST /update_weights_from_disk": ["CVE-2026-15976"],
    "POST /load_lora_adapter_from_tensors": ["CVE-2026-15969"],
    "POST /init_weights_send_group_for_remote_instance": ["CVE-2026-15978"],
    "POST /send_weights_to_remote_instance": ["CVE-2026-15978"],
    "GET /server_info": ["CVE-2026-15977"],
    "POST /v1/images/edits": ["CVE-2026-7302"],
    "POST /v1/videos": ["CVE-2026-7302"],
    "POST /v1/rerank": ["CVE-2026-5760"],
    # Ollama
    "POST /api/pull": ["CVE-2024-37032", "CVE-2025-1975", "CVE-2025-51471", "CVE-2026-15685"],
    "POST /api/push": ["CVE-2024-39722", "CVE-2024-37032"],
    "POST /api/create": ["CVE-2024-39719", "CVE-2024-39720", "CVE-2024-39721", "CVE-2026-7482"],
    "POST /api/create?quantize=q4_0": ["CVE-2026-5757"],
    "POST /api/blobs/sha256:../../../../etc/passwd": ["CVE-2024-37032", "CVE-2026-7020"],
    "DELETE /api/delete": ["CVE-2025-44779", "CVE-2025-63389"],
    "POST /api/copy": ["CVE-2025-63389"],
    # llama.cpp
    "POST /slots/0?action=restore": ["CVE-2026-43629"],
    "POST /rerank": ["CVE-2026-52132"],
    "POST /infill": ["CVE-2026-43632"],
    "POST /apply-template": ["CVE-2026-43632"],
    # vLLM
    "POST /invocations": ["CVE-2026-22778"],
    "POST /score": ["CVE-2026-105755"],
    "POST /pooling": ["CVE-2026-93592"],
    "POST /v1/completions/derender": ["CVE-2026-71486"],
    "POST /v1/chat/completions/derender": ["CVE-2026-71486"],
    "POST /inference/v1/generate": ["CVE-2026-100651"],
    # LiteLLM
    "POST /config/update": ["CVE-2024-5751", "CVE-2026-35029"],
    "POST /model/new": ["CVE-2024-5751"],
    "POST /team/update": ["CVE-2024-4890", "CVE-2024-5710"],
    "GET /global/spend/logs": ["CVE-2024-5225"],
    "POST /key/generate": ["CVE-2026-47101", "GHSA-7hp6-4w63-5g45"],
    "POST /key/block": ["CVE-2025-45809"],
    "POST /user/update": ["CVE-2026-47102"],
    "GET /user/info": ["GHSA-69x8-hrgq-fjj8"],
    "GET /users/list": ["CVE-2025-0628"],
    "GET /get_image": ["CVE-2024-4889"],
    "POST /guardrails/test_custom_code": ["CVE-2026-40217", "CVE-2026-59821"],
    "POST /prompts/test": ["CVE-2026-42203"],
    "POST /mcp-rest/test/connection": ["CVE-2026-42271", "CVE-2026-30623"],
    "POST /mcp": ["CVE-2026-59822"],
    "POST /health/test_connection": ["CVE-2026-59819"],
    "POST /utils/transform_request": ["GHSA-g5ff-637f-6q2m"],
    "POST /v1/skills": ["CVE-2026-59820"],
    "GET /sso/debug/callback": ["GHSA-hhww-mrg2-969h"],
    # Ray
    "POST /api/jobs/": ["CVE-2023-48022", "CVE-2025-62593"],
    "DELETE /api/serve/applications/": ["CVE-2026-27482"],
    "GET /worker/cpu_profile?pid=1;touch%20x": ["CVE-2023-6019"],
    "GET /log_proxy?url=http://127.0.0.1:9": ["CVE-2023-48023"],
    "GET /api/v0/logs/file?filename=../../../../etc/passwd": ["CVE-2023-6021"],
    "GET /static/js/../../../../../../etc/passwd": ["CVE-2023-6020", "CVE-2026-32981"],
    # LightLLM, Mooncake
    "POST /pause_generation": ["CVE-2026-103270"],
    "POST /flush_cache": ["CVE-2026-103270"],
    "POST /init_weights_update_group": ["CVE-2026-103270"],
    "PUT /metadata?key=a": ["CVE-2026-103765"],
    # Triton Inference Server
    "POST /v2/logging": ["CVE-2024-0087"],
    "POST /v2/trace/setting": ["CVE-2024-0100"],
    "POST /v2/repository/models/..%2f..%2fetc/load": ["CVE-2023-31036", "CVE-2025-23316"],
    "POST /v2/systemsharedmemory/region/a/register": ["CVE-2024-0088", "CVE-2025-23320", "CVE-2025-23329"],
}  # fmt: skip
NUMBERS = sorted({number for numbers in ROUTES.values() for number in numbers})
TRAVERSALS = [
    "../../../../../../etc/passwd",
    "..%2f..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "..%252f..%252fetc%252fpasswd",
    "..\\..\\etc\\passwd",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "....//....//etc/passwd",
    "vendor/../../pages.py",
    "../pages.py",
    "CON.txt",
    "passwd%00.js",
]


@tries_each(*NUMBERS)
def test_vulnerable_route_of_a_peer_does_not_exist(server: Target, number):
    for route, numbers in ROUTES.items():
        if number in numbers:
            method, _, path = route.partition(" ")
            answer = server.raw(f"{method} {path} {HEAD}Content-Length: 2\r\n\r\n{{}}".encode())
            if path.startswith("/api/"):  # as in Ollama, errors have only a message
                assert answer.status in {404, 501}, (route, answer)
                assert answer.error.endswith(("such route", "configuration has its models"))
                continue
            assert answer.status in {400, 404}, (route, answer)
            assert answer.error["code"] in {"not_found", "invalid_request"}


@tries("CVE-2023-6020", "CVE-2023-6021", "CVE-2026-32981", "CVE-2024-49766", "CVE-2026-21860")
@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leaves_the_folder_of_the_dashboard(server: Target, path):
    for prefix in ("/dashboard/", "/dashboard/vendor/", "/", "/v1/models/"):
        answer = server.raw(f"GET {prefix}{path} {HEAD}\r\n".encode())
        assert answer.status in {400, 404}
        assert b"root:" not in answer.body
        assert b"import" not in answer.body


@tries(
    "CVE-2024-37032", "CVE-2024-39719", "CVE-2024-39721", "CVE-2024-39722", "CVE-2026-7020", "CVE-2023-31036"
)
def test_model_name_is_not_a_path_and_discloses_no_file(server: Target):
    def responses(name: str) -> list[str]:
        answers = [
            server.post(CHAT, chat(model=name)),
            server.post("/tokenize", {"model": name, "prompt": "a"}),
            server.post("/models/load", {"model": name}),
            server.post("/models/unload", {"model": name}),
            server.post("/api/show", {"model": name}),
            server.post("/api/generate", {"model": name}),
        ]
        assert {answer.status_code for answer in answers} == {404}
        created = {"name": "a", "path": name, "modelfile": f"FROM {name}"}
        assert server.http.post("/api/create", json=created).status_code == 501
        return [answer.text.replace(name, "NAME") for answer in answers]

    of_no_file = responses("/etc/no-such-file")
    for path in (
        "/etc/passwd",
        "../../etc/passwd",
        "/dev/random",
        "/dev/zero",
        "/",
        f"{MODEL}/../{MODEL}",
        "sha256:" + "0" * 64,
    ):
        assert responses(path) == of_no_file
