import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.job import Sampling, TokenLogprob
from fairlead.worker import wire

SAMPLING = Sampling(max_tokens=9, seed=2**62, stop_token_ids=(1, 2), logit_bias={5: -1.5}, logprobs=2)
TO_CHILD = [wire.Submit(7, wire.pack_tokens([1, 2, 70_000]), SAMPLING), wire.Abort(7)]
TO_PARENT = [
    wire.Progress(0.25, "weights"),
    wire.Ready(8, 4096, 32_000, 100, 16, "cpu", "bfloat16", 1 << 30, 1 << 28),
    wire.LoadFailed("no such file"),
    wire.Step(
        [
            wire.Output(1, [5], [TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0)))]),
            wire.Output(2, [0], finish_reason="stop", stop_token=0),
            wire.Output(3, [], error="the logits are not numbers"),
        ],
        wire.EngineStatistics(running=2, steps=9),
    ),
]


@pytest.mark.parametrize("message", TO_CHILD)
def test_a_message_to_the_child_arrives_as_it_was(message):
    (payload,) = wire.FrameSplitter().feed(wire.encode_frame(message))
    assert message == wire.to_child_decoder.decode(payload)


@pytest.mark.parametrize("message", TO_PARENT)
def test_a_message_to_the_parent_arrives_as_it_was(message):
    (payload,) = wire.FrameSplitter().feed(wire.encode_frame(message))
    assert message == wire.to_parent_decoder.decode(payload)


def test_the_spec_arrives_as_it_was():
    spec = wire.WorkerSpec(path="/models/small", slots=4, kv_cache_bytes=1 << 30)
    (payload,) = wire.FrameSplitter().feed(wire.encode_frame(spec))
    assert spec == wire.spec_decoder.decode(payload)


def test_frames_split_at_any_byte_arrive_whole():
    stream = b"".join(wire.encode_frame(message) for message in TO_PARENT)
    for cut in range(len(stream) + 1):
        splitter = wire.FrameSplitter()
        payloads = [*splitter.feed(stream[:cut]), *splitter.feed(stream[cut:])]
        assert TO_PARENT == [wire.to_parent_decoder.decode(payload) for payload in payloads]


def test_frames_that_come_byte_by_byte_arrive_whole():
    stream = b"".join(wire.encode_frame(message) for message in TO_CHILD)
    splitter = wire.FrameSplitter()
    payloads = [payload for byte in stream for payload in splitter.feed(bytes([byte]))]
    assert TO_CHILD == [wire.to_child_decoder.decode(payload) for payload in payloads]


@given(st.lists(st.binary(max_size=20), max_size=6), st.lists(st.integers(0, 150), max_size=6))
def test_any_frames_cut_anywhere_arrive_in_order(payloads, cuts):
    stream = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = wire.FrameSplitter()
    arrived = [payload for start, end in pairwise(edges) for payload in splitter.feed(stream[start:end])]
    assert payloads == arrived


def test_a_frame_over_the_bound_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="over the bound"):
        list(wire.FrameSplitter().feed(struct.pack("<I", wire.MAX_FRAME_BYTES + 1)))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive_packing(token_ids):
    assert token_ids == wire.unpack_tokens(wire.pack_tokens(token_ids))
