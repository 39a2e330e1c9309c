"""The steps that rank 0 sends: another rank, which has only the messages, gets the same inputs."""

from collections import deque
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.tiny import Driver, generate, prompt_of
from fairlead.base.job import Sampling
from fairlead.engine.loading import LoadedModel
from fairlead.engine.models.parallel import Ranks
from fairlead.engine.ranks import Follower, FromRankZero, LeadingForward, Membership, ReceivedTables, RunStep
from fairlead.engine.runner import ModelRunner

BLOCK, LONGEST, VOCABULARY = 16, 128, 320
WINDOWS = (None, 30)
_coder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromRankZero)


class NoisyForward:
    """A forward that keeps a copy of its inputs, and whose logits depend on the tokens only."""

    device, vocab_size, kernel = torch.device("cpu"), VOCABULARY, "noise"
    samples_several = True
    columns: ClassVar[dict[str, int]] = {}

    def __init__(self):
        self.seen = []
        self.released = []

    def __call__(self, inputs):
        self.seen.append(copied(inputs))
        tokens = inputs.token_ids[torch.from_numpy(inputs.logit_tokens.astype(np.int64))].long()
        noise = torch.arange(VOCABULARY)[None] * 7919 + tokens[:, None] * 104_729
        return torch.sin(noise.float())

    def release(self, group, blocks):
        self.released.append((group, list(blocks)))


def copied(inputs):
    """Return all values of a step as lists; of the block tables only the rows and columns that it uses."""
    columns = -(-int(inputs.sequence_lengths.max()) // BLOCK)
    tables = [table[inputs.slots, :columns].tolist() for table in inputs.tables]
    first = inputs.sequence_lengths - np.diff(inputs.query_starts)
    for table, window in zip(tables, WINDOWS, strict=True):
        for row, length, start in zip(table, inputs.sequence_lengths, first, strict=True):
            lowest = 0 if window is None else max(0, int(start) - window + 1) // BLOCK
            row[:lowest] = []  # blocks before the window may be others' now
            del row[-(-int(length) // BLOCK) - lowest :]
    plain = {
        name: np.asarray(getattr(inputs, name)).tolist()
        for name in ("token_ids", "positions", "query_starts", "sequence_lengths", "slots", "sample_tokens")
    }
    mapping = [slots.tolist() for slots in inputs.slot_mapping]
    return plain, mapping, tables, inputs.decodes, np.asarray(inputs.scored_tokens).tolist()


class Mailbox:
    """A process group of two, and the messages between them: rank 1 runs each step after rank 0 has."""

    def __init__(self):
        self.messages = deque()
        self.broadcasts = deque()
        self.errors = []

    def broadcast(self, tensors):
        self.broadcasts.append(tensors[0].clone())
        return self

    def wait(self):
        pass

    def send(self, message):
        self.messages.append(_coder[0].encode(message))

    def give_up(self, error):
        self.errors.append(error)
        raise error


class Received(Mailbox):
    """Rank 1's end of a mailbox."""

    def __init__(self, mailbox):
        self._mailbox = mailbox

    def broadcast(self, tensors):
        tensors[0].copy_(self._mailbox.broadcasts.popleft())
        return self


def two_ranks():
    """Return rank 0's loaded model, the forwards of both ranks, and a function that runs rank 1."""
    mailbox, forwards = Mailbox(), (NoisyForward(), NoisyForward())
    ranks = Ranks(0, 2), Ranks(1, 2)
    ranks[0].join(mailbox)
    ranks[1].join(Received(mailbox))
    membership = Membership(ranks[0], join=lambda _: None, send=mailbox.send, give_up=mailbox.give_up)
    tables = ReceivedTables(len(WINDOWS), Driver.SLOTS, -(-(LONGEST + 1) // BLOCK))
    follower = Follower(forwards[1], ranks[1], tables)
    loaded = LoadedModel(
        runner=ModelRunner(LeadingForward(forwards[0], membership), ()),
        slots=Driver.SLOTS,
        max_batch=Driver.SLOTS,
        max_batched_tokens=24,
        max_model_len=LONGEST,
        max_input_tokens=LONGEST,
        max_output_tokens=LONGEST,
        vocab_size=VOCABULARY,
        windows=WINDOWS,
        blocks_total=(300, 300),
        block_size=BLOCK,
        eos_token_ids=(),
        device="cpu",
        dtype="float32",
        weight_bytes=0,
        kv_cache_bytes=0,
        kernel="noise",
    )

    def follow():
        while mailbox.messages:
            follower.execute(_coder[1].decode(mailbox.messages.popleft()))

    return loaded, mailbox, forwards, follow


requests = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 12), st.sampled_from([None, 0, 2])), min_size=1, max_size=12
)


@pytest.mark.parametrize("ahead", [False, True])
@settings(max_examples=10)
@given(requests, st.integers(3, 40))
def test_other_rank_gets_the_inputs_of_rank_0(ahead, made, max_batched_tokens):
    loaded, mailbox, (leading, following), follow = two_ranks()
    driver = Driver(loaded, max_batched_tokens=max_batched_tokens, ahead=ahead)
    for number, (length, output, scored) in enumerate(made):
        sampling = Sampling(max_tokens=output, temperature=0, prompt_logprobs=scored)
        sequence = driver.add(prompt_of(length, seed=number), sampling)
        driver.step()
        if number == 2:
            driver.release(sequence)  # a sequence that ends and one in its slot and its blocks
    driver.run()
    follow()
    assert leading.seen
    assert leading.seen == following.seen
    assert not mailbox.broadcasts


def test_tokens_outside_the_vocabulary_run_as_0_on_all_ranks():
    loaded, _, (leading, following), follow = two_ranks()
    driver = Driver(loaded, vocab_size=1000)
    driver.add([5, 999, VOCABULARY], Sampling(max_tokens=1, temperature=0))
    driver.run()
    follow()
    assert following.seen[0][0]["token_ids"] == [5, 0, 0]
    assert leading.seen == following.seen


def test_chosen_tokens_are_broadcast_only_to_steps_that_have_them():
    loaded, mailbox, _, _ = two_ranks()
    generate(loaded, [prompt_of(20)], Sampling(max_tokens=4, temperature=0), ahead=True)
    steps = [_coder[1].decode(message) for message in mailbox.messages]
    assert [step.latest for step in steps] == [0, 1, 1, 1]


def test_released_blocks_are_released_by_all_ranks():
    loaded, _, forwards, follow = two_ranks()
    loaded.runner.release([[3, 4], [9]])
    follow()
    assert [forward.released for forward in forwards] == [[(0, [3, 4]), (1, [9])]] * 2


def test_failed_step_of_rank_0_is_given_up_after_it_was_sent():
    loaded, mailbox, (leading, _), _ = two_ranks()

    def fail(_inputs):
        raise RuntimeError("out of memory")

    loaded.runner.forward._forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(loaded, [prompt_of(5)], Sampling(max_tokens=1, temperature=0))
    assert [str(error) for error in mailbox.errors] == ["out of memory"]
    assert isinstance(_coder[1].decode(mailbox.messages[0]), RunStep)
    assert leading.seen == []
