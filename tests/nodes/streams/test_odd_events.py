"""Odd streams of other servers: whatever stands between the pieces, the client gets the text and one end.

The streams of all dialects are relayed; those of chats are translated, too. Each is compared with the same
stream without its oddity, and its text with the plain concatenation of the pieces.
"""

import json
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.frontends.test_full_nodes import run_job
from fairlead.base.errors import NodeFull, NodeLimited, NodeRefused, NodeUnsuited
from fairlead.base.formats.server_sent_events import is_comment, split_events
from fairlead.nodes.streams.deltas import Deltas
from fairlead.nodes.streams.relayed_stream import RelayedStream
from fairlead.nodes.streams.translation import TranslatedStream
from fairlead.nodes.streams.upstream_stream import RelayFailed
from nodes.listening import CHAT, generated, relayed_job
from nodes.scripted import full_response, node, scripted
from nodes.streams.test_relay import _FakeResponse
from nodes.streams.test_translation import translated_job
from nodes.stub_server import stream_events, text
from upstream_readers import READERS

WORDS = ["Hello", " there", ",", " friend", "."]
DONE = b"data: [DONE]\n\n"


def event(document, name=None):
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode()


def chunk(*choices, **more):
    return event({"id": "c1", "choices": list(choices), **more})


def choice(content=None, finish_reason=None, index=0, **delta):
    said = delta if content is None else {"content": content, **delta}
    return {"index": index, "delta": said, "finish_reason": finish_reason}


def piece(content=None, finish_reason=None, index=0, **delta):
    return chunk(choice(content, finish_reason, index, **delta))


def call(arguments, name=None, position=0):
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"index": position, "function": function, **({"id": f"call_{position}"} if name else {})}


def answer(finish_reason=None, last="stop"):
    """Return a whole chat, in which all pieces but the last have a finish reason."""
    return [
        piece("", role="assistant"),
        *(piece(word, finish_reason) for word in WORDS),
        piece(None, last),
        DONE,
    ]


# What is relayed and translated ----------------------------------------------------------------------


async def relayed(reads, *, path=CHAT, n=1):
    """Return the bytes that the client gets, without comments."""
    deltas = Deltas(n)
    job = relayed_job(path, n=n)
    await RelayedStream("stub", job, READERS[path], deltas, event_bytes=100_000).run(_FakeResponse(*reads))
    await deltas.ended()
    raw = b"".join(part for delta in await deltas.take() for part in delta.raw)
    events = split_events(raw.replace(b"\r\n", b"\n"))
    return b"".join(each for each in events if not is_comment(each))


async def translated(reads, *, path=CHAT, n=1):
    """Return the text, the calls and the end of each choice, and the tokens of all."""
    assert path == CHAT
    job = translated_job(n=n)
    deltas = Deltas(n)
    stream = TranslatedStream("stub", job, job.relay.chat, deltas, event_bytes=100_000)
    await stream.run(_FakeResponse(*reads))
    await deltas.ended()
    said = {index: ["", []] for index in range(n)}
    tokens = 0
    for delta in await deltas.take():
        assert len(said[delta.index]) == 2, "nothing follows the end"
        said[delta.index][0] += delta.reasoning + delta.text
        said[delta.index][1] += delta.calls
        said[delta.index] += [delta.finish_reason] if delta.finish_reason else []
        tokens += delta.relayed_tokens
    return said, tokens


def chunks_of(raw):
    """Return the chunks that the client reads. `openai` fails unless each has a list of choices."""
    data = [part.strip(b"\n").removeprefix(b"data: ") for part in raw.split(b"\n\n")[:-1]]
    assert data[-1] == b"[DONE]"
    chunks = [json.loads(one) for one in data[:-1]]
    assert all(isinstance(each["choices"], list) for each in chunks)
    return chunks


def text_of(raw, index=0):
    """Return the text of a choice, after checking that it has one end, behind all text."""
    choices = [each for one in chunks_of(raw) for each in one["choices"] if each["index"] == index]
    reasons = [each["finish_reason"] for each in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] in ("stop", "length", "tool_calls")
    return "".join(each["delta"].get("content") or "" for each in choices)


# The matrix: an odd event at any place of any stream -------------------------------------------------

