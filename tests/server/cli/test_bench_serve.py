"""`fairlead bench` against a server with known answers."""

import json
import subprocess
import sys

import pytest
import trio

from fairlead.server.cli import main
from server.cli.terminal import Terminal


def load(server, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairlead", "bench", "--url", server.url, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_every_level_is_measured_and_written(server, tmp_path):
    result, plot = tmp_path / "result.json", tmp_path / "plot.png"
    options = "--streams 1,3 --requests 6 --warmup 1 --prompt-tokens 12 --output-tokens 2 --tenants 2"
    run = load(server, *options.split(), "--json", str(result), "--plot", str(plot))
    assert (run.returncode, run.stderr) == (0, "")
    assert "generator CPU" in run.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")

    document = json.loads(result.read_bytes())
    assert [level["streams"] for level in document["levels"]] == [1, 3]
    for level in document["levels"]:
        assert (level["requests"], level["output_tokens"], level["errors"]) == (6, 12, {})
        assert (level["prompt_tokens_mean"], level["tokens_counted_by"]) == (5.0, "usage")
        assert level["generator_cpu"] > 0
        assert round(sum(level["tokens_by_second"])) == 12
        for name in ("time_to_first_token_ms", "end_to_end_ms"):
            assert 0 < level[name]["p50"] <= level[name]["p90"] <= level[name]["p99"]


def test_prompts_have_the_requested_length_and_share_no_prefix(server):
    assert load(server, *["--streams=1", "--requests=4", "--prompt-tokens=12", "--tenants=2"]).returncode == 0
    prompts = [body["messages"][0]["content"].split() for body in server.bodies]
    assert {len(words) for words in prompts} == {10}  # the fake server adds two tokens of its own
    assert len({tuple(words[:4]) for words in prompts}) == len(prompts) == 5
    assert {body["user"] for body in server.bodies} == {"tenant-0", "tenant-1"}


def test_same_seed_sends_the_same_prompts(server):
    for seed in ("1", "1", "2"):
        load(server, "--streams=1", "--requests=1", "--warmup=0", "--endpoint=completions", "--seed", seed)
    one, again, other = (body["prompt"] for body in server.bodies)
    assert one == again != other


@pytest.mark.parametrize("ignores_eos", [True, False])
def test_each_option_reaches_the_requests(server, ignores_eos):
    options = ["--streams=1", "--requests=1", "--output-tokens=7", "--api-key=sk-1"]
    load(server, "second", *options, "--ignore-eos" if ignores_eos else "--no-ignore-eos")
    assert {("second", 7, ignores_eos)} == {
        (body["model"], body["max_tokens"], body.get("ignore_eos", False)) for body in server.bodies
    }
    assert server.keys == {"Bearer sk-1"}


def test_level_starts_no_request_after_its_time_limit(server, tmp_path):
    result = tmp_path / "result.json"
    options = ["--streams=1", "--requests=300", "--prompt-tokens=12", "--warmup=0", "--duration=0.001"]
    assert load(server, *options, "--json", str(result)).returncode == 0
    assert 0 < json.loads(result.read_bytes())["levels"][0]["requests"] < 300


def test_answer_after_the_timeout_is_an_error(server, tmp_path):
    result = tmp_path / "result.json"
    server.pauses = True
    options = ["--streams=1", "--requests=1", "--warmup=0", "--timeout=0.2", "--json", str(result)]
    assert load(server, *options).returncode == 1
    (errors,) = [level["errors"] for level in json.loads(result.read_bytes())["levels"]]
    assert sum(errors.values()) == 1


def test_reasoning_and_tool_calls_are_output():
    from fairlead.server.load.client import TimedAnswer, _EventReader

    deltas = (
        '{"reasoning_content": "a"}',
        '{"reasoning": "b"}',
        '{"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}',
        '{"role": "assistant", "content": "", "tool_calls": []}',
    )
    answer = TimedAnswer(started_s=0.0)

    async def read() -> None:
        reader = _EventReader(answer)
        for delta in deltas:
            reader.feed(f'data: {{"choices": [{{"delta": {delta}}}]}}\n\n'.encode())

    trio.run(read)
    assert answer.output_tokens == 3


def test_refusals_are_counted_by_status(server, tmp_path):
    result = tmp_path / "result.json"
    server.refusing = 429
    run = load(server, "--streams", "2", "--json", str(result))
    assert (run.returncode, run.stderr) == (1, "")
    assert json.loads(result.read_bytes())["levels"][0]["errors"] == {"429": 8}
    assert run.stdout.endswith("The first error: 429: no: 429\n")


@pytest.mark.parametrize("code", ["rate_limited", "budget_exceeded", "rate_limit_exceeded"])
def test_refusal_of_a_key_whose_limit_is_used_up_ends_the_test(server, code):
    server.refusing, server.refusal_code = 429, code
    run = load(server, "--streams", "2", "--requests", "50", "--warmup", "0")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"fairlead: {server.url}: 429: no: 429\n"
    assert len(server.bodies) <= 2


def test_server_without_models_is_reported_in_one_line(server):
    server.models = []
    run = load(server)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"fairlead: {server.url}: models: the server has none\n"


def test_bad_streams_are_bad_usage(server):
    run = load(server, "--streams", "1,x")
    assert (run.returncode, run.stdout) == (2, "")
    assert "--streams" in run.stderr


def test_terminal_shows_a_progress_bar_which_is_removed_at_the_end(server):
    with Terminal(["bench", "--url", server.url, "--streams", "1", "--requests", "3"]) as terminal:
        assert "4/4" in terminal.expect("Times are p50")
        assert terminal.wait() == 0


def test_invalid_address_is_bad_usage():
    run = subprocess.run(
        [sys.executable, "-m", "fairlead", "bench", "--url", "localhost"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert "--url" in run.stderr


def test_invalid_list_of_models_is_reported_in_one_line(server):
    server.texts = {"/v1/models": ["<html>"]}
    run = load(server)
    message = f"fairlead: {server.url}: the answer to /v1/models is not a list of models\n"
    assert (run.returncode, run.stderr) == (1, message)


def test_list_of_models_after_the_timeout_is_reported_in_one_line(server, capsys, monkeypatch):
    server.texts = {"/v1/models": ["", "{}"]}  # the second piece is sent when released
    monkeypatch.setattr("fairlead.server.load.generator.CONTROL_TIMEOUT_S", 0.2)
    assert main(["bench", "--url", server.url]) == 1
    assert capsys.readouterr().err.startswith(f"fairlead: {server.url}: no answer within ")


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusal_that_every_request_would_get_ends_the_test_and_is_printed(server, status):
    server.refusing = status
    run = load(server, "--streams", "2", "--requests", "50", "--warmup", "0")
    assert (run.returncode, run.stdout) == (1, "")
    hint = " (--api-key or FAIRLEAD_API_KEY gives a key)" if status == 401 else ""
    assert run.stderr == f"fairlead: {server.url}: {status}: no: {status}{hint}\n"
    assert len(server.bodies) <= 2
