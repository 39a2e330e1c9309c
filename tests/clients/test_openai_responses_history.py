"""OpenAI's package with long histories: `truncation: auto`, compaction, and conversations."""

from collections.abc import Iterator

import httpx
import pytest

from clients.conftest import MODEL
from e2e.real_server import RealServer, configured, real_server

openai = pytest.importorskip("openai")

ASK = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
KEYS = [{"key": "sk-ana", "user": "ana"}, {"key": "sk-ben", "user": "ben"}]
CONTEXT = 256  # tokens, by maxModelLen
TURN = "word " * 20


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def long_history(turns: int) -> list[dict[str, str]]:
    items = [said("system", "Be brief.")]
    for number in range(turns):
        items += [said("user", f"{number}: {TURN}"), said("assistant", TURN)]
    return [*items, said("user", "What is Fairlead?")]


@pytest.fixture(scope="module", params=[1, 2])
def server(request, tmp_path_factory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("history")
    settings = {"fronts": request.param, "apiKeys": KEYS, "responses": {"inStore": request.param > 1}}
    arguments = configured(folder, {"maxModelLen": CONTEXT}, **settings)
    with real_server(*arguments, "--store", str(folder / "fairlead.db")) as running:
        yield running


def connect(server: RealServer, key: str) -> "openai.OpenAI":
    """Return a client without kept connections, so that its requests reach all fronts."""
    http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=http)


@pytest.fixture
def client(server: RealServer) -> Iterator["openai.OpenAI"]:
    with connect(server, "sk-ana") as client:
        yield client


# Truncation ------------------------------------------------------------------------------------------


def test_oldest_turns_are_left_out_of_an_input_that_is_too_long(client):
    history = long_history(40)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input=history)
    assert refused.value.code == "context_length_exceeded"
    response = client.responses.create(**ASK, input=history, truncation="auto")
    assert response.truncation == "auto"
    assert CONTEXT // 2 < response.usage.input_tokens <= CONTEXT - ASK["max_output_tokens"]


def test_as_few_turns_as_possible_are_left_out_and_the_system_message_stays(client):
    history = long_history(40)
    truncated = client.responses.create(**ASK, input=history, truncation="auto")

    def tokens(turns: int) -> int:
        given = [history[0], *history[1 + 2 * turns :]]
        return client.responses.input_tokens.count(model=MODEL, input=given).input_tokens

    room = CONTEXT - ASK["max_output_tokens"]
    kept = next(turns for turns in range(40, 0, -1) if tokens(turns) == truncated.usage.input_tokens)
    assert tokens(kept) <= room < 2 * tokens(kept) - tokens(kept + 1)
    whole = client.responses.create(**ASK, input=[history[0], *history[1 + 2 * kept :]])
    assert whole.output_text == truncated.output_text


def test_input_that_fits_is_not_changed_by_truncation(client):
    whole = client.responses.create(**ASK, input=long_history(1))
    truncated = client.responses.create(**ASK, input=long_history(1), truncation="auto")
    assert truncated.usage.input_tokens == whole.usage.input_tokens
    assert truncated.output_text == whole.output_text


def test_last_turn_that_is_too_long_is_refused_with_truncation(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            **ASK, input=[*long_history(3), said("user", "word " * 2000)], truncation="auto"
        )
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_call_and_its_result_are_left_out_together(client):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": TURN}
    history = [said("user", TURN), call, result] * 20
    response = client.responses.create(**ASK, input=[*history, said("user", "hello")], truncation="auto")
    assert response.usage.input_tokens <= CONTEXT


def test_kept_conversation_goes_on_beyond_the_context_with_truncation(client):
    previous = None
    for _ in range(12):
        options = {"input": TURN, "truncation": "auto", "previous_response_id": previous}
        response = client.responses.create(**ASK, **options)
        assert response.status in ("completed", "incomplete")
        previous = response.id
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASK, input=TURN, previous_response_id=previous)


# Compaction ------------------------------------------------------------------------------------------


def test_compacted_conversation_is_the_users_messages_and_a_summary_that_is_sent_back(client):
    history = long_history(2)
    compacted = client.responses.compact(model=MODEL, input=history)
    assert compacted.object == "response.compaction"
    *messages, summary = compacted.output
    users = [item["content"] for item in history if item["role"] == "user"]
    assert [message.content[0].text for message in messages] == users
    assert summary.type == "compaction"
    assert compacted.usage.output_tokens > 0
    given = [item.model_dump(warnings=False) for item in compacted.output]
    response = client.responses.create(**ASK, input=[*given, said("user", "Go on.")])
    assert response.status in ("completed", "incomplete")
    without = client.responses.create(**ASK, input=[*given[:-1], said("user", "Go on.")])
    assert response.usage.input_tokens > without.usage.input_tokens


def test_conversation_that_is_too_long_can_be_compacted(client):
    compacted = client.responses.compact(model=MODEL, input=long_history(40))
    assert len(compacted.output) == 42
    assert compacted.usage.input_tokens < CONTEXT