TOOLS = [
    piece("", role="assistant"),
    piece(tool_calls=[call("", "look")]),
    piece(tool_calls=[call('{"at": ')]),
    piece(tool_calls=[call("1}")]),
    piece(None, "tool_calls"),
    DONE,
]
TWO = stream_events(CHAT, {"n": 2, "stream_options": {"include_usage": True}}, 4, 1)
STREAMS = {
    "chat": (CHAT, 1, answer()),
    "usage": (CHAT, 1, stream_events(CHAT, {"stream_options": {"include_usage": True}}, 4, 1)),
    "two choices": (CHAT, 2, TWO),
    "calls": (CHAT, 1, TOOLS),
    **{
        path: (path, 1, stream_events(path, {}, 4, 1))
        for path in ("/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
    },
}

ROUTES = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"]
# Clients of both read the text of the other: the members of their events are the same.
ALIKE = [{CHAT, "/v1/completions"}, {"/api/chat", "/api/generate"}]


@pytest.mark.parametrize(
    ("path", "other"),
    [pair for pair in product(ROUTES, ROUTES) if len({*pair}) == 2 and {*pair} not in ALIKE],
)
async def test_stream_of_another_dialect_is_a_failure_and_no_empty_answer(path, other):
    deltas = Deltas(1)
    stream = RelayedStream("stub", relayed_job(path), READERS[path], deltas, event_bytes=100_000)
    with pytest.raises(RelayFailed):
        await stream.run(_FakeResponse(*stream_events(other, {}, 4, 1)))


OBJECTS = ["null", "5", "[]", '"ping"', "{}", '{"status": "processing"}', '{"id": "c1", "choices": null}']
OF_CHUNKS = ['{"type": "ping"}', '{"id": "c1", "choices": []}', '{"error": null}', '{"error": ""}']
NOISE = {
    "objects": [event(one) for one in OBJECTS],
    "objects with a name": [event(one, "heartbeat") for one in OBJECTS],
    "no object": [event("heartbeat"), b"data:\n\n", b"data\n\n", b"event: ping\n\n", event("", "ping")],
    "no data": [b": keep-alive\n\n", b"id: 7\nretry: 10\n\n", b"\n\n"],
    "unknown types": [event({"type": "keepalive", "sequence_number": 3}), event({"type": "heartbeat"}, "x")],
}


@pytest.mark.parametrize(("stream", "kind"), [*product(STREAMS, NOISE)])
async def test_event_that_says_nothing_changes_nothing_at_any_place(stream, kind):
    path, n, events = STREAMS[stream]
    noise = NOISE[kind]
    if path.startswith("/api/"):
        noise = [one.encode() + b"\n" for one in OBJECTS] + [b"\n", b"keep-alive\n"]
    elif n == 2 or path in (CHAT, "/v1/completions"):
        noise = noise + [event(one) for one in OF_CHUNKS]
    plain = await relayed(events, path=path, n=n)
    for odd, place in product(noise, (0, 1, len(events) // 2, len(events) - 1)):
        noisy = [*events[:place], odd, *events[place:]]
        for reads in (noisy, [b"".join(noisy)]):
            assert await relayed(reads, path=path, n=n) == plain
            if path == CHAT:
                assert await translated(reads, n=n) == await translated(events, n=n)


@pytest.mark.parametrize("stream", STREAMS)
async def test_stream_without_oddities_is_relayed_as_it_is(stream):
    path, n, events = STREAMS[stream]
    raw = await relayed(events, path=path, n=n)
    assert sorted(raw.split(b"\n")) == sorted(b"".join(events).split(b"\n"))
    if n == 1:
        assert raw == b"".join(events)
    else:
        assert [text_of(raw, index) for index in range(n)] == [text(4)] * n


async def test_noise_is_bounded_between_two_texts():
    ping = event({"type": "ping"})
    for run in (relayed, translated):
        with pytest.raises(RelayFailed, match=r"events without content|bytes beside its answer"):
            await run([ping * 11_000, *answer()])
        often = [each for word in WORDS * 200 for each in (ping * 9, piece(word))]
        assert await run([*often, *answer()]) == await run([*map(piece, WORDS * 200), *answer()])


# Ends ------------------------------------------------------------------------------------------------

ENDS = {
    "empty": answer(""),
    "empty in the first": [piece("", "", role="assistant"), *answer()[1:]],
    "the word null": answer("null"),
    "unknown words": answer("in_progress"),
    "an end in every chunk": answer("stop", last="stop"),
    "an end in every chunk with text, and none alone": [*answer("stop")[:-2], DONE],
    "an empty word to the end": [*answer("")[:-2], DONE],
    "no end": [*answer()[:-2], DONE],
    "two ends": [*answer()[:-1], piece(None, "stop"), DONE],
    "usage behind the end": [*answer()[:-1], chunk(usage={"completion_tokens": 5}), DONE],
    "usage beside null": [*answer()[:-1], event({"choices": None, "usage": {"completion_tokens": 5}}), DONE],
    "usage alone": [*answer()[:-1], event({"usage": {"completion_tokens": 5}}), DONE],
    "text behind the end": [*answer()[:4], piece(None, "stop"), *answer()[4:]],
    "text behind all": [*answer(), piece("more")],
}


@pytest.mark.parametrize("name", ENDS)
async def test_client_gets_the_whole_text_and_one_end_behind_it(name):
    for reads in (ENDS[name], [b"".join(ENDS[name])]):
        raw = await relayed(reads)
        assert text_of(raw) == "".join(WORDS)
        said, _ = await translated(reads)
        assert said == {0: ["".join(WORDS), [], "stop"]}
    has_usage = name.startswith("usage")
    assert [each["usage"] for each in chunks_of(raw) if "usage" in each] == [
        {"completion_tokens": 5}
    ] * has_usage


TWO_ENDS = {
    "apart": [
        piece("a", "stop", 0),
        piece("x", "stop", 1),
        piece("b", "stop", 0),
        piece("y", "length", 1),
        DONE,
    ],
    "in one chunk": [
        chunk(choice("a", "stop", 0), choice("x", "", 1)),
        chunk(choice("b", "stop", 0), choice("y", "length", 1), usage={"completion_tokens": 4}),
        DONE,
    ],
    "of one alone": [
        piece("x", None, 1),
        chunk(choice("ab", "stop"), choice("y", None, 1)),
        piece(None, "length", 1),
        DONE,
    ],
}


@pytest.mark.parametrize("name", TWO_ENDS)
async def test_end_of_each_of_two_choices_stands_behind_its_own_text(name):
    raw = await relayed(TWO_ENDS[name], n=2)
    assert (text_of(raw, 0), text_of(raw, 1)) == ("ab", "xy")
    said, _ = await translated(TWO_ENDS[name], n=2)
    assert said == {0: ["ab", [], "stop"], 1: ["xy", [], "length"]}


async def test_calls_that_end_in_every_chunk_are_whole():
    events = [each.replace(b'"finish_reason": null', b'"finish_reason": "tool_calls"') for each in TOOLS]
    chunks = chunks_of(await relayed(events))
    pieces = [one["choices"][0]["delta"].get("tool_calls", []) for one in chunks]
    assert "".join(part["function"]["arguments"] for each in pieces for part in each) == '{"at": 1}'
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None] * 4 + ["tool_calls"]
    assert await translated(events) == await translated(TOOLS)


async def test_choice_that_never_began_gets_no_end():
    chunks = chunks_of(await relayed(answer(), n=2))
    assert {each["index"] for one in chunks for each in one["choices"]} == {0}


@pytest.mark.parametrize("whole", [answer(), answer("stop")])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
async def test_last_event_needs_no_empty_line(whole, end):
    body = b"".join(whole).removesuffix(b"\n\n") + end
    assert text_of(await relayed([body])) == "".join(WORDS)
    assert (await translated([body]))[0] == {0: ["".join(WORDS), [], "stop"]}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
async def test_last_event_of_other_dialects_needs_no_empty_line(path):
    body = b"".join(stream_events(path, {}, 4, 1))
    assert (await relayed([body.rstrip(b"\n")], path=path)).rstrip(b"\n") == body.rstrip(b"\n")


async def test_half_an_event_at_the_end_is_a_failure():
    for run in (relayed, translated):
        with pytest.raises(RelayFailed, match="before its end"):
            await run([b"".join(answer()[:5]) + b'data: {"choices": [{"index": 0, "del'])


# Errors ----------------------------------------------------------------------------------------------

ERRORS = [
    ({"error": {"message": "bad", "type": "invalid_request_error", "code": 400}}, NodeRefused, 400),
    ({"error": {"message": "bad", "type": "invalid_request_error", "code": None}}, NodeRefused, 400),
    ({"error": {"message": "bad", "type": "BadRequestError", "code": "x"}}, NodeRefused, 400),
    ({"error": {"message": "bad", "code": "context_length_exceeded"}}, NodeRefused, 400),
    ({"error": {"message": "bad", "code": "422"}}, NodeRefused, 422),
    ({"error": {"message": "bad", "status": 422}}, NodeRefused, 422),
    ({"error": "bad", "code": 413}, NodeRefused, 413),
    ({"error": "bad", "error_type": "validation"}, NodeRefused, 400),
    ({"object": "error", "message": "bad", "code": 400}, NodeRefused, 400),
    ({"detail": "bad", "status": 422}, NodeRefused, 422),
    ({"type": "error", "error": {"type": "invalid_request_error", "message": "bad"}}, NodeRefused, 400),
    ({"error": {"message": "bad", "code": 404}}, NodeUnsuited, None),
    ({"error": {"message": "bad", "code": 429}}, NodeLimited, None),
    ({"error": {"message": "bad", "code": "rate_limit_exceeded"}}, NodeLimited, None),
    ({"error": {"message": "bad", "code": "insufficient_quota"}}, NodeUnsuited, None),
    ({"error": {"message": "bad", "code": 503}}, NodeFull, None),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "bad"}}, NodeFull, None),
    ({"error": {"message": "bad", "code": 500}}, RelayFailed, None),
    ({"error": {"message": "bad", "code": 200}}, RelayFailed, None),
    ({"error": {"message": "bad"}}, RelayFailed, None),
    ({"error": "bad"}, RelayFailed, None),
    ({"object": "error", "message": "bad"}, RelayFailed, None),
]
OTHER_FORMS = [
    (event({"message": "bad", "code": 400}, "error"), NodeRefused, 400),
    (event("bad", "error"), RelayFailed, None),
    (b'error: {"message": "bad", "code": 400}\n\n', NodeRefused, 400),
]
WITH_EVENTS = [(event(error), kind, status) for error, kind, status in ERRORS] + OTHER_FORMS
RUNS = [
    (relayed, CHAT),
    (translated, CHAT),
    *((relayed, path) for path in ("/v1/completions", "/v1/responses", "/v1/messages")),
]


