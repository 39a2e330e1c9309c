"""Chats of other servers become deltas without bytes, with the same tokens as if they were relayed."""

import json

import pytest

from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta, Translation
from fairlead.nodes.streams import upstream_stream
from fairlead.nodes.streams.translation import TEMPLATE_TOKENS, TranslatedStream, translated_response
from fairlead.nodes.streams.upstream_stream import RelayFailed
from nodes.listening import CollectedDeltas, translated_job


class FakeResponse:
    """A response that arrives in the given reads."""

    def __init__(self, *reads):
        self._reads = list(reads)

    async def read(self):
        return self._reads.pop(0) if self._reads else b""

    async def drain(self, within_s):
        """Do nothing: no data follows the end."""


def chunk(delta=None, finish_reason=None, *, index=0, **more):
    choice = {"index": index, "delta": delta or {}, "finish_reason": finish_reason}
    return b"data: %s\n\n" % json.dumps({"choices": [choice], **more}).encode()


def call(arguments="", **members):
    function = {name: members.pop(name) for name in ("name",) if name in members}
    return {"tool_calls": [{**members, "function": {**function, "arguments": arguments}}]}


def usage(**counts):
    return b"data: %s\n\n" % json.dumps({"choices": [], "usage": counts}).encode()


DONE = b"data: [DONE]\n\n"


async def translated(*events, job=None, event_bytes=100_000, sink=None):
    """Return the sink of a stream with these events."""
    into = sink or CollectedDeltas()
    job = job or translated_job()
    stream = TranslatedStream("stub", job, job.relay.chat, into, event_bytes=event_bytes)
    await stream.run(FakeResponse(b"".join(events)))
    return into


def answered(message, finish_reason="stop", *, job=None, **more):
    """Return the deltas of a whole response with this message."""
    job = job or translated_job(stream=False)
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    body = json.dumps({"choices": [choice], **more}).encode()
    return translated_response("stub", job, job.relay.chat, body)


def merged(deltas):
    whole = Delta(0)
    for delta in deltas:
        whole.merge(delta)
    return whole


# Content ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
async def test_reasoning_precedes_the_text(name):
    result = await translated(
        chunk({"role": "assistant", "content": ""}),
        chunk({name: "Hm", "content": None}),
        chunk({name: "m.", "content": ""}),
        chunk({"content": "Yes"}),
        chunk({}, "stop"),
        DONE,
    )
    assert [(delta.reasoning, delta.text) for delta in result.deltas] == [
        ("Hm", ""),
        ("m.", ""),
        ("", "Yes"),
        ("", ""),
    ]
    whole = merged(result.deltas)
    assert (whole.relayed_tokens, whole.reasoning_tokens) == (3, 2)


def test_whole_answer_has_all_parts():
    message = {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "I ask.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        ],
    }
    counts = {
        "completion_tokens": 9,
        "prompt_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    whole = merged(answered(message, "tool_calls", usage=counts))
    assert (whole.reasoning, whole.text, whole.finish_reason) == ("Hm.", "I ask.", "tool_calls")
    assert [(piece.number, piece.name, piece.arguments) for piece in whole.calls] == [
        (0, "f", "{}"),
        (1, "f", '{"x": 1}'),
    ]
    assert (whole.relayed_tokens, whole.reasoning_tokens, whole.raw) == (9, 3, [])


def pieces(deltas):
    return [(piece.number, piece.name, piece.arguments) for delta in deltas for piece in delta.calls]


@pytest.mark.parametrize(
    "events",
    [
        [
            call(index=0, id="a", name="f"),
            call('{"x"', index=0),
            call(": 1}", index=0),
            call("{}", index=1, id="b", name="g"),
        ],
        [call('{"x": 1}', id="a", name="f"), call("{}", id="b", name="g")],  # no index
        [call('{"x": 1}', index=0, id="a", name="f"), call("{}", index=0, id="b", name="g")],  # 0 for all
        [call('{"x": 1}', name="f"), call("{}", name="g")],  # neither
        [call('{"x": 1}', index=7, name="f"), call("{}", index=3, name="g")],  # any order
        [call('{"x": 1}', index=0, name="f"), call(index=0, name=""), call("{}", index=1, name="g")],
    ],
)
async def test_calls_are_numbered_as_they_begin(events):
    result = await translated(*map(chunk, events), chunk({}, "tool_calls"), DONE)
    whole = merged(result.deltas)
    assert pieces([whole]) == [(0, "f", '{"x": 1}'), (1, "g", "{}")]
    assert whole.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "events",
    [
        [call("{}", index=0)],
        [call("{", index=0, name="f"), call("{", index=1, name="g"), call("}", index=0)],
        [call("{", index=0, name="f"), {"content": "and"}, call("}", index=0)],
    ],
)
async def test_piece_of_a_call_that_is_not_open_is_a_failure(events):
    with pytest.raises(RelayFailed, match="a tool call that has ended, or has no name"):
        await translated(*map(chunk, events))


