"""Fronts of one engine under random submits, aborts, departures and faults, compared with an oracle.

Each front gets exactly the outputs of its own sequences, which are the same as alone. One that leaves, does
not read or sends what is not allowed affects no other, and leaves nothing behind.
"""

import struct
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.fake_model import VOCABULARY
from engine.worker.fronts import LONGEST, Client, Rig
from fairlead.base import messages
from fairlead.base.frames import MAX_FRAME_BYTES, encode_frame
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling
from fairlead.engine.worker import shared_channel
from first_failure import until_first_failure
from settings.mutants import Mutant, broken

MOST_FRONTS = 4
UNSENT_BYTES = 200
LARGEST_FRAME = 1000

prompts = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=20)
picks = st.integers(0, 1000)


class FrontsMachine(RuleBasedStateMachine):
    """Every rule ends with a turn of the child, so the child has seen all that was sent."""

    @initialize(overlaps=st.booleans())
    def begin(self, overlaps: bool) -> None:
        self.unsent_bytes, shared_channel.UNSENT_BYTES = shared_channel.UNSENT_BYTES, UNSENT_BYTES
        self.rig = Rig(overlaps=overlaps)
        self.fronts: list[Client] = []
        self.stopped: list[Client] = []
        self.may_have_ended: list[Client] = []
        self.epoch = 0
        self.numbers = 0
        self.announce_epoch(5)
        self.fronts += [self.rig.attach(small_buffer=True) for _ in range(2)]

    # Fronts ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.fronts) < MOST_FRONTS)
    @rule()
    def attach(self) -> None:
        self.fronts.append(self.rig.attach(small_buffer=True))

    @precondition(lambda self: len(self.fronts) > 2)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        front = self._front(pick)
        front.connection.close()
        self._turn()
        self._forget(front)

    @precondition(lambda self: self.fronts)
    @rule(pick=picks)
    def stop_reading(self, pick: int) -> None:
        front = self._front(pick)
        if front not in self.stopped:
            self.stopped.append(front)

    @precondition(lambda self: self.stopped)
    @rule(pick=picks)
    def read_again(self, pick: int) -> None:
        front = self.stopped.pop(pick % len(self.stopped))
        self.may_have_ended = [front]
        self._turn()
        if front.has_ended:
            self.rig.turn()  # in which its sequences are aborted
            self._forget(front)

    @precondition(lambda self: len(self.fronts) > 2)
    @rule(
        pick=picks,
        kind=st.sampled_from(["prefix", "abort", "grant", "key", "ping", "epoch", "bytes", "size", "attach"]),
    )
    def send_what_is_not_allowed(self, pick: int, kind: str) -> None:
        front = self._front(pick)
        front.send_bytes(self._faulty(front, kind))
        self.may_have_ended = [front]
        if front in self.stopped:
            self.stopped.remove(front)
        self._turn()
        assert front.prefix not in [client.prefix for client in self.rig.channel._connected.values()]
        assert front.has_ended, "the child has kept the connection"
        self._forget(front)

    # Sequences ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.fronts)
    @rule(
        pick=picks,
        prompt=prompts,
        max_tokens=st.sampled_from([1, 3, LONGEST]),
        kind=st.sampled_from(["new", "new", "own", "foreign", "lower"]),
        copies=st.integers(1, 2),
        raises_by=st.sampled_from([0, 0, 1, 5]),
    )
    def submit_often(self, **options: Any) -> None:
        self.submit(**options)

    @precondition(lambda self: self.fronts)
    @rule(
        pick=picks,
        prompt=prompts,
        max_tokens=st.sampled_from([3, LONGEST]),
        kind=st.sampled_from(["new", "own", "foreign", "lower"]),
        copies=st.just(1),
        raises_by=st.sampled_from([0, 1]),
    )
    def submit(
        self, pick: int, prompt: list[int], max_tokens: int, kind: str, copies: int, raises_by: int
    ) -> None:
        front = self._front(pick)
        grant = self._grant(front, kind, raises_by)
        held = self._holder(grant)
        is_stale = held is not front if held is not None else grant.epoch < self.epoch
        front.send(*(front.submit(prompt, max_tokens, grant, is_stale=is_stale) for _ in range(copies)))
        if not is_stale:
            self.epoch = max(self.epoch, grant.epoch)
        self._turn()

    @precondition(lambda self: self.fronts)
    @rule(pick=picks, which=picks)
    def abort(self, pick: int, which: int) -> None:
        client = self._front(pick)
        if client.expected:
            key = list(client.expected)[which % len(client.expected)]
            client.send(messages.Abort(key))
            client.aborted.add(key)
            self._turn()
            assert key not in self.rig.engine._live

    @rule(raises_by=st.integers(-1, 3))
    def announce_epoch(self, raises_by: int) -> None:
        announced = max(0, self.epoch + raises_by)
        self.epoch = max(self.epoch, announced)
        self.rig.parent.send(messages.Epoch(announced))
        self._turn()

    @rule()
    def ping(self) -> None:
        self.rig.parent.send(messages.Ping())
        frames = len(self.rig.parent.frames)
        self._turn()
        assert len(self.rig.parent.frames) > frames, "a ping was not answered"

    @rule(times=st.sampled_from([1, 2, 5, 40]))
    def run_steps(self, times: int) -> None:
        self._turn(times)

    # Checks ------------------------------------------------------------------------------------------

    @invariant()
    def buffers_are_bounded(self) -> None:
        if hasattr(self, "rig"):
            self.may_have_ended = []
            assert self.rig.unsent_bytes() <= UNSENT_BYTES + LARGEST_FRAME

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.may_have_ended, self.stopped = self.stopped, []
            self._turn()
            self.rig.run_until_idle()
            for client in self.fronts:
                for key, (tokens, reason) in client.expected.items():
                    if client.has_ended or key in client.aborted:
                        continue
                    if key in client.stale:
                        assert (client.ends[key], client.received[key]) == ("stale_grant", [])
                    else:
                        assert (client.ends[key], client.received[key]) == (reason, tokens)
            for front in self.fronts:
                front.connection.close()
            self.rig.turn(2)
            self.rig.assert_nothing_is_held()
            assert self.rig.channel._attached == {}
        finally:
            self.rig.__exit__(None, None, None)
            shared_channel.UNSENT_BYTES = self.unsent_bytes

    # Helpers -----------------------------------------------------------------------------------------

    def _front(self, pick: int) -> Client:
        return self.fronts[pick % len(self.fronts)]

    def _turn(self, times: int = 1) -> None:
        """Run turns. A front that does not read may be disconnected in one; no other may be."""
        for _ in range(times):
            self.rig.turn()
            for client in (self.rig.parent, *self.fronts):
                if client not in self.stopped and client.connection.fileno() >= 0:
                    client.read()
                    assert not client.has_ended or client in self.may_have_ended, "disconnected for nothing"
        connected = {client.prefix for client in self.rig.channel._connected.values()}
        for front in list(self.stopped):
            if front.prefix not in connected:
                self.rig.turn()  # in which its sequences are aborted
                self._forget(front)

    def _forget(self, front: Client) -> None:
        """Check that nothing of a front that has gone is left in the child."""
        live = self.rig.engine._live
        assert not [key for key in front.expected if key in live], "sequences of a front that has gone"
        if front in self.stopped:
            self.stopped.remove(front)
        if front in self.fronts:
            self.fronts.remove(front)
        front.connection.close()

    def _holder(self, grant: Grant) -> Client | None:
        """Return the front that has a live sequence with the grant, as of the engine."""
        for front in self.fronts:
            if any(held == grant and key in self.rig.engine._live for key, held in front.grants.items()):
                return front
        return None

    def _grant(self, front: Client, kind: str, raises_by: int) -> Grant:
        live = self.rig.engine._live
        for owner in self.fronts:
            if (owner is front) == (kind == "own"):
                for key, held in owner.grants.items():
                    if kind in ("own", "foreign") and key in live and held is not None:
                        return held
        self.numbers += 1
        if kind == "lower":
            return Grant(max(0, self.epoch - 1), self.numbers)
        return Grant(self.epoch + raises_by, self.numbers)

    def _faulty(self, front: Client, kind: str) -> bytes:
        if kind == "bytes":
            return struct.pack("<I", 3) + b"\xc1\xff\x00"
        if kind == "size":
            return struct.pack("<I", MAX_FRAME_BYTES + 1)
        key = front.new_key()
        others = [client for client in self.fronts if client is not front]
        prompt, grant = messages.pack_tokens([1]), Grant(self.epoch, 10_000)
        sampling = Sampling(max_tokens=2)
        foreign = next((key for client in others for key in client.expected), 1 << 60)
        faulty = {
            "prefix": messages.Submit(foreign + 10_000, prompt, sampling, grant=grant),
            "abort": messages.Abort(foreign),
            "grant": messages.Submit(key, prompt, sampling),
            "key": messages.Submit(front.prefix << messages.KEY_BITS, prompt, sampling, grant=grant),
            "ping": messages.Ping(),
            "epoch": messages.Epoch(self.epoch + 100),
            "attach": messages.Attach(messages.PROTOCOL_VERSION, "again"),
        }
        return encode_frame(faulty[kind])


