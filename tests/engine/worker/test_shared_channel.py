"""The child's channel for fronts by example, in one process: attaching, refusing and disconnecting them."""

import random
import socket
import stat
import struct
from pathlib import Path

import pytest

from engine.worker.fronts import SLOTS, Rig
from fairlead.base import messages
from fairlead.base.frames import encode_frame
from fairlead.base.grant import Grant
from fairlead.engine.worker import shared_channel
from fairlead.engine.worker.shared_channel import bind


@pytest.fixture
def rig():
    with Rig() as made:
        yield made


def test_clients_get_a_frame_a_step_with_their_own_sequences_only(rig):
    clients = first, second, _ = rig.attach(), rig.attach(), rig.attach()
    for number, client in enumerate(clients, 1):
        client.send(client.submit([number], 5, Grant(1, number)))
    rig.turn(5)
    for client in clients:
        client.read()
        steps = [frame for frame in client.frames if isinstance(frame, messages.StepOutputs)]
        assert len(steps) == 5
        assert list(client.ends.values()) == ["length"]
        assert client.received == {key: tokens for key, (tokens, _) in client.expected.items()}
    assert (first.prefix, second.prefix) == (1, 2)
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(6))
def test_several_tokens_of_a_sequence_reach_its_own_client(rig, seed):
    """Each frame has some tokens of some sequences, in any order. The clients check what they receive."""
    chance = random.Random(seed)
    clients = [rig.attach() for _ in range(1 + seed % 3)]
    for number in range(6):
        client = clients[number % len(clients)]
        client.send(client.submit([number], 12, Grant(1, number)))
    rig.channel.read(wait_s=0.0)
    left = {key: list(tokens) for client in clients for key, (tokens, _) in client.expected.items()}
    for steps in range(1, 30):
        keys = chance.sample(sorted(left), chance.randint(1, len(left)))
        taken = {
            key: [left[key].pop(0) for _ in range(min(chance.randint(1, 4), len(left[key])))] for key in keys
        }
        taken = {key: tokens for key, tokens in taken.items() if tokens}
        rig.channel.write(
            messages.StepOutputs(
                struct.pack(f"<{len(taken)}q", *taken),
                messages.pack_tokens([token for tokens in taken.values() for token in tokens]),
                [],
                messages.EngineStatistics(steps=steps),
                bytes(map(len, taken.values())),
            )
        )
    for client in clients:
        client.read()
        assert client.received == {key: tokens for key, (tokens, _) in client.expected.items()}


def test_front_without_sequences_gets_no_frame(rig):
    busy, idle = rig.attach(), rig.attach()
    busy.send(busy.submit([1], 5, Grant(1, 1)))
    rig.turn(5)
    assert idle.read() == []


def test_each_message_is_answered_on_its_own_connection(rig):
    first, second = rig.attach(), rig.attach()
    first.send(messages.Abort(first.new_key()))
    rig.turn()
    assert [type(frame) for frame in first.read()] == [messages.StepOutputs]
    rig.parent.send(messages.Ping())
    rig.turn()
    (answer,) = rig.parent.read()
    assert (answer.keys, answer.outputs, answer.statistics.slots_free) == (b"", [], SLOTS)
    assert first.read() == second.read() == []


def test_front_of_another_version_is_refused_with_the_reason(rig):
    client = rig.connect()
    client.send(messages.Attach(messages.PROTOCOL_VERSION + 1, "newer"))
    rig.turn(2)
    (refused,) = client.read()
    assert refused == messages.AttachRefused(
        f"it speaks version {messages.PROTOCOL_VERSION} of the protocol, not {messages.PROTOCOL_VERSION + 1}"
    )
    assert client.has_ended


def test_front_above_the_bound_is_refused_and_has_room_when_another_has_left(rig, monkeypatch):
    monkeypatch.setattr(shared_channel, "MOST_CLIENTS", 2)
    first, _ = rig.attach(), rig.attach()
    client = rig.connect()
    rig.turn()
    assert client.read() == [messages.AttachRefused("it serves 2 clients already")]
    first.connection.close()
    rig.turn()
    assert rig.attach().prefix == 3


