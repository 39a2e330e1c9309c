"""`bench/peers.py` and its load, against servers whose answers are known."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import peer_load
from fairlead.load import client
from fairlead.load.client import Answer, Usage

BENCH = Path(peer_load.__file__).parent


@pytest.fixture
def model(tmp_path):
    """A folder with as much of a model as the load needs: letters are tokens, and one word is."""
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


def test_prompts_have_exactly_the_wished_length_and_share_no_beginning(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = peer_load.make_prompts(model, 20, tokens=33, seed="1")
    assert {33} == {len(tokenizer.encode(prompt).ids) for prompt in prompts}
    assert 20 == len({prompt[:25] for prompt in prompts})
    assert prompts == peer_load.make_prompts(model, 20, tokens=33, seed="1")
    assert set(prompts).isdisjoint(peer_load.make_prompts(model, 20, tokens=33, seed="2"))


def test_a_level_counts_only_what_came_after_the_warm_up(server, model):
    run = load(server, model, "--streams=3", "--requests=6", "--prompt-tokens=5", "--output-tokens=2")
    level = json.loads(run.stdout)
    assert (9, 6, 12, {}) == (len(server.bodies), level["requests"], level["output_tokens"], level["errors"])
    assert 9 == len({body["prompt"] for body in server.bodies})
    assert {"first"} == {body["model"] for body in server.bodies}


@pytest.mark.parametrize("lie", ["--prompt-tokens=6", "--output-tokens=64"])
def test_an_answer_of_other_tokens_than_were_asked_for_is_an_error(server, model, lie):
    run = load(server, model, "--prompt-tokens=5", "--output-tokens=2", lie)
    level = json.loads(run.stdout)
    assert (0, {"(5, 2) tokens in and out": 3}) == (level["output_tokens"], level["errors"])


def test_a_tokenizer_that_cannot_be_cut_is_refused(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("a $0 z", special_tokens=[("a", 0), ("z", 1)])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(RuntimeError, match="does not count 12 tokens"):
        peer_load.make_prompts(model, 1, tokens=12, seed="1")


def test_an_answer_whose_tokens_nobody_counted_is_an_error():
    assert peer_load.checked(Answer(0.0), (5, 2)).error
    assert peer_load.checked(Answer(0.0, usage=Usage(5, 2), error="timeout"), (5, 2)).error == "timeout"
    assert peer_load.checked(Answer(0.0, usage=Usage(5, 2)), (5, 2)).error is None


def test_a_peer_is_asked_in_its_own_way(server, model):
    server.models = []  # one that serves what it was started with, and lists nothing
    patch = json.dumps({"ignore_eos": None, "generation_config": "{}"})
    load(server, model, "--requests=1", "--body", patch)
    for body in server.bodies:
        assert "{}" == body["generation_config"]
        assert {"model", "ignore_eos"}.isdisjoint(body)
        assert (0, 64, True) == (body["temperature"], body["max_tokens"], body["stream"])


def test_an_answer_may_end_with_its_reason_instead_of_done():
    chunk = {"choices": [{"text": "", "finish_reason": None}], "usage": {"completion_tokens": 2}}
    reader = client._EventReader(Answer(0.0))
    reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    with pytest.raises(client.RequestFailedError, match="finish_reason"):
        reader.finish()
    chunk["choices"][0]["finish_reason"] = "length"
    reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    reader.finish()


def test_a_server_that_does_not_start_is_reported_with_its_last_words(model, tmp_path):
    words = ["python", "-c", "import sys; sys.exit('no such flag')"]
    command = [sys.executable, str(BENCH / "peers.py"), str(model), "--ours", shlex.join(words)]
    run = subprocess.run(
        [*command, "--rounds=0", "--json", str(tmp_path / "peers.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert 1 == run.returncode
    problem = json.loads((tmp_path / "peers.json").read_text())["problems"]["fairlead"]
    assert "ended with 1" in problem
    assert problem.endswith("no such flag")


def test_a_way_of_asking_needs_its_server():
    command = [sys.executable, str(BENCH / "peers.py"), "nowhere", "--body", "stranger={}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert 2 == run.returncode
    assert "no server is called stranger" in run.stderr