@pytest.mark.parametrize(
    ("reported", "expected"),
    [("length", "length"), ("max_tokens", "length"), ("stop", "stop"), ("content_filter", "stop")],
)
async def test_finish_reason_is_one_of_ours(reported, expected):
    result = await translated(chunk({"content": "a"}), chunk({}, reported), DONE)
    assert result.deltas[-1].finish_reason == expected
    assert merged(answered({"content": "a"}, reported)).finish_reason == expected


@pytest.mark.parametrize(("reported", "expected"), [("stop", "tool_calls"), ("length", "length")])
async def test_answer_with_calls_ends_with_them_unless_it_is_cut(reported, expected):
    result = await translated(chunk(call("{}", index=0, name="f")), chunk({}, reported), DONE)
    assert result.deltas[-1].finish_reason == expected


@pytest.mark.parametrize(
    ("reported", "expected"), [("END", "END"), ("other", None), (17, None), (None, None), ([1], None)]
)
async def test_only_a_requested_stop_string_is_the_stop_reason(reported, expected):
    job = translated_job(stop=("END", "FIN"))
    end = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": reported}
    last = b"data: %s\n\n" % json.dumps({"choices": [end]}).encode()
    result = await translated(chunk({"content": "a"}), last, DONE, job=job)
    assert result.deltas[-1].stop_reason == expected


async def test_text_that_follows_the_end_of_a_choice_belongs_to_it():
    result = await translated(
        chunk({"content": "a"}), chunk({"content": "b"}, "stop"), chunk({"content": "c"}), DONE
    )
    assert (result.text(), result.tokens) == ("abc", 3)
    assert [delta.finish_reason for delta in result.deltas if delta.finish_reason] == ["stop"]


async def test_choices_that_were_not_requested_are_ignored():
    result = await translated(
        chunk({"content": "a"}),
        chunk({"content": "x"}, index=1),
        chunk({}, "stop", index=-1),
        chunk({}, "stop"),
        DONE,
    )
    assert [delta.index for delta in result.deltas] == [0, 0]


async def test_each_choice_has_its_text_and_its_end():
    job = translated_job(n=2)
    into = await translated(
        chunk({"content": "a"}),
        chunk({"content": "b"}, index=1),
        chunk({}, "length"),
        chunk({}, "stop", index=1),
        usage(completion_tokens=6),
        DONE,
        job=job,
        sink=CollectedDeltas(2),
    )
    assert (into.text(0), into.text(1), into.tokens) == ("a", "b", 6)
    assert [delta.finish_reason for delta in into.deltas] == [None, None, "length", "stop"]


# Token counts -----------------------------------------------------------------------------------------


async def test_reported_tokens_replace_the_count_of_events():
    counts = {
        "prompt_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    result = await translated(
        chunk({"reasoning": "several words"}),
        chunk({"content": "a"}),
        chunk({}, "stop"),
        usage(**counts),
        DONE,
    )
    whole = merged(result.deltas)
    assert (whole.relayed_tokens, whole.reasoning_tokens, whole.cached_tokens) == (5, 4, 8)
    assert whole.translation == Translation("openai", 11)


