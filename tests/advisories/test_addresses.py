"""No request makes the server connect to an address that the request contains."""

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from advisories.target import CHAT, COMPLETIONS, Target, chat, completion
from advisories.tries import tries

SSRF_BY_MEDIA = (
    "CVE-2025-6242",  # vLLM
    "CVE-2026-24779",
    "CVE-2026-25960",
    "CVE-2026-34753",
    "CVE-2026-73560",
    "GHSA-p6g9-7v3x-m8mv",
    "CVE-2026-15974",  # SGLang
    "CVE-2026-0599",  # TGI
    "CVE-2026-63086",
    "CVE-2026-33626",  # LMDeploy
    "CVE-2026-63764",
    "CVE-2026-103243",  # LightLLM
)
PARTS = ("image_url", "video_url", "audio_url", "input_audio", "input_image", "image", "file", "document")


class Listener:
    """A loopback port that should receive no connection."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/latest/meta-data"

    def urls(self) -> list[str]:
        """Return the address in forms on which URL parsers disagree."""
        at = f"127.0.0.1:{self.port}"
        return [
            self.url,
            f"http://allowed.example\\@{at}/",
            f"http://allowed.example@{at}/",
            f"//{at}/",
            f"ws://{at}/",
        ]

    def close(self) -> int:
        """Close the port and return the number of connections."""
        connected = 0
        with self._socket, contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
                connected += 1
        return connected


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    assert listener.close() == 0


def test_listener_counts_connections():
    listener = Listener()
    socket.create_connection(("127.0.0.1", listener.port)).close()
    assert listener.close() == 1


@tries(*SSRF_BY_MEDIA)
def test_no_url_in_a_content_part_is_fetched(server: Target, listener):
    for kind in PARTS:
        for url in [*listener.urls(), "file:///etc/passwd"]:
            part = {"type": kind, kind: {"url": url, "data": url, "file_url": url}, "url": url}
            server.refuses(CHAT, chat(content=[part]), "messages[0].content[0]")


@tries("CVE-2026-0599")
def test_no_link_in_a_text_is_fetched(server: Target, listener):
    text = f"Look: ![picture]({listener.url}) and <img src='{listener.url}'>"
    assert server.post(CHAT, chat(content=text)).status_code == 200
    assert server.post(COMPLETIONS, completion(prompt=text)).status_code == 200


@tries(
    "CVE-2024-6587",
    "CVE-2026-84377",
    "GHSA-hx8v-g79f-8w5f",
    "CVE-2026-42271",
    "CVE-2026-30623",
    "CVE-2026-94624",
)
@pytest.mark.parametrize(
    "field",
    ["api_base", "base_url", "url", "proxy", "user_config", "mcp_servers", "kv_transfer_params", "metadata"],
)
def test_no_address_in_a_field_is_connected_to(server: Target, listener, field):
    for value in (
        listener.url,
        {"api_base": listener.url, "url": listener.url, "model_list": [{"api_base": listener.url}]},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": listener.port},
        [{"transport": "sse", "url": listener.url, "command": "curl", "args": [listener.url]}],
    ):
        server.refuses_or_ignores(**{field: value})


@tries("CVE-2023-48023", "CVE-2024-6587", "CVE-2026-48710")
def test_no_address_in_a_header_is_connected_to(server: Target, listener):
    at = f"127.0.0.1:{listener.port}"
    names = (
        "X-Forwarded-Host",
        "X-Forwarded-For",
        "Forwarded",
        "X-Original-URL",
        "X-Rewrite-URL",
        "Destination",
    )
    headers = dict.fromkeys(names, at) | {"Referer": listener.url, "X-Api-Base": listener.url}
    assert server.post(COMPLETIONS, completion(), headers=headers).status_code == 200
    absolute = f"GET http://{at}/ HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n"
    assert server.raw(absolute.encode()).status in {200, 400, 403, 404}


@tries("CVE-2026-5530", "CVE-2024-37032", "CVE-2025-51471")
def test_no_registry_is_queried_for_a_model_that_a_request_names(server: Target, listener):
    at = f"127.0.0.1:{listener.port}"
    for name in (f"{at}/library/evil", f"http://{at}/evil", f"hf.co@{at}/evil", "org/name", "org/name@main"):
        assert server.post(CHAT, chat(model=name)).status_code == 404
        assert server.post("/models/load", {"model": name}).status_code == 404
        assert server.http.post("/api/pull", json={"name": name, "insecure": True}).status_code == 501


@tries("CVE-2026-59819", "GHSA-g5ff-637f-6q2m")
@pytest.mark.parametrize(
    "reference",
    ["os.environ/HOME", "${env.HOME}", "oidc/file//etc/passwd", "file:///etc/passwd", "/proc/self/environ"],
)
def test_no_reference_to_a_file_or_a_variable_is_resolved(server: Target, server_home, reference):
    server.refuses_or_ignores(api_key=reference, vertex_ai_credentials=reference)
    response = server.post(CHAT, chat(model=reference)).text
    response += server.post("/nodes", {"id": "a", "url": reference}).text
    response += server.post(
        "/nodes", {"id": reference, "url": "http://127.0.0.1:9", "api_key": reference}
    ).text
    for node in json.loads(server.request("GET", "/nodes").text):
        if node["id"] == reference:
            server.request("DELETE", f"/nodes/{reference}")
    assert str(server_home) not in response
    assert "root:" not in response