async def check_error(run, path, reads, kind, status):
    with pytest.raises(kind) as raised:
        await run(reads, path=path)
    assert type(raised.value) is kind
    assert "bad" in raised.value.message
    assert status is None or raised.value.status == status


@pytest.mark.parametrize(("run", "path"), RUNS)
async def test_error_in_place_of_an_answer_is_what_it_says(run, path):
    role = [] if path == "/v1/completions" else stream_events(path, {}, 4, 1)[:1]
    for (error, kind, status), before in product(WITH_EVENTS, ([], role, [event({"id": 1})])):
        await check_error(run, path, [*before, error], kind, status)


async def test_error_in_a_line_is_what_it_says():
    errors = [each for each in ERRORS if "object" not in each[0]]  # a message is a part of chats there
    for path, (error, kind, status) in product(("/api/chat", "/api/generate"), errors):
        line = json.dumps(error).encode() + b"\n"
        await check_error(relayed, path, [line], kind, status)


@pytest.mark.parametrize(("run", "path"), RUNS)
async def test_error_in_the_middle_is_the_request_s_or_a_failure(run, path):
    events = stream_events(path, {}, 4, 1)[:-2]
    for error, kind, status in WITH_EVENTS:
        late = RelayFailed if issubclass(kind, NodeFull) else kind
        await check_error(run, path, [*events, error], late, status)


