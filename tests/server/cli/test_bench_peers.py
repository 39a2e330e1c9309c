"""`bench/peers.py` and its load, against servers with known answers."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import peer_load
from fairlead.server.load import client
from fairlead.server.load.client import ReportedUsage, TimedAnswer

BENCH = Path(peer_load.__file__).parent


@pytest.fixture
def model(tmp_path):
    """Return a folder with a tokenizer for the load: each letter is a token, and so is one word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "i"), ("m", "e"), ("ti", "me")]
    tokens = [*letters, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(server, model, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "peer_load.py"), server.url, str(model), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_prompts_have_exactly_the_requested_length_and_share_no_prefix(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = peer_load.make_prompts(model, 20, tokens=33, seed="1")
    assert {len(tokenizer.encode(prompt).ids) for prompt in prompts} == {33}
    assert len({prompt[:25] for prompt in prompts}) == 20
    assert prompts == peer_load.make_prompts(model, 20, tokens=33, seed="1")
    assert set(prompts).isdisjoint(peer_load.make_prompts(model, 20, tokens=33, seed="2"))


def test_level_counts_only_requests_after_the_warm_up(server, model):
    run = load(server, model, "--streams=3", "--requests=6", "--prompt-tokens=5", "--output-tokens=2")
    level = json.loads(run.stdout)
    assert (len(server.bodies), level["requests"], level["output_tokens"], level["errors"]) == (9, 6, 12, {})
    assert len({body["prompt"] for body in server.bodies}) == 9
    assert {body["model"] for body in server.bodies} == {"first"}


@pytest.mark.parametrize("option", ["--prompt-tokens=6", "--output-tokens=64"])
def test_answer_with_another_number_of_tokens_than_requested_is_an_error(server, model, option):
    run = load(server, model, "--prompt-tokens=5", "--output-tokens=2", option)
    level = json.loads(run.stdout)
    assert (level["output_tokens"], level["errors"]) == (0, {"(5, 2) tokens in and out": 3})


def test_tokenizer_that_cannot_make_prompts_of_an_exact_length_is_refused(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("a $0 z", special_tokens=[("a", 0), ("z", 1)])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(RuntimeError, match="does not count 12 tokens"):
        peer_load.make_prompts(model, 1, tokens=12, seed="1")


def test_answer_without_a_token_count_is_an_error():
    assert peer_load.checked(TimedAnswer(0.0), (5, 2)).error
    assert (
        peer_load.checked(TimedAnswer(0.0, usage=ReportedUsage(5, 2), error="timeout"), (5, 2)).error
        == "timeout"
    )
    assert peer_load.checked(TimedAnswer(0.0, usage=ReportedUsage(5, 2)), (5, 2)).error is None


def test_request_body_is_adapted_to_the_peer(server, model):
    server.models = []  # a peer which serves one model and lists none
    patch = json.dumps({"ignore_eos": None, "generation_config": "{}"})
    load(server, model, "--requests=1", "--body", patch)
    for body in server.bodies:
        assert body["generation_config"] == "{}"
        assert {"model", "ignore_eos"}.isdisjoint(body)
        assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 64, True)


def test_answer_may_end_with_finish_reason_instead_of_done():
    chunk = {"choices": [{"text": "", "finish_reason": None}], "usage": {"completion_tokens": 2}}
    reader = client._EventReader(TimedAnswer(0.0))
    reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    with pytest.raises(client.RequestFailedError, match="finish_reason"):
        reader.finish()
    chunk["choices"][0]["finish_reason"] = "length"
    reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    reader.finish()


def test_server_that_does_not_start_is_reported_with_its_last_line(model, tmp_path):
    arguments = ["python", "-c", "import sys; sys.exit('no such flag')"]
    command = [sys.executable, str(BENCH / "peers.py"), str(model), "--ours", shlex.join(arguments)]
    run = subprocess.run(
        [*command, "--rounds=0", "--json", str(tmp_path / "peers.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1
    problem = json.loads((tmp_path / "peers.json").read_text())["problems"]["fairlead"]
    assert "ended with 1" in problem
    assert problem.endswith("no such flag")


def test_body_patch_for_an_unknown_server_is_bad_usage():
    command = [sys.executable, str(BENCH / "peers.py"), "nowhere", "--body", "unknown={}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert "no server is called unknown" in run.stderr
