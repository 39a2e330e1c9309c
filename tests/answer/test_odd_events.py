"""Odd streams of other servers: whatever stands between the pieces, the client gets the text and one end.

Each odd event stands first, in the middle and last in a stream of chunks, which is relayed to a client of
OpenAI's API and translated for all other clients. Streams that the readers of other dialects get are in the
second half.
"""

import json
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from answer.test_relay import _FakeResponse
from fairlead.answer.deltas import Deltas
from fairlead.answer.relayed_stream import RelayedStream
from fairlead.answer.translation import TranslatedStream
from fairlead.answer.upstream_stream import RelayFailed
from fairlead.errors import NodeFailed, NodeFull, NodeRefused
from nodes.listening import relayed_job
from upstream_readers import CHAT_READER, READERS

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
WORDS = ["Hello", " there", ",", " friend", "."]


def event(document, name=None):
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode()


def piece(text=None, finish_reason=None, index=0):
    delta = {} if text is None else {"content": text}
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]})


def answer(finish_reason=None, last="stop"):
    """Return a whole answer, in which all pieces but the last have a finish reason."""
    return [event(ROLE), *(piece(word, finish_reason) for word in WORDS), piece(None, last), event("[DONE]")]


NOISE = {
    "ping": event({"type": "ping"}, "ping"),
    "heartbeat": event("heartbeat", "heartbeat"),
    "comment": b": keep-alive\n\n",
    "choices: null": event({"id": "c1", "choices": None}),
    "no choices": event({"id": "c1", "choices": []}),
    "data: null": event("null"),
    "no data": b"data:\n\n",
    "a number": event("5"),
    "another object": event({"status": "processing"}),
    "only an id": b"id: 7\nretry: 10\n\n",
}


