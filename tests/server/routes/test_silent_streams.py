"""No stream is silent for longer than the keep-alive time, and clients skip what is sent meanwhile."""

import json
from dataclasses import dataclass

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.job import Delta
from fake_fleet import FakeFleet
from server.routes.conftest import client_of
from server.routes.raw_http import post, serving

MESSAGES = [{"role": "user", "content": "hello"}]
KEEP_ALIVE_S = 15.0


@dataclass
class Form:
    """A dialect's streams: `filler` is in what keeps one open, and `raw` are two events of another server."""

    path: str
    body: dict
    filler: bytes
    raw: tuple[bytes, bytes]

    def __str__(self):
        return self.path


def chunk(text):
    return b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode()


def event(kind, **members):
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.dumps({"type": kind, **members}).encode())


FORMS = [
    Form("/v1/chat/completions", {"messages": MESSAGES}, b": running\n\n", (chunk("Hello"), chunk(" world"))),
    Form("/v1/completions", {"prompt": "hello"}, b": running\n\n", (chunk("Hello"), chunk(" world"))),
    Form(
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9},
        b'event: ping\ndata: {"type":"ping"}\n\n',
        (event("content_block_delta"), event("message_stop")),
    ),
    Form(
        "/v1/responses",
        {"input": "hello"},
        b": running\n\n",
        (event("response.output_text.delta"), event("response.completed")),
    ),
    Form(
        "/api/chat",
        {"messages": MESSAGES},
        b'"done":false,"message":{"role":"assistant","content":""}}\n',
        (b'{"message":{"content":"Hello"}}\n', b'{"message":{"content":" world"}}\n'),
    ),
    Form(
        "/api/generate",
        {"prompt": "hello"},
        b'"done":false,"response":""}\n',
        (b'{"response":"Hello"}\n', b'{"response":" world"}\n'),
    ),
]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)


class TimedPieces(list):
    """The pieces of a body, and the times between them."""

    def __init__(self):
        super().__init__()
        self.gaps_s = []
        self.last_s = None

    def append(self, piece):
        now = trio.current_time()
        self.gaps_s.append(now - (self.last_s or now))
        self.last_s = now
        super().append(piece)


async def streamed(model, form, script, keep_alive_s=KEEP_ALIVE_S, name="small", **gateway):
    queue = QueueConfig(keep_alive_s=keep_alive_s)
    client = client_of(model, queue=queue, fleet=FakeFleet(["small"], ["remote"]))
    client.gateway.script = lambda job: script
    for setting, value in gateway.items():
        setattr(client.gateway, setting, value)
    reply = await client.post(form.path, form.body | {"model": name, "stream": True}, pieces=TimedPieces())
    assert (reply.status, reply.is_complete) == (200, True), reply.body
    return reply


def fillers(reply, form):
    return [piece for piece in reply.pieces if piece.endswith(form.filler) and b"ello" not in piece]


def ours(*between):
    return [[Delta(0, "Hello", [10])], *between, [Delta(0, " world", [11], finish_reason="stop")]]


def relayed(form, *between):
    first, last = (
        Delta(0, raw=[raw], relayed_tokens=1, finish_reason=end)
        for raw, end in zip(form.raw, (None, "stop"), strict=True)
    )
    return [[first], *between, [last]]


@each_form
async def test_pause_of_our_engine_is_filled(model, form, autojump_clock):
    reply = await streamed(model, form, ours(100.0))
    assert max(reply.pieces.gaps_s) <= KEEP_ALIVE_S
    assert len(fillers(reply, form)) in (6, 7)  # none is sent twice


@each_form
async def test_pause_of_another_server_is_filled_and_its_events_stay_as_they_are(model, form, autojump_clock):
    reply = await streamed(model, form, relayed(form, 100.0), name="remote")
    assert max(reply.pieces.gaps_s) <= KEEP_ALIVE_S
    assert len(fillers(reply, form)) in (6, 7)
    shown = [piece for piece in reply.pieces if piece not in fillers(reply, form)]
    assert b"".join(shown) == b"".join(form.raw)


@each_form
async def test_tokens_that_show_nothing_do_not_make_a_stream_silent(model, form, autojump_clock):
    hidden = [step for second in range(100) for step in (1.0, [Delta(0, "", [second])])]
    reply = await streamed(model, form, ours(*hidden))
    assert max(reply.pieces.gaps_s) <= KEEP_ALIVE_S


@each_form
async def test_wait_for_a_seat_and_for_the_first_token_is_filled(model, form, autojump_clock):
    reply = await streamed(model, form, ours(), keep_alive_s=2.0, wait_s=30.0, prefill_s=30.0)
    assert max(reply.pieces.gaps_s) <= 2.0


@each_form
async def test_comments_of_another_server_are_not_doubled(model, form, autojump_clock):
    kept_open = [step for _ in range(20) for step in (5.0, [Delta(0, raw=[form.filler])])]
    reply = await streamed(model, form, relayed(form, *kept_open), name="remote")
    assert b"".join(reply.pieces) == form.raw[0] + 20 * form.filler + form.raw[1]


@each_form
async def test_stream_that_sends_tokens_has_no_fillers(model, form, autojump_clock):
    tokens = [step for _ in range(40) for step in (1.0, [Delta(0, " a", [11])])]
    reply = await streamed(model, form, ours(*tokens))
    assert fillers(reply, form) == []


async def test_keep_alive_zero_leaves_pauses_as_they_are(model, autojump_clock):
    reply = await streamed(model, FORMS[0], ours(100.0), keep_alive_s=0)
    assert reply.comments == []


async def test_pause_is_filled_by_the_real_listener_which_sends_tokens_directly(model):
    client = client_of(model, queue=QueueConfig(keep_alive_s=0.1))
    client.gateway.script = lambda job: ours([Delta(0, " my", [5])], [Delta(0, " own", [6])], 1.0)
    body = json.dumps({"model": "small", "stream": True, "messages": MESSAGES}).encode()
    async with serving(client.app) as server:
        reply = await server.fetch(post(body, FORMS[0].path))
    assert 5 <= reply.body.count(b": running\n\n") <= 11
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.body.index(b" own") < reply.body.index(b": running") < reply.body.index(b" world")
