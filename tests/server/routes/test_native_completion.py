"""llama.cpp's POST /completion: what this dialect has alone. The rules of all are in `test_dialects`."""

import json

import pytest

from fairlead.base.job import Delta, TokenLogprob
from fairlead.dialects.llama_cpp.completion import NativeReader
from fake_fleet import FakeFleet
from server.routes import remote_responses

COMPLETION = "/completion"


async def test_whole_answer_has_llama_cpps_members(client, model):
    reply = await client.post(COMPLETION, {"prompt": "hello", "seed": 7, "stop": ["x"], "temperature": 0.5})
    answer = reply.json
    assert set(answer) == {
        *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
        *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word"),
        *("tokens_cached", "timings"),
    }
    assert (answer["content"], answer["tokens"], answer["stop"]) == ("Hello world", [], True)
    assert (answer["prompt"], answer["model"]) == ("hello", "small")
    assert answer["tokens_predicted"] == 4
    assert answer["tokens_evaluated"] == len(model.encode_prompt("hello"))
    assert (answer["stop_type"], answer["stopping_word"]) == ("eos", "")
    assert (answer["has_new_line"], answer["truncated"]) == (False, False)
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["stop"], settings["temperature"]) == (7, ["x"], 0.5)
    assert (settings["n_predict"], settings["top_k"], settings["stream"]) == (-1, 20, False)  # the model's
    assert answer["timings"]["predicted_n"] == 4


async def test_stream_has_pieces_and_ends_without_a_mark(client):
    reply = await client.post(COMPLETION, {"prompt": "hello", "stream": True})
    first, second, third, last = map(json.loads, reply.events)
    assert first == {
        "index": 0,
        "content": "Hello",
        "tokens": [10],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 1,
        "tokens_evaluated": 1,
    }
    assert (second["content"], second["tokens"], second["tokens_predicted"]) == (" world", [11, 12], 3)
    assert (third["content"], third["tokens"], third["tokens_predicted"]) == ("", [0], 4)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "eos")
    assert last["generation_settings"]["stream"]
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize(
    ("ended", "stop_type", "word"),
    [
        ({"finish_reason": "stop"}, "eos", ""),
        ({"finish_reason": "stop", "stop_reason": 5}, "eos", ""),
        ({"finish_reason": "stop", "stop_reason": "\n\n"}, "word", "\n\n"),
        ({"finish_reason": "length"}, "limit", ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_end_says_why(client, ended, stop_type, word, stream):
    client.gateway.script = lambda _job: [[Delta(0, "a\nb", [1], **ended)]]
    reply = await client.post(COMPLETION, {"prompt": "hello", "stream": stream})
    answer = json.loads(reply.events[-1]) if stream else reply.json
    assert (answer["stop_type"], answer["stopping_word"]) == (stop_type, word)
    assert answer["has_new_line"]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_have_an_answer_each(client, stream):
    reply = await client.post(COMPLETION, {"prompt": ["hello", "one two"], "stream": stream})
    answers = (
        [json.loads(event) for event in reply.events if b'"stop":true' in event] if stream else reply.json
    )
    assert [answer["index"] for answer in answers] == [0, 1]
    assert [answer["prompt"] for answer in answers] == ["hello", "one two"]


async def test_prompt_of_token_ids_is_shown_as_text(client, model):
    ids = model.encode_prompt("hello world")
    assert (await client.post(COMPLETION, {"prompt": ids})).json["prompt"] == "hello world"


async def test_token_ids_are_returned_on_request(client):
    reply = await client.post(COMPLETION, {"prompt": "hello", "return_tokens": True})
    assert reply.json["tokens"] == [10, 11, 12, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_n_probs_lists_tokens_with_their_alternatives(client, model, stream):
    def script(job):
        assert job.sampling.logprobs == 2
        listed = TokenLogprob(72, -0.5, ((72, -0.5), (73, float("-inf"))))
        return [[Delta(0, "h", [72], [listed], finish_reason="stop")]]

    client.gateway.script = script
    reply = await client.post(COMPLETION, {"prompt": "hello", "n_probs": 2, "stream": stream})
    answer = json.loads(reply.events[0]) if stream else reply.json
    [entry] = answer["completion_probabilities"]
    text = model.tokenizer.token(72)
    assert (entry["id"], entry["token"], entry["bytes"], entry["logprob"]) == (
        72,
        text,
        list(text.encode()),
        -0.5,
    )
    assert [one["id"] for one in entry["top_logprobs"]] == [72, 73]
    assert entry["top_logprobs"][1]["logprob"] == -9999


async def test_n_predict_of_zero_only_computes_the_prompt(client):
    for stream in (False, True):
        reply = await client.post(COMPLETION, {"prompt": "hello", "n_predict": 0, "stream": stream})
        answer = json.loads(*reply.events) if stream else reply.json
        assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert {job.sampling.max_tokens for job in client.gateway.jobs} == {1}


@pytest.mark.parametrize("n_predict", [-1, -2, None])
async def test_negative_n_predict_is_no_limit(client, n_predict):
    await client.post(COMPLETION, {"prompt": "hello", "n_predict": n_predict})
    assert client.gateway.job.sampling.max_tokens == 4095


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[15, 1.5], [16, False]], {15: 1.5, 16: float("-inf")}),
        ({"15": -1, "16": False}, {15: -1.0, 16: float("-inf")}),
        ([], {}),
        (False, {}),
        (None, {}),
    ],
)
async def test_logit_bias_has_llama_cpps_forms(client, given, expected):
    reply = await client.post(COMPLETION, {"prompt": "hello", "logit_bias": given})
    assert reply.status == 200, reply.body
    assert client.gateway.job.sampling.logit_bias == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["hello", 5]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": True}, "logit_bias"),
        ({"logit_bias": [[15, True]]}, "logit_bias"),
        ({"logit_bias": [[15, 101]]}, "logit_bias"),
        ({"logit_bias": [["hello", 1]]}, "logit_bias[0][0]"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias"),
        ({"logit_bias": [[-1, 1]]}, "logit_bias"),
        ({"logit_bias": [[True, 1]]}, "logit_bias"),
        ({"logit_bias": [[1e300, 1]]}, "logit_bias"),
        ({"logit_bias": [[5]]}, "logit_bias[0]"),
        ({"logit_bias": [[99_999, 1]]}, "logit_bias"),
        ({"json_schema": {"type": "object"}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"grammar": 'root ::= ("a"'}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "json_schema.type"),
        ({"mirostat": 1}, "mirostat"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"image_data": [{"id": 1}]}, "image_data"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"repetition_penalty": 2}, "repetition_penalty"),
    ],
    ids=str,
)
async def test_wrong_field_is_refused_by_its_name(client, fields, param):
    reply = await client.post(COMPLETION, {"prompt": "hello"} | fields)
    assert reply.status == 400
    assert (reply.error["param"] or "").startswith(param), reply.body
    assert client.gateway.jobs == []


