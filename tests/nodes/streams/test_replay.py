"""A second attempt continues a response exactly where the first one stopped, or fails with the reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from msgspec.structs import replace

from fairlead.base.errors import NodeFailed
from fairlead.base.formats.server_sent_events import split_events
from fairlead.base.job import Delta, TokenLogprob
from fairlead.nodes.streams import replay
from fairlead.nodes.streams.replay import RecordingSink, ReplaySink
from first_failure import until_first_failure
from nodes.listening import CollectedDeltas, generated, ready_node, relayed_job, stub
from nodes.stub_server import stream_events, text
from upstream_readers import CHAT_READER, READERS

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
PATHS += ["/api/chat", "/api/generate"]
words = st.lists(st.text("abc ", min_size=1, max_size=4), max_size=8)


def event_deltas(events, reader=CHAT_READER):
    """Return deltas as a relaying node makes them, one for each event, the last with the finish reason."""
    texts = [reader.read_event(event).text for event in events]
    deltas = [
        Delta(0, text, raw=[event], relayed_tokens=bool(text))
        for event, text in zip(events, texts, strict=True)
    ]
    deltas[-1].finish_reason = "stop"
    return deltas


def joined(deltas, sizes):
    """Return the same deltas, some of them merged, as when one read has several events."""
    result = []
    sizes = iter(sizes)
    while deltas:
        size = next(sizes, 1)
        first, *others = [copy(delta) for delta in deltas[:size]]
        for other in others:
            first.merge(other)
        result.append(first)
        deltas = deltas[size:]
    return result


def copy(delta):
    """Return an equal delta: merging changes the lists."""
    return replace(
        delta,
        token_ids=list(delta.token_ids),
        logprobs=list(delta.logprobs),
        raw=list(delta.raw),
        calls=list(map(replace, delta.calls)),
    )


def retried(first, second, reader=CHAT_READER):
    """Return the client's deltas from an attempt that fails after `first` and a retry with `second`."""
    client = CollectedDeltas()
    recorded = RecordingSink(client)
    for delta in first:
        recorded.put(copy(delta))
    replay = ReplaySink(recorded, reader)
    for delta in second:
        replay.put(copy(delta))
    return client


RELAYED = {
    "path": st.sampled_from(PATHS),
    "chunk_words": st.integers(1, 5),
    "other_chunk_words": st.integers(1, 5),
    "sizes": st.lists(st.integers(1, 4), max_size=8),
    "end": st.integers(0, 12),
}
GENERATED = {"data": st.data()}
DIFFERENT = {"sent": words, "other": words}


@given(**RELAYED)
def test_relayed_answer_is_continued_whatever_its_chunks(path, chunk_words, other_chunk_words, sizes, end):
    reader = READERS[path]
    first = event_deltas(stream_events(path, {}, 8, chunk_words), reader)[:-1]
    # Nodes keep the first events until there is text, so at least these were sent.
    first_text = next(number for number, delta in enumerate(first, 1) if delta.text)
    first = first[: first_text + end]
    second = event_deltas(stream_events(path, {}, 8, other_chunk_words), reader)
    client = retried(joined(first, sizes), joined(second, reversed(sizes)), reader)
    assert client.error is None
    assert text() == client.text()
    assert text() == "".join(reader.read_event(event).text for event in reader.split(client.raw))
    assert sum(delta.finish_reason is not None for delta in client.deltas) == 1
    if chunk_words == other_chunk_words:
        assert b"".join(stream_events(path, {}, 8, chunk_words)) == client.raw
        assert 8 / chunk_words <= client.tokens < 8 / chunk_words + 1


@given(**GENERATED)
def test_answer_of_an_engine_is_continued_by_its_tokens(data):
    token_ids = data.draw(st.lists(st.integers(0, 9), max_size=12))
    # A token is a letter. Text may follow its tokens later, at the latest with the end.
    full_text = "".join("abcdefghij"[token] for token in token_ids)

    def attempt(label):
        deltas, token_at, text_at = [], 0, 0
        while token_at < len(token_ids):
            token_end = data.draw(st.integers(token_at + 1, len(token_ids)), label=label)
            text_end = data.draw(st.integers(text_at, token_end), label=label)
            ids = token_ids[token_at:token_end]
            deltas.append(
                Delta(0, full_text[text_at:text_end], ids, [TokenLogprob(each, -1.0) for each in ids])
            )
            token_at, text_at = token_end, text_end
        return [*deltas, Delta(0, full_text[text_at:], finish_reason="length")]

    first = attempt("first")[:-1]
    first = first[: data.draw(st.integers(0, len(first)), label="break")]
    client = retried(first, attempt("second"))
    assert client.error is None
    assert full_text == client.text()
    assert token_ids == [token for delta in client.deltas for token in delta.token_ids]
    assert token_ids == [each.token_id for delta in client.deltas for each in delta.logprobs]
    assert client.deltas[-1].finish_reason == "length"


