"""The meaning of server-sent events in each API."""

import json

import pytest

from fairlead.base.upstream_events import UpstreamError
from fairlead.dialects.event_reader import DONE, NOISE, NOTHING, UNKNOWN
from nodes.stub_server import stream_events, text
from upstream_readers import CHAT_READER, READERS

RESPONSES, MESSAGES = READERS["/v1/responses"], READERS["/v1/messages"]


def event_of(document, line="data: "):
    """Return an event with a document."""
    return f"{line}{json.dumps(document)}\n\n".encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_text_and_end_of_a_stream_are_read_in_every_api(path):
    events = [READERS[path].read_event(event) for event in stream_events(path, {}, 8, 1)]
    assert text() == "".join(event.text for event in events)
    assert events[-1].is_end
    assert sum(event.finished is not None for event in events) == 1
    assert not any(event.is_beginning for event in events[2:-4])
    assert all(event.is_known for event in events)


@pytest.mark.parametrize(
    ("event", "meaning"),
    [
        (b": queued position=3\n\n", NOTHING),
        (b"event: x\nid: 3\n\n", NOISE),
        (b"data: [DONE]\n\n", DONE),
        (b"data:[DONE]\r\n\r\n", DONE),
        (b"data: {half\n\n", UNKNOWN),
        (b'data: {"choices": [{"delta": {"content": "\\ud800"}}]}\n\n', UNKNOWN),
        (b'data: {"x": NaN, "choices": []}\n\n', UNKNOWN),
        (b'data: {"x": ' + b"[" * 100_000 + b"\n\n", UNKNOWN),
    ],
)
@pytest.mark.parametrize("reader", [CHAT_READER, RESPONSES, MESSAGES])
def test_empty_events_are_distinguished_from_unreadable_ones(reader, event, meaning):
    assert meaning == reader.read_event(event)


@pytest.mark.parametrize("content", ["[1]", '"\xff"'])
def test_event_with_choices_that_cannot_be_read_may_have_text(content):
    event = b'data: {"choices": [{"delta": {"content": %s}}]}\n\n' % content.encode("latin-1")
    assert CHAT_READER.read_event(event) == UNKNOWN


@pytest.mark.parametrize(
    "data", [b"", b"null", b"5", b"\xff", b"heartbeat", b"[]", b'"ping"', b"{}", b'{"some": "thing"}']
)
@pytest.mark.parametrize("reader", [CHAT_READER, RESPONSES, MESSAGES])
def test_event_that_says_nothing_of_the_answer_is_noise(reader, data):
    assert reader.read_event(b"event: heartbeat\ndata: " + data + b"\n\n") == NOISE


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ({"reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning_content": "hm", "reasoning": "hm"}, "hm"),
        ({"refusal": "no"}, "no"),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, "f"),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, '{"a"'),
        ({"content": None, "role": "assistant"}, ""),
    ],
)
def test_everything_that_is_generated_counts_as_text(delta, expected):
    event = event_of({"choices": [{"index": 2, "delta": delta, "finish_reason": None}]})
    assert expected == CHAT_READER.read_event(event).text
    assert CHAT_READER.read_event(event).index == 2
    assert (not expected) == CHAT_READER.read_event(event).is_beginning


def test_event_of_several_lines_is_read():
    event = b'event: x\r\ndata: {"choices":\r\ndata: [{"text": "a"}]}\r\n\r\n'
    assert CHAT_READER.read_event(event).text == "a"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "no", "code": 5}}, UpstreamError("no")),
        ({"error": "no"}, UpstreamError("no")),
        (
            {"type": "error", "error": {"type": "overloaded_error", "message": "no"}},
            UpstreamError("no", 529),
        ),
        ({"type": "error", "code": "x", "message": "no"}, UpstreamError("no")),
        ({"error": {"message": "no", "code": 400}}, UpstreamError("no", 400)),
        ({"error": {"message": "no", "code": "429"}}, UpstreamError("no", 429)),
        ({"error": {"message": "no", "code": "rate_limit_exceeded"}}, UpstreamError("no", 429)),
        ({"error": {"message": "no", "code": None, "status": 503}}, UpstreamError("no", 503)),
        (
            {"error": {"message": "no", "type": "invalid_request_error", "code": None}},
            UpstreamError("no", 400),
        ),
        ({"error": {"message": "no", "code": 99999999999}}, UpstreamError("no")),
        ({"error": {"message": "no", "code": 200}}, UpstreamError("no")),
        ({"error": {"message": "no", "code": "1" * 10_000}}, UpstreamError("no")),
    ],
)
@pytest.mark.parametrize("reader", [CHAT_READER, RESPONSES, MESSAGES])
def test_error_message_of_an_event_is_read(reader, event, message):
    assert message == reader.read_event(event_of(event)).error


