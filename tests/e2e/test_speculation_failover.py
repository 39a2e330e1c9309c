"""A node dies in the middle of answers, and another one goes on with them, with drafts or without."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from e2e.own_copy import own_copy
from e2e.real_server import RealServer, configured, real_server, until
from e2e.test_failover import NUMBERS, Stream, retries

DRAFTS: dict[str, object] = {"speculation": {"ngram": 1, "drafts": 2}}
PLAIN: dict[str, object] = {}
PROMPT = "one two three four one two three four one two three four one two"
LONG = {"model": "fairlead-demo", "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
SHAPED = {"model": "fairlead-demo", "prompt": PROMPT, "max_tokens": 6000, "temperature": 1, "seed": 3}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": LONG | {"temperature": 0},
    "seeded": LONG | {"temperature": 1.2, "seed": 7, "frequency_penalty": 0.1},
    "constrained": SHAPED | {"structured_outputs": {"json": NUMBERS}},
}


def node_of(stack: ExitStack, folder: Path, name: str, model: dict[str, object]) -> RealServer:
    (folder / name).mkdir()
    model = {"path": str(folder / "model"), "slots": 8, **model}
    return stack.enter_context(real_server(*configured(folder / name, model)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(DRAFTS, PLAIN, id="drafts, then none", marks=pytest.mark.slow),
        pytest.param(PLAIN, DRAFTS, id="none, then drafts", marks=pytest.mark.nightly),
        pytest.param(DRAFTS, DRAFTS, id="drafts on both", marks=pytest.mark.nightly),
    ],
)
def test_answer_goes_on_identically_on_another_node(tmp_path, first, second):
    own_copy(tmp_path / "model", max_position_embeddings=20_000)
    with ExitStack() as stack:
        dying, living = (
            node_of(stack, tmp_path, name, model) for name, model in (("a", first), ("b", second))
        )
        nodes = [
            {"id": name, "url": server.url, "seats": 6} for name, server in (("a", dying), ("b", living))
        ]
        file = tmp_path / "fairlead.yaml"
        file.write_text(json.dumps({"nodes": nodes}))
        router = stack.enter_context(real_server("--config", str(file)))
        until(lambda: [one["state"] for one in router.http.get("/nodes").json()] == ["up", "up"])
        expected = {name: Stream().read(living, body).text() for name, body in BODIES.items()}
        begun: list[None] = []
        # Twice as many as there are kinds, so that each node has several.
        with ThreadPoolExecutor(2 * len(BODIES)) as pool:
            runs = [
                (name, pool.submit(Stream(begun_at=3).read, router, body, lambda: begun.append(None)))
                for name, body in BODIES.items()
                for _ in range(2)
            ]
            until(lambda: len(begun) == len(runs))
            child = dying.child_pid()
            os.kill(child, signal.SIGSTOP)
            counts = dying.running()
            dying.process.kill()
            os.kill(child, signal.SIGKILL)
            streams = [(name, run.result()) for name, run in runs]
        assert counts["sequences"] >= 2, "the answers were too short"
        assert [stream.text() for _, stream in streams] == [expected[name] for name, _ in streams]
        assert all(stream.lines[-1] == "data: [DONE]" for _, stream in streams)
        assert retries(router) == counts["sequences"]
        assert (living.running()["engine"]["draft_tokens"] > 0) == (second is DRAFTS)
        assert (counts["engine"]["draft_tokens"] > 0) == (first is DRAFTS)