@given(**DIFFERENT)
def test_different_output_is_never_forwarded(sent, other):
    first = [Delta(0, word, [len(word)]) for word in sent]
    second = [*(Delta(0, word, [len(word)]) for word in other), Delta(0, finish_reason="stop")]
    client = retried(first, second)
    if client.error is None:
        assert "".join(other) == client.text()
        assert [len(word) for word in other] == [
            token for delta in client.deltas for token in delta.token_ids
        ]
    else:
        assert isinstance(client.error, NodeFailed)
        assert "did not repeat" in client.error.message
        assert "".join(sent) == client.text()[: len("".join(sent))]
        assert "".join(other).startswith(client.text()) or "".join(sent) == client.text()


def chat(content, finish_reason=None, **more):
    """Return a chat chunk."""
    choice = {"index": 0, "delta": {"content": content, **more}, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], "id": "x"}).encode() + b"\n\n"


def raw(*events):
    """Return one delta with these events."""
    return Delta(0, "".join(CHAT_READER.read_event(event).text for event in events), raw=list(events))


DIFFERENCES = [
    (raw(chat("one")), raw(chat("two")), "received 'two' instead of 'one'"),
    (raw(chat("one")), raw(chat("on"), chat("", "stop")), "ended earlier"),
    (raw(b'data: {"odd": 1}\n\n'), raw(b'data: {"odd": 1}\n\n'), "cannot be compared"),
    (raw(chat("ab")), raw(chat("abc", reasoning="")), None),
    (raw(chat("xab")), raw(chat("abc", reasoning="x")), "several pieces"),
    (Delta(0, "a", [1, 2]), Delta(0, "a", [1, 3]), "its tokens differ"),
    (Delta(0, "a", [1, 2]), Delta(0, "a", [1], finish_reason="stop"), "ended earlier"),
    (Delta(0, "ab", [1]), Delta(0, "ac", [1]), "received 'ac' instead of 'ab'"),
]


@pytest.mark.parametrize(("first", "second", "message"), DIFFERENCES)
def test_error_quotes_the_difference(first, second, message):
    client = retried([first], [second])
    if message is None:
        assert client.error is None
    else:
        assert client.error is not None
        assert message in client.error.message


def test_nothing_is_sent_after_a_difference():
    client = retried([Delta(0, "a", [1])], [Delta(0, "b", [2]), Delta(0, "c", [3], finish_reason="stop")])
    assert client.text() == "a"
    assert len(client.deltas) == 1


def test_ended_choice_is_not_continued():
    client = CollectedDeltas(2)
    recorded = RecordingSink(client)
    recorded.put(Delta(0, "a", [1], finish_reason="stop"))
    recorded.put(Delta(1, "b", [2]))
    replay = ReplaySink(recorded, CHAT_READER)
    replay.put(Delta(1, "b", [2]))
    replay.put(Delta(0, "a", [1]))
    replay.put(Delta(0, finish_reason="stop"))
    replay.put(Delta(1, "c", [3], finish_reason="stop"))
    assert client.error is None
    assert [client.text(0), client.text(1)] == ["a", "bc"]
    assert sum(delta.finish_reason is not None for delta in client.deltas) == 2


def test_tool_calls_and_reasoning_are_replayed():
    call = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}}]}
    rest = {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}
    first = [raw(chat(None, reasoning_content="hm")), raw(chat(None, **call))]
    second = [raw(chat(None, reasoning_content="hm"), chat(None, **call)), raw(chat(None, **rest))]
    client = retried(first, second)
    assert client.error is None
    assert client.raw.count(b"c1") == 1
    assert client.raw.endswith(chat(None, **rest))


def test_relayed_response_can_continue_one_of_an_engine():
    client = retried([Delta(0, "w0 w", [1, 2])], event_deltas(stream_events(PATHS[0], {}, 8, 1)))
    assert client.error is None
    assert text() == client.text()


async def test_output_of_a_real_node_can_continue_a_response_of_an_engine():
    async with stub() as server:
        for choices in (1, 2):  # with several choices, the end comes without an event
            full_text = await generated(ready_node(server), relayed_job(n=choices, delay_s=0.001))
            begun = [Delta(index, "w0 w", [1, 2]) for index in range(choices)]
            client = CollectedDeltas(choices)
            recorded = RecordingSink(client)
            for delta in begun:
                recorded.put(delta)
            replay = ReplaySink(recorded, CHAT_READER)
            for delta in full_text.deltas:
                replay.put(delta)
            assert client.error is None
            assert [text()] * choices == [client.text(index) for index in range(choices)]
            assert client.over.is_set()


def test_replay_of_an_engines_response_with_missing_tokens_fails():
    client = retried([Delta(0, "w0 ", [1, 2])], [Delta(0, "w0 ", [1]), Delta(0, finish_reason="stop")])
    assert "it ended earlier" in str(client.error)


