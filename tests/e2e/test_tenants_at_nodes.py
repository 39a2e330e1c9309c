"""A Fairlead as a node keeps the tenants of the server apart that relays to it, as a replica does."""

import json
from pathlib import Path
from typing import Any

import httpx

from e2e.real_server import TIMEOUT_S, configured, real_server, until

MODEL = "fairlead-demo"
SAID = "turn seat queue node line " * 20


def post(url: str, path: str, key: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{path}", json={"model": MODEL, **body}, headers=headers, timeout=TIMEOUT_S)


def test_prompts_and_responses_at_a_node_are_of_the_tenants_in_front_of_it(tmp_path: Path):
    node_keys = [{"key": "at-node", "trusted": True}]
    with real_server(*configured(tmp_path, {}, apiKeys=node_keys)) as node:
        settings = {
            "apiKeys": [{"key": "ana", "user": "ana"}, {"key": "eve", "user": "eve"}],
            "nodes": [{"id": "node", "url": node.url, "apiKey": "at-node"}],
        }
        file = tmp_path / "front.yaml"
        file.write_text(json.dumps(settings))
        with real_server("--config", str(file)) as server:
            until(lambda: post(server.url, "/v1/completions", "ana", {"prompt": "a"}).status_code == 200)
            found = {}
            # Eve's body names ana, under every name that the node might know her by.
            for who in ("ana", "eve", "eve as ana", "ana again"):
                body = {"prompt": SAID, "max_tokens": 1, **({"user": "ana"} if "as" in who else {})}
                usage = post(server.url, "/v1/completions", who[:3], body).json()["usage"]
                found[who] = usage["prompt_tokens_details"]["cached_tokens"]
            kept = post(server.url, "/v1/responses", "ana", {"input": "hi", "max_output_tokens": 1}).json()
            follows = {"input": "go on", "max_output_tokens": 1, "previous_response_id": kept["id"]}
            statuses = [
                post(server.url, "/v1/responses", key, follows | more).status_code
                for key, more in (("eve", {}), ("eve", {"user": "ana"}), ("ana", {}))
            ]
    assert [found["ana"], found["eve"]] == [0, 0]
    assert found["ana again"] >= 16
    assert found["eve as ana"] == found["ana again"], "she finds only what she has sent herself"
    assert statuses == [400, 400, 200]
