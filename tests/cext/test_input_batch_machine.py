"""The kernel behaves like the oracle, and the state machine detects batches with one fault each."""

from array import array

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cext.input_batch_machine import MACHINE_SETTINGS, InputBatchMachine
from cext.input_batch_oracle import InputBatchOracle, SequenceStateOracle
from cext.mutants import mutant_params
from fairlead._cext.inputbatch import InputBatch, SequenceState
from first_failure import until_first_failure


def run_machine(new_batch, new_state=SequenceStateOracle, machine_settings=MACHINE_SETTINGS):
    attributes = {
        "new_batch": new_batch,
        "new_state": new_state,
        "fixed_options": getattr(new_batch, "detected_with", {}),
    }
    machine = type(f"{new_batch.__name__}Machine", (InputBatchMachine,), attributes)
    run_state_machine_as_test(machine, settings=machine_settings)


def test_kernel_passes_the_state_machine():
    run_machine(InputBatch, SequenceState)


def test_oracle_passes_the_state_machine():
    """Otherwise the mutants below could fail because of a fault in the state machine."""
    run_machine(InputBatchOracle, machine_settings=settings(MACHINE_SETTINGS, max_examples=50))


# Rows ----------------------------------------------------------------------------------------------


class NewcomersGoToTheEnd(InputBatchOracle):
    def enter_row(self, slot):
        self.rows.append(slot)
        return len(self.rows) - 1


class CondenseFillsTheHighestHole(InputBatchOracle):
    detected_rarely = True

    def condense(self):
        moves = []
        while -1 in self.rows:
            slot = self.rows.pop()
            if slot != -1:
                target = max(row for row, other in enumerate(self.rows) if other == -1)
                moves.append((len(self.rows), target))
                self.rows[target] = slot
        return moves


class CondenseKeepsTheOrder(InputBatchOracle):
    def condense(self):
        before = list(self.rows)
        self.rows = [slot for slot in self.rows if slot != -1]
        return [(before.index(slot), row) for row, slot in enumerate(self.rows) if before[row] != slot]


class RemovalKeepsThePlaceholders(InputBatchOracle):
    def remove_request(self, slot):
        state = self.occupant(slot).state
        before = state.pending
        super().remove_request(slot)
        state.pending = before


class RemovalKeepsPendingTokens(InputBatchOracle):
    def remove_request(self, slot):
        state = self.occupant(slot).state
        before = state.computed
        super().remove_request(slot)
        state.computed = before


class OccupiedSlotIsReused(InputBatchOracle):
    def add_request(self, slot, state, block_ids):
        if slot in self.occupants and state.slot == -1:
            self.remove_request(slot)
        return super().add_request(slot, state, block_ids)


class RemovedSlotsAreNotReported(InputBatchOracle):
    def changes(self, since):
        return super().changes(since)._replace(removed=[])


class ReusedSlotIsNotReported(InputBatchOracle):
    def add_request(self, slot, state, block_ids):
        row = super().add_request(slot, state, block_ids)
        self.first = getattr(self, "first", {})
        self.changed[slot] = self.first.setdefault(slot, self.version)
        return row


# Block tables --------------------------------------------------------------------------------------


class AppendedBlocksAreNotStaged(InputBatchOracle):
    def append(self, slot, group, block):
        before = self.occupants[slot].staged[group]
        super().append(slot, group, block)
        self.occupants[slot].staged[group] = before


class ReusedSlotIsStagedTwice(InputBatchOracle):
    def remove_request(self, slot):
        stale = self.occupant(slot).staged[0] is not None
        super().remove_request(slot)
        self.stale = [slot] * stale

    def take_staged(self):
        writes = super().take_staged()
        again = [write for write in writes if write[1] in getattr(self, "stale", ())]
        return again + writes


class OnlyTheFirstGroupIsStaged(InputBatchOracle):
    detected_with = {"windows": (None, 5)}  # noqa: RUF012

    def take_staged(self):
        return [write for write in super().take_staged() if write[0] == 0]


class CanceledWritesAreLost(InputBatchOracle):
    def cancel_step(self, step):
        before = {slot: list(occupant.staged) for slot, occupant in self.occupants.items()}
        present = super().cancel_step(step)
        for slot, staged in before.items():
            self.occupants[slot].staged = staged
        return present


class SlidesATokenTooEarly(InputBatchOracle):
    detected_with = {"windows": (3,)}  # noqa: RUF012

    def hidden(self, committed, window):
        return super().hidden(committed + 1, window)


class SlidesBlocksOfPendingTokens(InputBatchOracle):
    detected_with = {"windows": (3,), "block_size": 1, "max_batched_tokens": 100, "arenas": 2}  # noqa: RUF012

    def slide(self, slot, group):
        state = self.occupant(slot).state
        committed, state.committed = state.committed, state.computed
        try:
            return super().slide(slot, group)
        finally:
            state.committed = committed