def test_response_of_an_engine_can_continue_a_relayed_one():
    second = [Delta(0, "w0 ", [1]), Delta(0, "w1 ", [2]), Delta(0, "w2 ", [3], finish_reason="stop")]
    client = retried([raw(chat("w0 w"))], second)
    assert client.error is None
    assert client.text() == "w0 w1 w2 "


def test_third_attempt_is_possible():
    client = CollectedDeltas()
    deltas = [Delta(0, letter, [number]) for number, letter in enumerate("abcd")]
    recorded = RecordingSink(client)
    recorded.put(copy(deltas[0]))
    second = ReplaySink(recorded, CHAT_READER)
    for delta in deltas[:3]:
        second.put(copy(delta))
    third = ReplaySink(recorded, CHAT_READER)
    for delta in deltas:
        third.put(copy(delta))
    third.put(Delta(0, finish_reason="stop"))
    assert client.error is None
    assert client.text() == "abcd"


@pytest.mark.parametrize("after", range(2, 10))
@pytest.mark.parametrize("how", ["reset", "half", "broken", "end"])
async def test_client_receives_one_response_from_two_servers(after, how):
    client = CollectedDeltas()
    recorded = RecordingSink(_IgnoringFailures(client))
    async with stub() as failing, stub() as working:
        first = ready_node(failing)
        failed = _Recorded(recorded)
        async with first.generate(relayed_job(stub={"how": how, "after": after}), failed):
            await failed.over.wait()
        assert failed.error is not None
        replay = _Recorded(ReplaySink(recorded, CHAT_READER, node="working"))
        job = relayed_job(stub={"chunk_words": 3}, stream_options={"include_usage": True})
        async with ready_node(working).generate(job, replay):
            await replay.over.wait()
        single_attempt = await generated(ready_node(working), relayed_job())
    assert client.error is None
    assert single_attempt.text() == client.text()
    assert text() == "".join(CHAT_READER.read_event(event).text for event in split_events(client.raw))
    assert client.raw.endswith(b"data: [DONE]\n\n")
    assert client.raw.count(b'"role"') == 1


class _IgnoringFailures:
    """Forwards to another sink except failures, as the gateway does for a first attempt."""

    def __init__(self, into):
        self._into = into

    def put(self, delta):
        self._into.put(delta)

    def backpressure(self):
        return self._into.backpressure()

    def fail(self, error):
        pass


class _Recorded(CollectedDeltas):
    """Forwards to another sink, and records deltas, failure and end."""

    def __init__(self, into):
        super().__init__()
        self._into = into

    def put(self, delta):
        super().put(delta)
        self._into.put(copy(delta))

    def fail(self, error):
        super().fail(error)
        self._into.fail(error)


def run_until_failure(test, drawn):
    """Run a test until an example fails, without shrinking it."""
    until_first_failure(max_examples=300)(given(**drawn)(test.hypothesis.inner_test))()


def _no_unsent_text(_recent):
    return 0


def _accept_any_text(sent, text):
    remaining = len(sent._text) - sent._text_at
    sent._text_at += min(remaining, len(text))
    return text[remaining:] if remaining else text, bool(remaining)


def _keep_position(sent, text):
    remaining = sent._text[sent._text_at :]
    return (text[len(remaining) :], True) if remaining and text.startswith(remaining) else (text, False)


def _accept_any_tokens(sent, token_ids):
    remaining = token_ids[len(sent._token_ids) - sent._tokens_at :]
    sent._tokens_at = min(len(sent._token_ids), sent._tokens_at + len(token_ids))
    return remaining


def _accept_a_short_retry(_sent, _tokens=0):
    return None


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (replay, "_silent_at_end", _no_unsent_text),
        (replay._ReplayedChoice, "_new_text", _accept_any_text),
        (replay._ReplayedChoice, "_new_text", _keep_position),
        (replay._ReplayedChoice, "_new_tokens", lambda _sent, token_ids: token_ids),
        (replay._ReplayedChoice, "_new_tokens", _accept_any_tokens),
        (replay._ReplayedChoice, "_check_end", _accept_a_short_retry),
    ],
)
def test_replay_that_violates_a_rule_is_detected(where, name, mutant, monkeypatch):
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(Exception) as found:  # noqa: PT012  # any of these tests may detect it
        for first, second, message in DIFFERENCES:
            test_error_quotes_the_difference(first, second, message)
        run_until_failure(test_different_output_is_never_forwarded, DIFFERENT)
        run_until_failure(test_relayed_answer_is_continued_whatever_its_chunks, RELAYED)
        run_until_failure(test_answer_of_an_engine_is_continued_by_its_tokens, GENERATED)
    assert not isinstance(found.value, HypothesisException)