def test_partial_message_delays_nobody(rig):
    slow, other = rig.attach(), rig.attach()
    data = encode_frame(slow.submit([1], 3, Grant(1, 1)))
    slow.send_bytes(data[:5])
    other.send(other.submit([2], 3, Grant(1, 2)))
    rig.turn(3)
    other.read()
    assert list(other.ends.values()) == ["length"]
    slow.send_bytes(data[5:])
    rig.turn(3)
    slow.read()
    assert list(slow.ends.values()) == ["length"]


def test_front_that_leaves_in_mid_stream_frees_its_slots_blocks_and_grants(rig):
    leaving, staying = rig.attach(), rig.attach()
    leaving.send(*(leaving.submit([number], 50, Grant(1, 1)) for number in range(1, 6)))
    rig.turn(3)
    assert rig.engine.statistics().running == SLOTS
    leaving.connection.close()
    rig.turn()
    rig.assert_nothing_is_held()
    staying.send(staying.submit([1], 2, Grant(1, 1)))
    rig.run_until_idle()
    assert list(staying.ends.values()) == ["length"]


def test_front_that_does_not_read_is_disconnected_and_delays_no_other(rig, monkeypatch):
    monkeypatch.setattr(shared_channel, "UNSENT_BYTES", 1000)
    stopped, reading = rig.attach(small_buffer=True), rig.attach()
    for number in range(1, 40):
        stopped.send(stopped.submit([1], 50, Grant(1, number)))
    for number in range(1, 60):
        reading.send(reading.submit([1], 1, Grant(2, number)))
        rig.turn()
        reading.read()
    rig.run_until_idle()
    assert len(reading.ends) == 59
    assert [client.prefix for client in rig.channel._connected.values()] == [reading.prefix]
    rig.assert_nothing_is_held()


def test_malformed_message_ends_only_its_connection_after_what_was_valid_before(rig):
    faulty, other = rig.attach(), rig.attach()
    other.send(other.submit([1], 9, Grant(1, 1)))
    valid = encode_frame(faulty.submit([2], 9, Grant(1, 2)))
    faulty.send_bytes(valid + b"\x01\x00\x00\x00\xc1")
    rig.run_until_idle()
    assert faulty.has_ended
    assert list(other.ends.values()) == ["length"]
    rig.assert_nothing_is_held()


# Grants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [False, True])
def test_grant_of_a_lower_epoch_is_refused(rig, announced):
    old, new = rig.attach(), rig.attach()
    if announced:
        rig.parent.send(messages.Epoch(2))
    else:
        new.send(new.submit([1], 1, Grant(2, 1)))
    rig.turn()
    old.send(old.submit([1], 1, Grant(1, 1), is_stale=True))
    rig.turn()
    ((output,),) = [frame.outputs for frame in old.read()]
    assert (output.code, output.error) == (
        "stale_grant",
        "the grant is of epoch 1, and the engine has seen epoch 2",
    )


def test_grant_for_an_earlier_run_is_refused():
    with Rig(first_grant=Grant(2, 5)) as rig:
        front = rig.attach()
        front.send(
            front.submit([1], 1, Grant(2, 4), is_stale=True),
            front.submit([1], 1, Grant(1, 9), is_stale=True),
            front.submit([1], 1, Grant(2, 5)),
            front.submit([1], 1, Grant(3, 1)),
        )
        rig.run_until_idle()
        assert [front.ends[key] for key in sorted(front.ends)] == ["stale_grant"] * 2 + ["length"] * 2
        rig.assert_nothing_is_held()