class SlotMappingIgnoresTheOffset(InputBatchOracle):
    def cache_slot(self, blocks, position):
        return blocks[position // self.block_size] * self.block_size


# Steps ---------------------------------------------------------------------------------------------


class PrefillsComeFirst(InputBatchOracle):
    def step_rows(self, counts):
        return super().step_rows(counts)[::-1]


class SurveyPrefersTheFirstAdmitted(InputBatchOracle):
    detected_with = {"slots": 4, "max_batched_tokens": 100}  # noqa: RUF012

    def most_urgent(self, slots):
        return sorted(slots, key=lambda slot: self.occupants[slot].version)


class PlaceholderIsTheTokenBefore(InputBatchOracle):
    detected_with = {"arenas": 2}  # noqa: RUF012

    def known(self, occupant):
        return occupant.state.tokens + occupant.state.tokens[-1:]


class ArenaOfAStepUnderWayIsUsed(InputBatchOracle):
    detected_with = {"arenas": 2}  # noqa: RUF012

    def next_arena(self):
        return (self.steps - 1) % len(self.arenas)


class LateResultsGoToTheNextOccupant(InputBatchOracle):
    detected_with = {"slots": 1, "arenas": 2}  # noqa: RUF012

    def is_present(self, slot, occupant):
        return super().is_present(slot, self.occupants.get(slot, occupant))


class FinishedSequencesContinue(InputBatchOracle):
    def end(self, occupant):
        occupant.state.pending = 0


class MinTokensAreIgnored(InputBatchOracle):
    def reason_to_end(self, state, token):
        before, state.min_tokens = state.min_tokens, 0
        try:
            return super().reason_to_end(state, token)
        finally:
            state.min_tokens = before


class UnfinishedPromptsProcessLogits(InputBatchOracle):
    detected_with = {"max_batched_tokens": 3}  # noqa: RUF012

    def new_step(self, members):
        step = super().new_step(members)
        step.processes_logits = any(occupant.state.processes_logits for _, occupant, *_ in members)
        return step


class EosCannotBeIgnored(InputBatchOracle):
    def reason_to_end(self, state, token):
        before, state.ignore_eos = state.ignore_eos, False
        try:
            return super().reason_to_end(state, token)
        finally:
            state.ignore_eos = before


class OneTokenTooMany(InputBatchOracle):
    def limit(self, state):
        return super().limit(state) + 1


class FailedTokenIsCommitted(InputBatchOracle):
    def commit_tokens(self, step, sampled):
        return super().commit_tokens(step, memoryview(bytes(4 * len(sampled))).cast("i"))


class ResultsAreOverwritten(InputBatchOracle):
    def commit_tokens(self, step, sampled):
        committed = super().commit_tokens(step, sampled)
        self.buffer = getattr(self, "buffer", None) or memoryview(array("i", [0] * self.slots))
        tokens = self.buffer[: len(committed.tokens)]
        tokens[:] = committed.tokens
        return committed._replace(tokens=tokens)


class WrongDraftsAreAccepted(InputBatchOracle):
    detected_with = {"most_drafts": 4}  # noqa: RUF012

    def commit_tokens(self, step, sampled):
        step.members = [
            (*others, list(sampled[: len(drafts)]) if len(drafts) < len(sampled) else drafts)
            for *others, drafts in step.members
        ]
        return super().commit_tokens(step, sampled)


class RejectedDraftsStayComputed(InputBatchOracle):
    detected_with = {"most_drafts": 4}  # noqa: RUF012

    def commit_tokens(self, step, sampled):
        before = {id(occupant): occupant.state.computed for _, occupant, *_ in step.members}
        committed = super().commit_tokens(step, sampled)
        for slot, occupant, *_ in step.members:
            if slot in committed.rewound:
                occupant.state.computed = before[id(occupant)]
        return committed


class DraftsUnderWayAreIgnored(InputBatchOracle):
    detected_with = {"most_drafts": 4, "arenas": 2}  # noqa: RUF012

    def may_run(self, occupant):
        drafting, occupant.drafting = occupant.drafting, False
        try:
            return super().may_run(occupant)
        finally:
            occupant.drafting = drafting


class DraftsPassTheLimit(InputBatchOracle):
    detected_with = {"most_drafts": 4}  # noqa: RUF012

    def look_up_drafts(self, ngram, budget):
        self.limit = lambda state: InputBatchOracle.limit(self, state) + 1
        try:
            return super().look_up_drafts(ngram, budget)
        finally:
            del self.limit


class DraftsFollowTheFirstPlace(InputBatchOracle):
    detected_with = {"most_drafts": 4}  # noqa: RUF012

    def what_followed(self, tokens, ngram, most):
        for end in range(ngram, len(tokens)):
            if tokens[end - ngram : end] == tokens[-ngram:]:
                return (tokens[end:] * most)[:most]
        return []


class UnusedBlocksStay(InputBatchOracle):
    detected_with = {"most_drafts": 4, "block_size": 1}  # noqa: RUF012

    def take_unused_blocks(self, slot):
        self.occupant(slot)
        return tuple([] for _ in self.windows)


MUTANTS = [mutant for mutant in InputBatchOracle.__subclasses__() if mutant.__module__ == __name__]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutant_params(MUTANTS))
def test_state_machine_detects_each_mutant(mutant):
    # A mutant that has lost a sequence refuses what the batch allows.
    with pytest.raises((AssertionError, ValueError)):
        run_machine(mutant, machine_settings=until_first_failure(MACHINE_SETTINGS, max_examples=4000))