async def test_failed_response_is_an_error_until_the_answer_has_begun():
    path = "/v1/responses"
    events = stream_events(path, {}, 4, 1)
    error = {"code": "rate_limit_exceeded", "message": "bad"}
    failed = event({"type": "response.failed", "response": {"status": "failed", "error": error}})
    await check_error(relayed, path, [events[0], failed], NodeLimited, None)
    begun = [*events[:-2], failed]
    assert await relayed(begun, path=path) == b"".join(begun)


@pytest.mark.parametrize("through_front", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", [400, 500, None])
async def test_only_an_error_of_the_node_is_tried_elsewhere(code, stream, through_front, autojump_clock):
    body = {"error": {"message": "messages must alternate", "code": code}}
    if stream:
        answers = [
            full_response(event(body), "text/event-stream"),
            full_response(b"".join(answer()), "text/event-stream"),
        ]
    else:
        whole = {"choices": [{"index": 0, "message": {"content": "hi"}}]}
        answers = [full_response(json.dumps(one).encode()) for one in (body, whole)]
    nodes = {"a": answers, "b": answers}
    job = relayed_job(stream=stream)
    attempts, error = await run_job(nodes, through_front=through_front, relay=job.relay, stream=stream)
    if code == 400:
        assert isinstance(error, NodeRefused)
        assert (error.status, error.message) == (400, "remote answered 400: messages must alternate")
        assert len(attempts.nodes) == 1
    else:
        assert sorted(attempts.nodes[:2]) == ["a", "b"]


# Whole responses of public reports, and everything at once -------------------------------------------

REPORTED = {
    "finish_reason_empty": answer("")[1:],
    "finish_reason_stop_in_every_chunk": [*answer("stop")[1:-2], DONE],
    "choices_null_first": [event({"id": "c1", "choices": None}), *answer()[1:]],
    "ping_event_between_chunks": [*answer()[1:3], event({"type": "ping"}, "ping"), *answer()[3:]],
    "done_without_empty_line": [*answer()[1:-1], b"data: [DONE]"],
}


@pytest.mark.parametrize("name", REPORTED)
@pytest.mark.parametrize("dialects", [None, ("openai",)])
async def test_stream_of_a_report_is_served_whole(name, dialects):
    response = full_response(b"".join(REPORTED[name]), "text/event-stream", "Connection: close")
    job = relayed_job() if dialects is None else translated_job()
    with scripted(lambda _request: [response]):
        result = await generated(node(dialects=dialects), job)
    assert result.error is None
    assert result.text() == "".join(WORDS)
    assert [delta.finish_reason for delta in result.deltas if delta.finish_reason] == ["stop"]
    if dialects is None:
        assert text_of(result.raw) == "".join(WORDS)


ALL_NOISE = [*(odd for kind in NOISE.values() for odd in kind), *map(event, OF_CHUNKS)]


@given(st.data())
async def test_any_oddities_at_any_cut_leave_the_text_and_one_end(data):
    n = data.draw(st.integers(1, 2))
    words = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.text("añ \n", min_size=1)), max_size=6))
    reasons = st.sampled_from([None, None, "", "null", "stop", "length", "odd"])
    events = [piece(word, data.draw(reasons), index) for index, word in words]
    events += [piece(None, "stop", index) for index in range(n) if data.draw(st.booleans())]
    if not events:  # else no event is a part of an answer, which is a failure
        events.append(piece(None, "stop"))
    for odd, place in data.draw(
        st.lists(st.tuples(st.sampled_from(ALL_NOISE), st.integers(0, len(events))), max_size=5)
    ):
        events.insert(place, odd)
    body = b"".join([*events, DONE])
    if data.draw(st.booleans()):
        body = body.replace(b"\n", b"\r\n")
    if data.draw(st.booleans()):
        body = body.rstrip(b"\r\n")
    cuts = data.draw(st.lists(st.integers(1, len(body) - 1), max_size=6))
    reads = [body[begin:end] for begin, end in pairwise([0, *sorted({*cuts}), len(body)])]
    raw = await relayed(reads, n=n)
    said, _ = await translated(reads, n=n)
    for index in range(n):
        expected = "".join(word for at, word in words if at == index)
        assert said[index][:2] == [expected, []]
        if any(b'"index": %d' % index in each for each in events):
            assert text_of(raw, index) == expected