def test_grant_that_another_front_uses_is_refused_until_its_last_sequence_has_ended(rig):
    first, second = rig.attach(), rig.attach()
    grant = Grant(1, 7)
    first.send(first.submit([1], 1, grant), first.submit([2], 6, grant))
    rig.turn(2)
    second.send(second.submit([1], 1, grant, is_stale=True))
    rig.turn()
    second.read()
    assert list(second.ends.values()) == ["stale_grant"]
    rig.turn(6)
    second.send(second.submit([1], 1, grant))
    rig.turn(2)
    second.read()
    assert list(second.ends.values()) == ["stale_grant", "length"]


def test_job_that_runs_may_use_its_grant_after_a_higher_epoch(rig):
    front = rig.attach()
    front.send(front.submit([1], 9, Grant(1, 1)))
    rig.turn()
    rig.parent.send(messages.Epoch(2))
    rig.turn()
    front.send(front.submit([2], 1, Grant(1, 1)))
    rig.run_until_idle()
    assert list(front.ends.values()) == ["length", "length"]


# The socket's file ---------------------------------------------------------------------------------


def test_socket_is_for_its_user_only_and_replaces_one_that_is_left_over(tmp_path):
    path = tmp_path / "engine.sock"
    with bind(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.exists(), "a process that was killed does not remove it"
    with bind(str(path)) as second:
        second.listen()
        with socket.socket(socket.AF_UNIX) as front:
            front.connect(str(path))


def test_file_that_is_no_socket_is_kept(tmp_path: Path):
    path = tmp_path / "notes"
    path.write_text("kept")
    with pytest.raises(OSError, match="in use"):
        bind(str(path))
    assert path.read_text() == "kept"


def test_front_prepares_a_grammar_without_a_grant(rig):
    front = rig.attach()
    key = front.new_key()
    front.expected[key], front.received[key] = ([], ""), []
    front.send(messages.Prepare(key, "a grammar"))
    rig.turn(2)
    (output,) = (output for frame in front.read() for output in frame.outputs)
    assert (output.key, output.error) == (key, "this model cannot be constrained by a grammar")
    rig.assert_nothing_is_held()


def test_counts_that_have_changed_without_a_step_reach_all_clients(rig):
    leaving, first, second = rig.attach(), rig.attach(), rig.attach()
    leaving.send(leaving.submit([1], 50, Grant(1, 1)))
    rig.turn(3)
    leaving.connection.close()
    rig.turn()
    for client in (first, second):
        assert [frame.statistics.running for frame in client.read()] == [0]


def test_front_suspends_and_resumes_only_its_own_sequences(rig):
    first, second = rig.attach(), rig.attach()
    submitted = first.submit([1], 20, Grant(1, 1))
    first.send(submitted)
    rig.turn(3)
    first.send(messages.Suspend(submitted.key), messages.Suspend(submitted.key + 5))
    second.send(messages.Suspend(second.new_key()), messages.Resume(second.new_key()))
    rig.turn(4)
    assert rig.engine.statistics().suspended == 1
    first.read()
    received = len(first.received[submitted.key])
    assert 0 < received < 20
    first.send(messages.Resume(submitted.key))
    rig.run_until_idle()
    first.read()
    assert list(first.ends.values()) == ["length"]
    assert len(first.received[submitted.key]) == 20
    second.send(messages.Suspend(submitted.key))  # which is another's
    rig.turn(2)
    second.read()
    assert second.has_ended
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("leaves", [False, True])
def test_suspended_sequences_end_with_an_abort_or_with_their_front(rig, leaves):
    client, other = rig.attach(), rig.attach()
    sent = [client.submit([number], 50, Grant(1, number)) for number in range(1, 4)]
    client.send(*sent)
    rig.turn(3)
    client.send(*(messages.Suspend(one.key) for one in sent))
    rig.turn(2)
    assert rig.engine.statistics().suspended == 3
    if leaves:
        client.connection.close()
    else:
        client.send(*(messages.Abort(one.key) for one in sent))
    rig.turn(2)
    rig.assert_nothing_is_held()
    other.send(other.submit([1], 2, Grant(1, 1)))
    rig.run_until_idle()
    assert list(other.ends.values()) == ["length"]