# Numbers ---------------------------------------------------------------------------------------------

# What a node may report as a number of tokens, and the value that is read.
REPORTS = [
    (b"5", 5),
    (b"0", 0),
    (b"999999999999999", 10**15 - 1),
    (b"1" + b"0" * 30, None),
    (b"9" * 5000, None),
    (b"-5", None),
    (b"-0", None),
    (b"1.5", None),
    (b"7.0", None),
    (b"1e3", None),
    (b"1e999", None),
    (b'"7"', None),
    (b"null", None),
    (b"true", None),
    (b'{"of": 7}', None),
    (b"[7]", None),
    (b"[" * 500 + b"]" * 500, None),
    (b'"\xff"', None),
]


@pytest.mark.parametrize(("reported", "understood"), REPORTS)
@pytest.mark.parametrize("member", [b"completion_tokens", b"output_tokens"])
def test_token_count_that_is_not_a_plain_integer_is_ignored(reported, understood, member):
    usage = b'{"%s": %s, "prompt_tokens": %s}' % (member, reported, reported)
    chunk = b'{"choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": %s}'
    for reader, event in (
        (CHAT_READER, chunk % usage),
        (RESPONSES, b'{"type": "x", "delta": "hi", "response": {"usage": %s}}' % usage),
        (MESSAGES, b'{"type": "x", "delta": {"text": "hi"}, "usage": %s}' % usage),
    ):
        assert reader.read_response(b'{"usage": %s}' % usage).generated == understood
        read = reader.read_event(b"data: " + event + b"\n\n")
        assert (read.text, read.is_known, read.generated) == ("hi", True, understood)


@pytest.mark.parametrize("usage", [b"5", b"null", b"[]", b'"x"', b"true", b"{}", b"[" * 500 + b"]" * 500])
def test_invalid_usage_does_not_affect_the_rest(usage):
    assert CHAT_READER.read_response(b'{"usage": %s}' % usage).generated is None
    event = CHAT_READER.read_event(
        b'data: {"choices": [{"delta": {"content": "hi"}}], "usage": %s}\n\n' % usage
    )
    assert (event.text, event.generated) == ("hi", None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"usage": ',
        b"[]",
        b"5",
        b"null",
        b'{"x": NaN}',
        b'{"x": ' + b"[" * 100_000,
        b"<html></html>",
        b"\xff\xfe{}",
    ],
)
def test_whole_response_must_be_a_json_object(body):
    with pytest.raises(ValueError, match="no JSON object"):
        CHAT_READER.read_response(body)


@pytest.mark.parametrize(
    ("path", "body", "content_bytes"),
    [
        ("/v1/completions", b'{"choices": [{"text": "hello"}]}', 19),
        ("/v1/messages", b'{"content": [{"text": "hello"}]}', 19),
        ("/v1/responses", b'{"output": [], "error": null}', 2),
        ("/v1/embeddings", b'{"data": [{"embedding": [1, 2, 3]}]}', 0),
        ("/v1/messages/count_tokens", b'{"input_tokens": 12}', 0),
    ],
)
def test_content_bytes_of_a_whole_response_are_counted(path, body, content_bytes):
    response = READERS[path].read_response(body)
    assert (response.content_bytes, response.error) == (content_bytes, None)