async def relayed(events, reads=None, n=1):
    """Return what a client of OpenAI's API reads: its events, by the `openai` package's rules."""
    deltas = Deltas(n)
    stream = RelayedStream("stub", relayed_job(n=n), CHAT_READER, deltas, event_bytes=100_000)
    await stream.run(_FakeResponse(*(reads or events)))
    await deltas.ended()
    raw = b"".join(part for delta in await deltas.take() for part in delta.raw)
    data = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def text_of(chunks, index=0):
    """Return the text of a choice, after checking that it has one end, behind all text."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] in ("stop", "length")
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def translated(events, reads=None):
    job = relayed_job()
    deltas = Deltas(1)
    await TranslatedStream("stub", job, chat_of(job), deltas, event_bytes=100_000).run(
        _FakeResponse(*(reads or events))
    )
    await deltas.ended()
    taken = await deltas.take()
    assert [delta.finish_reason for delta in taken if delta.finish_reason] == ["stop"]
    assert taken[-1].finish_reason == "stop"
    return "".join(delta.text for delta in taken)


def chat_of(job):
    from answer.test_translation import translated_job

    return translated_job().relay.chat


def with_odd(odd, place):
    events = answer()
    events.insert({"first": 0, "middle": 4, "last": len(events) - 1}[place], odd)
    return events


@pytest.mark.parametrize(("odd", "place"), [*product(NOISE, ["first", "middle", "last"])])
async def test_event_that_says_nothing_reaches_no_client(odd, place):
    events = with_odd(NOISE[odd], place)
    assert await relayed(events) == await relayed(answer())
    assert await relayed(None, [b"".join(events)]) == await relayed(answer())
    assert await translated(events) == "".join(WORDS)


ENDS = {
    "empty": answer(""),
    "the word null": answer("null"),
    "unknown words": answer("in_progress"),
    "an end in every chunk": answer("stop", last="stop"),
    "an end in every chunk with text, and none alone": [*answer("stop")[:-2], event("[DONE]")],
    "an empty word to the end": [*answer("")[:-2], event("[DONE]")],
    "no end": [*answer()[:-2], event("[DONE]")],
    "two ends": [*answer()[:-1], piece(None, "stop"), event("[DONE]")],
    "usage behind the end": [
        *answer()[:-1],
        event({"choices": [], "usage": {"completion_tokens": 5}}),
        event("[DONE]"),
    ],
    "text behind the end": [*answer()[:4], piece(None, "stop"), *answer()[4:]],
}


@pytest.mark.parametrize("name", ENDS)
async def test_client_gets_the_whole_text_and_one_end_behind_it(name):
    events = ENDS[name]
    for reads in (events, [b"".join(events)]):
        chunks = await relayed(events, reads)
        if name == "no end":
            assert "".join(
                choice["delta"]["content"] for each in chunks for choice in each["choices"]
            ) == "".join(WORDS)
        else:
            assert text_of([each for each in chunks if each["choices"]]) == "".join(WORDS)
        assert await translated(events, reads) == "".join(WORDS)


async def test_end_of_each_of_two_choices_stands_behind_its_own_text():
    events = [
        piece("a", "stop", 0),
        piece("x", "stop", 1),
        piece("b", "stop", 0),
        piece("y", "length", 1),
        event("[DONE]"),
    ]
    chunks = await relayed(events, n=2)
    assert (text_of(chunks, 0), text_of(chunks, 1)) == ("ab", "xy")


@pytest.mark.parametrize("whole", [answer(), answer("stop")])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
async def test_last_event_needs_no_empty_line(whole, end):
    body = b"".join(whole).removesuffix(b"\n\n") + end
    assert text_of(await relayed(None, [body])) == "".join(WORDS)
    assert await translated(None, [body]) == "".join(WORDS)


async def test_half_an_event_at_the_end_is_a_failure():
    for run in (relayed, translated):
        with pytest.raises(RelayFailed, match="before its end"):
            await run(None, [b"".join(answer()[:5]) + b'data: {"choices": [{"index": 0, "del'])


ERRORS = [
    ({"message": "bad", "type": "invalid_request_error", "code": 400}, NodeRefused, 400),
    ({"message": "bad", "type": "invalid_request_error", "code": None}, NodeRefused, 400),
    ({"message": "bad", "code": "context_length_exceeded"}, NodeRefused, 400),
    ({"message": "bad", "status": 422}, NodeRefused, 422),
    ({"message": "bad", "code": 429}, NodeFull, None),
    ({"message": "bad", "code": 500}, RelayFailed, None),
    ({"message": "bad"}, RelayFailed, None),
    ("bad", RelayFailed, None),
]


@pytest.mark.parametrize(("error", "kind", "status"), ERRORS)
@pytest.mark.parametrize("run", [relayed, translated])
async def test_error_in_place_of_an_answer_is_what_its_code_says(run, error, kind, status):
    for before in ([], [event(ROLE)], [NOISE["ping"]]):
        with pytest.raises(kind) as raised:
            await run([*before, event({"error": error})])
        assert status is None or raised.value.status == status
        assert kind is NodeFull or "bad" in raised.value.message


@pytest.mark.parametrize("run", [relayed, translated])
async def test_server_that_is_full_in_the_middle_of_an_answer_has_failed(run):
    with pytest.raises(NodeFailed) as raised:
        await run([*answer()[:4], event({"error": {"message": "bad", "code": 429}})])
    assert not isinstance(raised.value, NodeFull)


# Other dialects -------------------------------------------------------------------------------------

TYPED = {
    "/v1/responses": [
        {"type": "response.created", "response": {}},
        {"type": "response.output_text.delta", "delta": "Hello"},
        {"type": "response.completed", "response": {"usage": None}},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": {}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "message_stop"},
    ],
}
ODD = ["null", "5", "", "{}", json.dumps({"choices": None})]


@pytest.mark.parametrize(("path", "odd", "place"), [*product(TYPED, ODD, [0, 1, 2])])
async def test_noise_is_dropped_from_streams_of_typed_events(path, odd, place):
    events = [event(each) for each in TYPED[path]]
    noisy = [*events[:place], event(odd), *events[place:]]
    assert await raw_of(READERS[path], noisy) == b"".join(events)


@pytest.mark.parametrize(
    ("odd", "place"), [*product([b"null\n", b"5\n", b"{}\n", b'{"model": "m"}\n'], [0, 1, 2])]
)
async def test_noise_is_dropped_from_streams_of_lines(odd, place):
    lines = [
        b'{"message": {"content": "Hel"}, "done": false}\n',
        b'{"message": {"content": "lo"}, "done": false}\n',
        b'{"message": {"content": ""}, "done": true, "done_reason": "stop"}\n',
    ]
    noisy = [*lines[:place], odd, *lines[place:]]
    assert await raw_of(READERS["/api/chat"], noisy) == b"".join(lines)


async def raw_of(reader, events):
    deltas = Deltas(1)
    await RelayedStream("stub", relayed_job(), reader, deltas, event_bytes=100_000).run(
        _FakeResponse(*events)
    )
    await deltas.ended()
    return b"".join(part for delta in await deltas.take() for part in delta.raw)


@given(
    odd=st.lists(st.tuples(st.sampled_from(sorted(NOISE)), st.integers(0, 7)), max_size=6),
    reason=st.sampled_from([None, "", "null", "stop", "odd"]),
    cuts=st.lists(st.integers(0, 2000), max_size=6),
)
async def test_any_noise_at_any_cut_changes_nothing(odd, reason, cuts):
    events = answer(reason)
    for name, place in odd:
        events.insert(place, NOISE[name])
    body = b"".join(events)
    edges = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    reads = [body[begin:end] for begin, end in pairwise(edges) if begin < end]
    assert text_of(await relayed(None, reads)) == "".join(WORDS)
    assert await translated(None, reads) == "".join(WORDS)