IMPOSSIBLE = [
    {"prompt_tokens": -1, "completion_tokens": -1},
    {"prompt_tokens": 1.5, "completion_tokens": "7"},
    {"prompt_tokens": 10**12, "completion_tokens": 10**12},
    {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": 7},
    {"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 3}},
]


@pytest.mark.parametrize("counts", IMPOSSIBLE)
async def test_impossible_numbers_are_ignored(counts):
    result = await translated(chunk({"content": "a"}), chunk({"content": "b"}, "stop"), usage(**counts), DONE)
    whole = merged(result.deltas)
    assert (whole.relayed_tokens, whole.cached_tokens, whole.translation) == (2, 0, Translation("openai"))
    assert whole.reasoning_tokens == 0
    whole = merged(answered({"content": "a" * 12}, usage=counts))
    assert (whole.relayed_tokens, whole.cached_tokens, whole.translation) == (3, 0, Translation("openai"))


@pytest.mark.parametrize(("more", "is_possible"), [(0, True), (1, False)])
async def test_prompt_has_at_most_a_token_a_byte_and_those_of_the_template(more, is_possible):
    job = translated_job()
    tokens = len(job.relay.chat.body) + TEMPLATE_TOKENS + more
    result = await translated(chunk({"content": "a"}, "stop"), usage(prompt_tokens=tokens), DONE, job=job)
    assert result.deltas[-1].translation == Translation("openai", tokens if is_possible else None)


# Failures and bounds ----------------------------------------------------------------------------------


UNREADABLE = [
    b"{",
    b'{"choices":7}',
    b'{"choices":[{"delta":{"content":7}}]}',
    b'{"choices":[{"delta":{"content":"\xff"}}]}',
    b'{"choices":[7]}',
]


@pytest.mark.parametrize("data", UNREADABLE)
async def test_unreadable_event_is_a_failure(data):
    with pytest.raises(RelayFailed, match="an event that is no chunk of a chat"):
        await translated(chunk({"content": "a"}), b"data: " + data + b"\n\n")


@pytest.mark.parametrize(
    "data", [*UNREADABLE, b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{"message":{"content":[]}}]}']
)
def test_unreadable_response_is_a_failure(data):
    job = translated_job(stream=False)
    with pytest.raises(RelayFailed, match="chat completion"):
        translated_response("stub", job, job.relay.chat, data)


def test_reported_error_is_a_failure():
    job = translated_job(stream=False)
    with pytest.raises(NodeFailed, match="stub failed: out of memory"):
        translated_response("stub", job, job.relay.chat, b'{"error": {"message": "out of memory"}}')


async def test_comments_and_empty_events_have_no_content(monkeypatch):
    monkeypatch.setattr(upstream_stream, "SILENT_EVENTS", 20)
    silent = [b": ping\n\n", chunk({"content": ""}), chunk({}, index=1)]
    result = await translated(*silent * 6, chunk({"content": "a"}, "stop"), DONE)
    assert result.text() == "a"
    with pytest.raises(RelayFailed, match="21 events without content"):
        await translated(*silent * 7)


async def test_an_event_is_bounded():
    with pytest.raises(RelayFailed, match="an event of more than 5000 bytes"):
        await translated(chunk({"content": "x" * 10_000})[:-2], event_bytes=5_000)


async def test_a_stream_is_bounded(monkeypatch):
    monkeypatch.setattr(upstream_stream, "STREAM_BYTES", 10_000)
    with pytest.raises(RelayFailed, match="more than 10000 bytes"):
        await translated(*[chunk({"content": "word"})] * 1_000)


async def test_answer_without_text_is_legal():
    result = await translated(chunk({}, "stop"), DONE)
    (last,) = result.deltas
    assert (last.text, last.relayed_tokens, last.finish_reason) == ("", 0, "stop")
