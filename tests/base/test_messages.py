import hashlib
import struct
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base import messages
from fairlead.base.frames import MAX_FRAME_BYTES, FrameSplitter, encode_frame
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling, TokenLogprob

SAMPLING = Sampling(max_tokens=9, seed=2**62, stop_token_ids=(1, 2), logit_bias={5: -1.5}, logprobs=2)
SPEC = messages.WorkerSpec(path="/models/small", slots=4, kv_cache_bytes=1 << 30)
FROM_PARENT = [SPEC, messages.Ping(), messages.Epoch(3)]
FROM_CLIENT = [
    messages.Attach(1, "front-1"),
    messages.Submit(7, messages.pack_tokens([1, 2, 70_000]), SAMPLING),
    messages.Submit(8, b"", SAMPLING, 0, 1.5, b"salt", grant=Grant(3, 17)),
    messages.Abort(7),
]
TO_PARENT = [
    messages.LoadProgress(0.25, "weights"),
    messages.Ready(8, 4096, 32_000, 100, 16, "cpu", "bfloat16", 1 << 30, 1 << 28),
    messages.LoadFailure("no such file"),
    messages.StepOutputs(
        struct.pack("<2q", 7, 2**40),
        struct.pack("<2i", 70_000, 0),
        [
            messages.Output(1, [5], [TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0)))]),
            messages.Output(2, [0], finish_reason="stop", stop_token=0),
            messages.Output(3, [], error="the logits are not numbers"),
            messages.Output(4, [], error="out of time", code="request_timeout"),
        ],
        messages.EngineStatistics(running=2, steps=9, step_s=0.25, cache_usage=0.5),
    ),
]


DECODERS = {
    messages.from_parent_decoder: FROM_PARENT,
    messages.from_client_decoder: FROM_CLIENT,
    messages.to_parent_decoder: TO_PARENT,
    messages.to_client_decoder: [messages.Attached(2, TO_PARENT[1]), messages.AttachRefused("full")],
}


@pytest.mark.parametrize(
    ("decoder", "message"), [(decoder, each) for decoder, some in DECODERS.items() for each in some]
)
def test_message_arrives_unchanged(decoder, message):
    (payload,) = FrameSplitter().feed(encode_frame(message))
    assert message == decoder.decode(payload)


@pytest.mark.parametrize("message", FROM_PARENT)
def test_client_cannot_send_the_messages_of_the_parent(message):
    (payload,) = FrameSplitter().feed(encode_frame(message))
    with pytest.raises(msgspec.ValidationError):
        messages.from_client_decoder.decode(payload)


def test_frames_split_at_any_byte_are_complete():
    stream = b"".join(encode_frame(message) for message in TO_PARENT)
    for cut in range(len(stream) + 1):
        splitter = FrameSplitter()
        payloads = [*splitter.feed(stream[:cut]), *splitter.feed(stream[cut:])]
        assert [messages.to_parent_decoder.decode(payload) for payload in payloads] == TO_PARENT


def test_frames_received_byte_by_byte_are_complete():
    stream = b"".join(encode_frame(message) for message in FROM_CLIENT)
    splitter = FrameSplitter()
    payloads = [payload for byte in stream for payload in splitter.feed(bytes([byte]))]
    assert [messages.from_client_decoder.decode(payload) for payload in payloads] == FROM_CLIENT


@given(st.lists(st.binary(max_size=20), max_size=6), st.lists(st.integers(0, 150), max_size=6))
def test_any_frames_cut_anywhere_arrive_in_order(payloads, cuts):
    stream = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = FrameSplitter()
    arrived = [payload for start, end in pairwise(edges) for payload in splitter.feed(stream[start:end])]
    assert payloads == arrived


def test_frame_over_the_bound_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="over the bound"):
        list(FrameSplitter().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive_packing(token_ids):
    packed = messages.pack_tokens(token_ids)
    assert token_ids == list(struct.unpack(f"<{len(token_ids)}i", packed))


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))))
def test_plain_tokens_of_a_step_are_read_as_pairs_of_key_and_token(pairs):
    keys = struct.pack(f"<{len(pairs)}q", *(key for key, _ in pairs))
    tokens = messages.pack_tokens([token_id for _, token_id in pairs])
    assert pairs == list(messages.StepOutputs(keys, tokens, [], messages.EngineStatistics()).plain())


def test_tokens_of_a_sequence_that_got_several_are_read_in_their_order():
    keys, tokens = struct.pack("<3q", 7, 8, 9), messages.pack_tokens([1, 2, 3, 4, 5])
    step = messages.StepOutputs(keys, tokens, [], messages.EngineStatistics(), bytes([1, 3, 1]))
    assert list(step.plain()) == [(7, 1), (8, 2), (8, 3), (8, 4), (9, 5)]


@pytest.mark.parametrize("counts", [[1], [1, 1], [2, 2], [3, 0, 0]])
def test_step_with_counts_that_do_not_match_is_refused(counts):
    frame = msgspec.msgpack.encode(["step", bytes(16), bytes(12), [], [], bytes(counts)])
    with pytest.raises(msgspec.ValidationError, match="do not match"):
        messages.to_parent_decoder.decode(frame)


@pytest.mark.parametrize(("keys", "tokens"), [(8, 0), (0, 4), (8, 8), (16, 4), (12, 6), (9, 4)])
def test_step_with_different_numbers_of_keys_and_tokens_is_refused(keys, tokens):
    frame = msgspec.msgpack.encode(["step", bytes(keys), bytes(tokens), [], []])
    with pytest.raises(msgspec.ValidationError, match="do not match"):
        messages.to_parent_decoder.decode(frame)


def test_version_of_the_protocol_is_that_of_its_messages():
    """Increase `PROTOCOL_VERSION` if this fails, and add the new digest."""
    kinds = (messages.Attach, messages.Submit, messages.Prepare, messages.Abort)
    kinds += (messages.Suspend, messages.Resume)
    kinds += (messages.Attached, messages.AttachRefused)
    nested = (messages.Ready, messages.StepOutputs, messages.Output, messages.EngineStatistics)
    fields = [(kind.__name__, kind.__struct_fields__) for kind in (*kinds, *nested, Grant, Sampling)]
    digest = hashlib.sha256(repr(fields).encode()).hexdigest()[:12]
    assert {6: "9604d9648bf9"}[messages.PROTOCOL_VERSION] == digest