def test_error_message_of_a_whole_response_is_read():
    answer = CHAT_READER.read_response(b'{"error": {"message": "out of order", "code": 400}}')
    assert answer.error == UpstreamError("out of order", 400)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (b'{"message": "' + b"x" * 1000 + b'"}', "x" * 200),
        (b'"one\\nline\\u001b[31m"', "one line [31m"),
        (b'{"no": "message", "b": 1}', '{"no": "message", "b": 1}'),
        (b'{"message": 5}', '{"message": 5}'),
        (b"[" * 100_000 + b"]" * 100_000, "[" * 200),
        (b'{"message": "\xff"}', '{"message": "\ufffd"}'),
    ],
)
def test_error_message_becomes_one_short_line_of_text(error, reason):
    event = CHAT_READER.read_event(b'data: {"error": ' + error + b"}\n\n")
    if b"[[" in error:
        assert (event.error, event.is_known) == (None, False)
    else:
        assert event.error is not None
        assert event.error.message == reason


@pytest.mark.parametrize(
    ("reader", "document"),
    [
        (
            CHAT_READER,
            {"id": 1, "choices": [{"index": 0, "delta": {"content": "hello"}, "odd": 1.50}], "u": None},
        ),
        (CHAT_READER, {"choices": [{"index": 0, "text": "hello"}]}),
        (
            CHAT_READER,
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "hello"}}]}}]},
        ),
        (RESPONSES, {"type": "response.output_text.delta", "delta": "hello"}),
        (MESSAGES, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hello"}}),
    ],
)
def test_only_the_beginning_of_the_text_is_removed_from_an_event(reader, document):
    event = b"event: e\n" + event_of(document)
    cut = reader.without_beginning(event, "lo")
    assert cut.startswith(b"event: e\ndata: ")
    assert reader.read_event(cut).text == "lo"
    assert json.dumps(document).replace('"hello"', '"lo"') == json.dumps(json.loads(cut.split(b"data: ")[1]))


@pytest.mark.parametrize(
    "members",
    [
        '"tool_calls": 5',
        '"tool_calls": [5, null, {"function": 7}]',
        '"choices": [{"delta": {"content": "x"}}]',
        '"x": 1e999',
        '"x": 1' + "0" * 5000,
        '"x": ' + "[" * 900 + "]" * 900,
        '"x": "\\ud800"',
    ],
)
def test_event_with_unexpected_members_is_cut_or_refused(members):
    choice = b'{"index": 0, "delta": {"content": "hello"}, %s}' % members.encode()
    event = b'data: {"choices": [%s]}\n\n' % choice
    try:
        cut = CHAT_READER.without_beginning(event, "lo")
    except ValueError:
        return
    assert json.loads(cut[6:])["choices"][0]["delta"] == {"content": "lo"}


def test_event_with_several_texts_cannot_be_cut():
    event = event_of({"choices": [{"delta": {"reasoning": "hel", "content": "lo"}}]})
    with pytest.raises(ValueError, match="several pieces"):
        CHAT_READER.without_beginning(event, "lo")


def chunk(content, index=0, **more):
    """Return a chat chunk."""
    choice = {"index": index, "delta": {"content": content}, "finish_reason": None}
    return event_of({"choices": [{**choice, **more.pop("choice", {})}], **more})


def test_plain_text_events_are_read_together():
    assert CHAT_READER.read_plain(chunk("a") + chunk("\n\ndata: ")) == (0, ["a", "\n\ndata: "])
    assert CHAT_READER.read_plain(event_of({"choices": [{"index": 3, "text": "x"}]})) == (3, ["x"])


@pytest.mark.parametrize(
    "events",
    [
        b"",
        chunk("a") + chunk("b", 1),
        chunk("a") + chunk(""),
        chunk("a") + chunk("b", choice={"finish_reason": "stop"}),
        chunk("a") + chunk("b", usage={"completion_tokens": 3}),
        chunk("a") + chunk("b", error={"message": "x"}),
        chunk("a") + chunk(None, choice={"delta": {"tool_calls": [{"index": 0}]}}),
        chunk("a") + event_of({"choices": []}),
        chunk("a") + b": comment\n\n",
        chunk("a") + b"data: [DONE]\n\n",
        chunk("a").replace(b"\n\n", b"\r\n\r\n"),
        chunk("a").replace(b"data: ", b"data:"),
        chunk("a")[:-2] + b"," + chunk("b")[6:],
        b"data: {broken}\n\n",
        b"event: x\n" + chunk("a"),
    ],
)
def test_events_other_than_plain_text_are_not_read_together(events):
    assert CHAT_READER.read_plain(events) is None
