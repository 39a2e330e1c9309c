"""Responses of another server, as the deltas of the node that relays them, and requests for its model."""

import json
from typing import Any

from fairlead.base.job import Delta, Job

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
WITHOUT_CHOICES = (RESPONSES, MESSAGES, COUNT_TOKENS)
ALL = (CHAT, COMPLETIONS, *WITHOUT_CHOICES)
STREAMING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

ANSWER = b'{"id": "theirs",  "unheard_of": [1, {"of": null}], "choices": []}'
KIND = "application/json"
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"remote"}}],"unheard_of":1}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]


def complete_response(job: Job) -> list[list[Delta]]:
    """Return another server's response: one body for all choices."""
    first = Delta(0, raw=[ANSWER], relayed_tokens=7, finish_reason="stop")
    return [[first, *(Delta(index, finish_reason="stop") for index in range(1, job.sequences))]]


def event_stream(job: Job) -> list[list[Delta]]:
    """Return another server's events. If there are several choices, the end belongs to none of them."""
    tail = job.sequences if job.sequences > 1 else 0
    return [
        [Delta(0, raw=EVENTS[:1])],
        [Delta(0, "remote", raw=EVENTS[1:2], relayed_tokens=1)],
        [Delta(0, raw=EVENTS[2:3])],
        [Delta(tail, raw=EVENTS[3:])],
        [Delta(index, finish_reason="stop", raw=[b""]) for index in range(job.sequences)],
    ]


def relay_body(**fields: Any) -> bytes:
    return json.dumps(
        {"model": "remote", "messages": [{"role": "user", "content": "hello"}], **fields}
    ).encode()
