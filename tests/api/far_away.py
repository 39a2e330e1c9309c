"""What another server answers, as a node that relays it puts it, and requests for its model."""

import json

from fairlead.api.relaying import PATHS
from fairlead.job import Delta

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
ALL = (CHAT, COMPLETIONS, *PATHS)
STREAMING = (CHAT, COMPLETIONS, "/v1/responses", MESSAGES)

ANSWER = b'{"id": "theirs",  "unheard_of": [1, {"of": null}], "choices": []}'
KIND = "application/json"
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"far"}}],"unheard_of":1}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]


def whole(job):
    """Another server's answer, in one body for all choices."""
    first = Delta(0, raw=[ANSWER], relayed_tokens=7, finish_reason="stop")
    return [[first, *(Delta(index, finish_reason="stop") for index in range(1, job.sequences))]]


def streamed(job):
    """Another server's events. The end belongs to no choice, if there are several."""
    tail = job.sequences if job.sequences > 1 else 0
    return [
        [Delta(0, raw=EVENTS[:1])],
        [Delta(0, "far", raw=EVENTS[1:2], relayed_tokens=1)],
        [Delta(0, raw=EVENTS[2:3])],
        [Delta(tail, raw=EVENTS[3:])],
        [Delta(index, finish_reason="stop", raw=[b""]) for index in range(job.sequences)],
    ]


def asking(**fields) -> bytes:
    return json.dumps({"model": "far", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()
