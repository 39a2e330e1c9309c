"""OpenAI's package with responses that are kept: reading, continuing, and those in the background."""

import time
from collections.abc import Iterator

import pytest

from clients.conftest import MODEL
from e2e.real_server import RealServer, until

openai = pytest.importorskip("openai")

ASK = {"model": MODEL, "input": "Count from 1 to 5.", "temperature": 0}
# As long as the model's context, so that it does not end before it is cancelled.
ENDLESS = {"model": MODEL, "input": "hello", "extra_body": {"ignore_eos": True}, "background": True}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


def ended(client, response):
    """Wait for the end of a response in the background as OpenAI's documentation does, and return it."""
    while response.status in {"queued", "in_progress"}:
        time.sleep(0.02)
        response = client.responses.retrieve(response.id)
    return response


def test_response_is_retrieved_and_deleted(client):
    response = client.responses.create(**ASK)
    assert client.responses.retrieve(response.id) == response
    assert client.responses.delete(response.id) is None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_response_continues_another(client):
    first = client.responses.create(**ASK)
    again = {"model": MODEL, "temperature": 0}
    second = client.responses.create(**again, input="Again.", previous_response_id=first.id)
    given = [
        {"role": "user", "content": ASK["input"]},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "Again."},
    ]
    whole = client.responses.create(**again, input=given)
    assert second.previous_response_id == first.id
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens


def test_unknown_previous_response_raises_bad_request_with_openais_code(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, previous_response_id="resp_unknown")
    assert refused.value.code == "previous_response_not_found"
    assert refused.value.param == "previous_response_id"


def test_input_items_are_listed_over_several_pages(client):
    items = [{"role": "user", "content": f"{number}"} for number in range(5)]
    response = client.responses.create(model=MODEL, input=items, max_output_tokens=1)
    listed = list(client.responses.input_items.list(response.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == ["0", "1", "2", "3", "4"]
    assert len({item.id for item in listed}) == 5


def test_response_in_the_background_ends_like_any_other(client):
    created = client.responses.create(**ASK, background=True)
    assert (created.status, created.output) == ("queued", [])
    response = ended(client, created)
    assert (response.status, response.id) == ("completed", created.id)
    assert response.output_text == client.responses.create(**ASK).output_text


def test_response_in_the_background_is_cancelled_and_its_seat_is_free(client, server: RealServer):
    created = client.responses.create(**ENDLESS)
    until(lambda: client.responses.retrieve(created.id).status == "in_progress")
    assert server.queue()["running"] == 1
    assert client.responses.cancel(created.id).status == "cancelled"
    until(lambda: server.queue()["running"] == 0)
    assert client.responses.cancel(created.id).status == "cancelled"
    assert client.responses.retrieve(created.id).status == "cancelled"


def test_only_a_response_in_the_background_can_be_cancelled(client):
    response = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)


@pytest.mark.parametrize("cursor", [0, 1, 5])
def test_stream_is_left_and_attached_to_again(client, cursor):
    begun = []
    stream = client.responses.create(**ASK, background=True, stream=True)
    for event in stream:
        begun.append(event)
        if event.sequence_number == cursor:
            break
    stream.close()
    response_id = begun[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=cursor))
    numbers = [event.sequence_number for event in (*begun, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response == client.responses.retrieve(response_id)
    assert list(client.responses.retrieve(response_id, stream=True)) == [*begun, *rest]


def test_stream_helper_attaches_to_a_response_in_the_background(client):
    with client.responses.stream(**ASK, background=True) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    response_id = first.response.id
    with client.responses.stream(response_id=response_id, starting_after=first.sequence_number) as stream:
        final = stream.get_final_response()
    assert (final.id, final.status) == (response_id, "completed")


def test_response_without_store_is_not_found(client):
    response = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
