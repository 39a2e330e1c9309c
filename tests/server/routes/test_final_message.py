"""How a chat's prompt ends: with the beginning of an answer, as it is, or with a message to continue."""

import pytest

from server.routes.conftest import TEMPLATE, client_of, small_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "one two "}


def prompt_of(client):
    model = client.model
    return model.tokenizer.decode(client.gateway.job.prompts[0], skip_special_tokens=False)


@pytest.fixture
def client(model):
    made = client_of(model)
    made.model = model
    return made


@pytest.mark.parametrize(
    ("messages", "fields", "expected"),
    [
        ([USER], {}, "<|user|>hello\n<|assistant|>"),
        ([USER], {"add_generation_prompt": True}, "<|user|>hello\n<|assistant|>"),
        ([USER], {"add_generation_prompt": False}, "<|user|>hello\n"),
        ([USER, ANSWER], {"continue_final_message": False}, None),
        (
            [USER, ANSWER],
            {"continue_final_message": True, "add_generation_prompt": False},
            "<|user|>hello\n<|assistant|>one two ",
        ),
        ([USER, ANSWER], {"continue_final_message": True}, "<|user|>hello\n<|assistant|>one two "),
        ([USER], {"continue_final_message": True}, "<|user|>hello"),
        (
            [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
                },
            ],
            {"continue_final_message": True},
            "<|user|>hello\n<|assistant|>one \ntwo",
        ),
    ],
)
async def test_prompt_ends_as_the_request_says(client, messages, fields, expected):
    reply = await client.post(CHAT, {"messages": messages, **fields})
    assert reply.status == 200, reply.body
    assert prompt_of(client) == (expected or "<|user|>hello\n<|assistant|>one two \n<|assistant|>")
    assert reply.json["choices"][0]["message"]["content"] == "Hello world"


async def test_template_that_trims_texts_trims_the_continued_one(tmp_path):
    template = TEMPLATE.replace("message.content }}", "message.content | trim }}")
    model = small_model(tmp_path, template)
    client = client_of(model)
    client.model = model
    await client.post(CHAT, {"messages": [USER, ANSWER], "continue_final_message": True})
    assert prompt_of(client) == "<|user|>hello\n<|assistant|>one two"


async def test_only_the_last_of_equal_texts_is_the_end(client):
    messages = [USER, {**ANSWER, "content": "hello"}]
    await client.post(CHAT, {"messages": messages, "continue_final_message": True})
    assert prompt_of(client) == "<|user|>hello\n<|assistant|>hello"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: cannot be combined with add_generation_prompt: true",
        ),
        (
            {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
            "messages: continue_final_message needs a last message with a text",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                        ],
                    }
                ],
                "continue_final_message": True,
            },
            "messages: continue_final_message needs a last message with a text",
        ),
    ],
)
async def test_impossible_end_is_refused_by_its_field(client, body, message):
    for path in (CHAT, "/tokenize"):
        reply = await client.post(path, body)
        assert (reply.status, reply.error["message"]) == (400, message)


async def test_template_that_hides_the_last_text_is_named(tmp_path):
    model = small_model(tmp_path, "{% for message in messages %}{{ message.role }}{% endfor %}")
    reply = await client_of(model).post(CHAT, {"messages": [USER], "continue_final_message": True})
    assert reply.error["message"].startswith("messages: the model's chat template does not show")


async def test_tokenize_ends_as_a_chat_does(client):
    body = {"messages": [USER, ANSWER], "continue_final_message": True}
    tokens = (await client.post("/tokenize", body)).json["tokens"]
    await client.post(CHAT, body)
    assert tokens == list(client.gateway.job.prompts[0])