@given(
    st.sampled_from([name for name in STREAMS if name not in ("/api/chat", "/api/generate")]),
    st.lists(st.tuples(st.sampled_from(ALL_NOISE[: -len(OF_CHUNKS)]), st.integers(0, 30)), max_size=5),
    st.lists(st.integers(1, 2000), max_size=6),
)
async def test_noise_at_any_cut_changes_no_stream(stream, odd, cuts):
    path, n, events = STREAMS[stream]
    noisy = list(events)
    for one, place in odd:
        noisy.insert(min(place, len(noisy) - 1), one)
    body = b"".join(noisy)
    edges = [0, *sorted({cut for cut in cuts if cut < len(body)}), len(body)]
    reads = [body[begin:end] for begin, end in pairwise(edges)]
    assert await relayed(reads, path=path, n=n) == await relayed(events, path=path, n=n)


# Streams of another API ------------------------------------------------------------------------------

MESSAGES = stream_events("/v1/messages", {}, 4, 1)


@pytest.mark.parametrize(
    ("run", "path", "events", "named"),
    [
        (relayed, "/v1/messages", answer(), '"delta": {"content": "", "role": "assistant"}'),
        (relayed, "/v1/responses", answer(), '"delta": {"content": "", "role": "assistant"}'),
        *((run, CHAT, MESSAGES[:1], "message_start") for run in (relayed, translated)),
        *((run, path, [], "an empty stream") for run, path in RUNS),
    ],
)
async def test_stream_in_the_format_of_another_api_is_a_failure_that_names_what_came(
    run, path, events, named
):
    before_done = [each for each in events if each != DONE]
    with pytest.raises(RelayFailed, match="stub did not answer in the format of its API") as raised:
        await run([*before_done, DONE], path=path)
    assert named in raised.value.message