def test_kept_response_is_compacted_by_its_id_and_only_by_its_owner(client, server):
    first = client.responses.create(**ASK, input="What is Fairlead?")
    compacted = client.responses.compact(model=MODEL, previous_response_id=first.id)
    message, _ = compacted.output
    assert message.content[0].text == "What is Fairlead?"
    with connect(server, "sk-ben") as ben, pytest.raises(openai.BadRequestError) as refused:
        ben.responses.compact(model=MODEL, previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize("content", ["", "gAAAAA", "fairlead1.?", "fairlead1._w=="])
def test_compaction_of_another_server_is_refused(client, content):
    given = [{"type": "compaction", "encrypted_content": content}, said("user", "hello")]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input=given)
    assert refused.value.param == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({}, "input"), ({"input": []}, "input"), ({"input": [{"type": "message"}]}, "input[0].role")],
)
def test_wrong_compaction_names_its_field(client, wrong, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.compact(model=MODEL, **wrong)
    assert refused.value.param == param


# Members that are null -------------------------------------------------------------------------------


def test_members_that_packages_read_are_null_rather_than_absent(client):
    chat = client.chat.completions.create(model=MODEL, messages=[said("user", "hello")], max_tokens=2)
    assert chat.choices[0].message.reasoning_content is None
    assert chat.prompt_logprobs is None
    completion = client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
    assert completion.choices[0].prompt_logprobs is None
    response = client.responses.create(**ASK, input="hello")
    assert response.conversation is None


# Conversations ---------------------------------------------------------------------------------------


def texts(client, conversation_id: str) -> list[str]:
    items = client.conversations.items.list(conversation_id, order="asc", limit=3)
    return [item.content[0].text for item in items]


@pytest.mark.parametrize("how", ["whole", "stream", "background"])
def test_response_continues_a_conversation_and_adds_its_items(client, how):
    conversation = client.conversations.create(
        items=[said("user", "My name is Ana."), said("assistant", "Hello Ana.")], metadata={"a": "b"}
    )
    assert (conversation.object, conversation.metadata) == ("conversation", {"a": "b"})
    written = ["My name is Ana.", "Hello Ana."]
    tokens = 0
    for number in range(3):
        options = {**ASK, "input": f"Question {number}", "conversation": conversation.id}
        if how == "stream":
            (*_, event) = client.responses.create(**options, stream=True)
            response = event.response
        else:
            response = client.responses.create(**options, background=how == "background")
        while response.status in {"queued", "in_progress"}:
            response = client.responses.retrieve(response.id)
        assert response.conversation.id == conversation.id
        assert response.usage.input_tokens > tokens
        tokens = response.usage.input_tokens
        written += [f"Question {number}", response.output_text]
        assert texts(client, conversation.id) == written


def test_conversation_is_the_same_input_as_its_items(client):
    items = [said("user", "My name is Ana."), said("assistant", "Hello Ana.")]
    conversation = client.conversations.create(items=items)
    given = {"id": conversation.id}
    counted = client.responses.input_tokens.count(model=MODEL, input="hello", conversation=given)
    whole = client.responses.input_tokens.count(model=MODEL, input=[*items, said("user", "hello")])
    assert counted.input_tokens == whole.input_tokens


def test_conversation_is_changed_and_deleted(client):
    conversation = client.conversations.create()
    added = client.conversations.items.create(
        conversation.id, items=[said("user", f"{number}") for number in range(5)]
    )
    assert [item.content[0].text for item in added.data] == ["0", "1", "2", "3", "4"]
    first, *_, last = added.data
    assert client.conversations.items.retrieve(first.id, conversation_id=conversation.id) == first
    assert client.conversations.items.delete(last.id, conversation_id=conversation.id).id == conversation.id
    assert texts(client, conversation.id) == ["0", "1", "2", "3"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(last.id, conversation_id=conversation.id)
    updated = client.conversations.update(conversation.id, metadata={"topic": "demo"})
    assert client.conversations.retrieve(conversation.id) == updated
    assert updated.metadata == {"topic": "demo"}
    assert client.conversations.delete(conversation.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK, input="hello", conversation=conversation.id)


def test_conversation_of_another_key_is_not_found_at_any_front(client, server):
    conversation = client.conversations.create(items=[said("user", "secret")])
    (item,) = client.conversations.items.list(conversation.id)
    with connect(server, "sk-ben") as ben:
        name = {"conversation_id": conversation.id}
        for _ in range(6):
            for attempt in (
                lambda: ben.conversations.retrieve(**name),
                lambda: ben.conversations.update(**name, metadata={}),
                lambda: ben.conversations.delete(**name),
                lambda: list(ben.conversations.items.list(**name)),
                lambda: ben.conversations.items.create(**name, items=[said("user", "x")]),
                lambda: ben.conversations.items.retrieve(item.id, **name),
                lambda: ben.conversations.items.delete(item.id, **name),
                lambda: ben.responses.create(**ASK, input="x", conversation=conversation.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    attempt()
    assert texts(client, conversation.id) == ["secret"]


def test_responses_and_conversations_are_not_taken_for_each_other(client):
    conversation = client.conversations.create()
    response = client.responses.create(**ASK, input="hello")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(response.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASK, input="hello", previous_response_id=conversation.id)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"items": [{"type": "image"}]}, "items[0].type"),
        ({"items": [said("nobody", "x")]}, "items"),
        ({"items": [said("user", "x")] * 21}, "items"),
        ({"items": [{"type": "function_call", "call_id": "1"}]}, "items[0].name"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)
def test_wrong_conversation_names_its_field(client, wrong, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.conversations.create(**wrong)
    assert refused.value.param.startswith(param)


@pytest.mark.parametrize("more", [{"previous_response_id": "resp_1"}, {"store": False}])
def test_conversation_cannot_be_combined_with(client, more):
    conversation = client.conversations.create()
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, input="hello", conversation=conversation.id, **more)
    assert refused.value.param == "conversation"
