"""Streams of OpenAI's Responses API: their events, validated one by one with the types of its package."""

import json
from typing import Any, get_args

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from server.routes.conftest import Reply

RESPONSES = "/v1/responses"
_UNION = get_args(ResponseStreamEvent)[0]
TYPES = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(_UNION)}
LIFECYCLE = {"response.created", "response.in_progress"}
ENDS = {"response.completed", "response.incomplete", "response.failed"}


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """Return the data of a stream's events, without comments."""
    *blocks, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, each of a series of equal ones once, without the common prefix."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


def check_types(events: list[dict[str, Any]]) -> None:
    """Fail unless every event is of its type in OpenAI's package, strictly, and its client accepts all."""
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(TYPES[event["type"]].model_validate_json(json.dumps(event), strict=True))


def final_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response of a stream's last event, after a check of the order and the places of all."""
    check_types(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *middle, last = events
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert first["response"] == second["response"]
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    assert last["type"] in ENDS
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert first["response"]["id"] == response["id"]
    items = _items(middle)
    if response["status"] != "failed":
        assert items == response["output"]
    Response.model_validate_json(json.dumps(response), strict=True)
    return response


def _items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that a client makes of the events between the first two and the last."""
    items: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None
    texts: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert current is None
            current, texts = event["item"], []
            assert current["status"] == "in_progress"
            assert not current.get("content")
            assert not current.get("arguments")
            assert event["output_index"] == len(items)
            continue
        assert current is not None
        assert event["output_index"] == len(items)
        if kind == "output_item.done":
            done = event["item"]
            assert (done["id"], done["type"]) == (current["id"], current["type"])
            written = done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"]
            assert written == "".join(texts)
            items.append(done)
            current = None
            continue
        assert event["item_id"] == current["id"]
        assert event.get("content_index", 0) == 0
        assert ("content_index" in event) == (current["type"] != "function_call")
        if kind.endswith(".delta"):
            texts.append(event["delta"])
        elif kind.endswith("text.done"):
            assert event["text"] == "".join(texts)
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == "".join(texts)
        else:
            assert kind in {"content_part.added", "content_part.done"}
            assert event["part"]["text"] == "".join(texts)
    return items


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs from request to request: ids and times."""
    rest = {
        name: value for name, value in response.items() if name not in {"id", "created_at", "completed_at"}
    }
    items = [
        {name: value for name, value in item.items() if name not in {"id", "call_id"}}
        for item in response["output"]
    ]
    return {**rest, "output": items}