async def test_fields_with_llama_cpps_defaults_are_accepted(client):
    defaults = {
        "n_keep": 0,
        "cache_prompt": True,
        "id_slot": -1,
        "typical_p": 1.0,
        "mirostat": 0,
        "min_keep": 0,
        "dynatemp_range": 0.0,
        "dry_multiplier": 0.0,
        "xtc_probability": 0.0,
        "n_indent": 0,
        "t_max_predict_ms": 0,
        "image_data": [],
        "grammar": "",
        "logit_bias": [],
        "n_probs": 0,
        "response_fields": [],
        "lora": [],
        "repeat_last_n": 64,
        "seed": 4294967295,
        "top_k": 40,
    }
    reply = await client.post(COMPLETION, {"prompt": "hello"} | defaults)
    assert reply.status == 200, reply.body
    assert "warning" not in reply.headers
    sampling = client.gateway.job.sampling
    assert (sampling.seed, sampling.top_k, sampling.repeat_last_n) == (None, 40, 64)


# Other servers --------------------------------------------------------------------------------------


async def test_request_for_another_server_is_relayed_as_it_is(client_with):
    client = client_with(fleet=FakeFleet(remote={"remote"}))
    client.gateway.script = remote_responses.complete_response
    body = {"model": "remote", "prompt": "hello", "n_predict": 5, "mirostat": 2}
    await client.post(COMPLETION, body)
    job = client.gateway.job
    assert (job.relay.path, json.loads(job.relay.body), job.sampling.max_tokens) == (COMPLETION, body, 5)


def test_events_of_another_server_are_read():
    reader = NativeReader()
    piece = reader.read_event(b'data: {"index":1,"content":"Hi","tokens":[5],"stop":false}\n\n')
    assert (piece.index, piece.text, piece.finished, piece.is_end) == (1, "Hi", None, False)
    end = reader.read_event(
        b'data: {"index":0,"content":"","stop":true,"stop_type":"limit","tokens_predicted":7}\n\n'
    )
    assert (end.text, end.finished, end.generated) == ("", "length", 7)
    error = reader.read_event(b'data: {"error":{"code":500,"message":"no","type":"server_error"}}\n\n')
    assert error.error.message == "no"
    assert reader.read_event(b'data: {"x":1}\n\n').is_noise
    assert reader.without_beginning(b'data: {"content":"Hello","stop":false}\n\n', "lo") == (
        b'data: {"content":"lo","stop":false}\n\n'
    )


@pytest.mark.parametrize(
    ("body", "generated", "size"),
    [
        (b'{"content":"Hello","stop":true,"tokens_predicted":3}', 3, 5),
        (b'[{"content":"Hello","tokens_predicted":3},{"content":"Hi","tokens_predicted":2}]', 5, 7),
        (b'{"content":"Hello"}', None, 5),
    ],
)
def test_whole_answer_of_another_server_is_counted(body, generated, size):
    answer = NativeReader().read_response(body)
    assert (answer.generated, answer.content_bytes, answer.error) == (generated, size, None)


def test_error_of_another_server_is_no_answer():
    body = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}'
    assert NativeReader().read_response(body).error.message == "too long"
    with pytest.raises(ValueError, match="no JSON object"):
        NativeReader().read_response(b"7")