SETTINGS = settings(phases=[Phase.generate], report_multiple_bugs=False, stateful_step_count=30)


def test_each_front_gets_exactly_its_own_outputs():
    run_state_machine_as_test(FrontsMachine, settings=SETTINGS)


_CHANNEL = "fairlead.engine.worker.shared_channel:SharedChannel"
_CONNECTION = "fairlead.base.frames:FrameSocket"
_GRANTS = "fairlead.engine.worker.grants:Grants"

MUTANTS = {
    "accepts_another_prefix": (
        f"{_CHANNEL}._handle",
        "message.key >> messages.KEY_BITS != client.prefix",
        "False",
    ),
    "sends_tokens_to_the_wrong_front": (f"{_CHANNEL}._parts", "prefixes == client", "prefixes >= client"),
    "sends_ends_to_the_wrong_front": (f"{_CHANNEL}._parts", "outputs.get(client.prefix, [])", "step.outputs"),
    "keeps_sequences_of_a_front_that_has_gone": (
        f"{_CHANNEL}._forget",
        "yield messages.Abort(key)",
        "yield messages.Ping()",
    ),
    "forgets_the_epoch": (f"{_GRANTS}.raise_epoch", "self._epoch = max(self._epoch, epoch)", "pass"),
    "lowers_the_epoch": (f"{_GRANTS}.raise_epoch", "max(self._epoch, epoch)", "epoch"),
    "accepts_a_grant_twice": (f"{_GRANTS}.take", "user != holder", "False"),
    "keeps_grants": (f"{_GRANTS}.release", "self._sequences[grant] -= 1", "pass"),
    "blocks": (f"{_CONNECTION}.__init__", "setblocking(False)", "setblocking(True)"),
    "buffers_without_bound": (f"{_CONNECTION}.send", "raise PeerGone(f", "str(f"),
    "never_sends_the_rest": (f"{_CHANNEL}._handle_event", "client.connection.flush()", "pass"),
    "accepts_a_key_twice": (f"{_CHANNEL}._admit", "submit.key <= client.last_key", "False"),
    "answers_no_ping": (f"{_CHANNEL}._read_parent", "self._parent_is_due = True", "pass"),
    "answers_a_ping_a_step_late": (
        "fairlead.engine.worker.loop:Loop.execute",
        "messages.Abort | messages.Ping",
        "messages.Abort",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_state_machine_detects_a_channel_that(name):
    function, old, new = MUTANTS[name]
    run_machine = until_first_failure(SETTINGS, max_examples=1000)
    with (
        broken(Mutant(function, old, new, "behaviour", name)),
        pytest.raises((AssertionError, LookupError, ConnectionError, ExceptionGroup)),
    ):
        run_state_machine_as_test(FrontsMachine, settings=run_machine)
