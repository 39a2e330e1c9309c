"""Run random operations on a batch and on its oracle, and compare everything observable.

The contract of a step is also checked on a shadow of the device, which only the writes of steps change.
"""

from array import array
from itertools import count, pairwise

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cext.input_batch_oracle import HEADER, InputBatchOracle, Offsets, SequenceStateOracle

MACHINE_SETTINGS = settings(
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

VOCABULARY = 12
EOS = (2, 3)
SECTIONS = (
    "input_ids",
    "positions",
    "query_starts",
    "sequence_lengths",
    "slots",
    "sample_tokens",
    "sample_slots",
)
COLUMNS = ("num_tokens", "num_prompt_tokens", "num_computed_tokens", "output_tokens")
STATE_FACTS = (
    *("key", "slot", "prompt_length", "num_tokens", "output_length", "computed", "committed"),
    *("max_tokens", "min_tokens", "stop_token_ids", "sampling"),
)

token_ids = st.integers(0, VOCABULARY - 1)
slots = st.integers(0, 5)
samplings = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 2, 3, 5, 8, 8, 20, 2**31 - 1])},
    optional={
        "min_tokens": st.sampled_from([1, 2, 4]),
        "ignore_eos": st.just(True),
        "stop_token_ids": st.lists(st.integers(-1, VOCABULARY), max_size=3),
        "processes_logits": st.just(True),
    },
)
impossible_samplings = st.sampled_from(
    [
        {"max_tokens": 0},
        {"max_tokens": 2**31},
        {"max_tokens": 2**70},
        {"max_tokens": "1"},
        {"min_tokens": -1},
        {"stop_token_ids": [2**31]},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": ["1"]},
        {"prompt": b"1234"},
        {"prompt": array("q", [1])},
    ]
)
draftings = st.none() | st.tuples(st.integers(1, 3), st.lists(token_ids, max_size=4))
impossible_counts = st.dictionaries(slots, st.sampled_from([-1, 1, 1, 2, 3, 100, 2**31 - 1]), max_size=4)


def outcome(method, *arguments, **options):
    """Return the value of a call, or the kind of its error."""
    try:
        return "returned", method(*arguments, **options)
    except (ValueError, OverflowError):
        return "raised", ValueError
    except (TypeError, RuntimeError) as error:
        return "raised", type(error)


class Pair:
    """The same sequence for the batch and for the oracle."""

    def __init__(self, actual, expected):
        self.actual, self.expected = actual, expected


class InputBatchMachine(RuleBasedStateMachine):
    """Subclasses set `new_batch` and `new_state` to the implementation under test."""

    new_batch, new_state = InputBatchOracle, SequenceStateOracle
    fixed_options = {}  # noqa: RUF012

    @initialize(
        size=st.sampled_from([1, 3, 6, 6]),
        max_batched_tokens=st.sampled_from([3, 8, 100, 100]),
        max_model_len=st.sampled_from([9, 16, 23]),
        block_size=st.sampled_from([1, 2, 3, 4]),
        windows=st.sampled_from([(None,), (3,), (None, 5), (4, None, 1)]),
        arenas=st.sampled_from([1, 2, 2, 3]),
        most_drafts=st.sampled_from([0, 1, 4]),
        one_sample_a_row=st.booleans(),
    )
    def begin(self, size, **options):
        options |= {"slots": size, "vocab_size": VOCABULARY, "eos_token_ids": EOS} | self.fixed_options
        self.size, self.groups = options["slots"], len(options["windows"])
        self.block_size = options["block_size"]
        self.columns = -(-options["max_model_len"] // self.block_size)
        self.max_model_len = options["max_model_len"]
        self.batch = self.new_batch(**options)
        self.oracle = InputBatchOracle(**options)
        self.keys, self.blocks = count(), count(1)
        self.in_batch, self.not_in_batch = {}, []  # pairs in the batch, by slot, and outside it
        self.steps = []  # steps under way: (actual, expected)
        self.recent_results = []  # (result, its original contents) of some recent commits
        self.ended = set()  # slots of sequences that should be removed
        self.shadow = [[[None] * self.columns for _ in range(self.size)] for _ in range(self.groups)]

    def both(self, method, *arguments):
        """Make the same call on both. The outcomes must be equal."""
        expected = outcome(getattr(self.oracle, method), *arguments)
        actual = outcome(getattr(self.batch, method), *arguments)
        assert expected == actual, method
        return expected

    def new_blocks(self, amount):
        return [next(self.blocks) for _ in range(amount)]

    # Adding sequences

    @rule(
        slot=slots,
        prompt=st.lists(token_ids, min_size=1, max_size=7),
        options=samplings,
        extra=st.integers(0, 2),
        as_buffer=st.booleans(),
    )
    def admit(self, slot, prompt, options, extra, as_buffer):
        self.admit_one(slot, prompt, options, extra, as_buffer=as_buffer)

    def admit_one(self, slot, prompt, options, extra, *, as_buffer):
        pair = self.new_pair(array("i", prompt) if as_buffer else prompt, options)
        self.enter(slot, pair, extra, as_buffer=as_buffer)

    def new_pair(self, prompt, options):
        key, options = next(self.keys), options | {"sampling": object()}
        return Pair(self.new_state(key, prompt, **options), SequenceStateOracle(key, prompt, **options))

    @rule(slot=slots, choice=st.integers(0, 9), extra=st.integers(0, 2), computed=st.integers(-1, 8))
    def admit_again(self, slot, choice, extra, computed):
        """Add a preempted sequence again, with the tokens that the prefix cache still has."""
        if not self.not_in_batch:
            return
        pair = self.not_in_batch.pop(choice % len(self.not_in_batch))
        assert outcome(pair.expected.rewind, computed) == outcome(pair.actual.rewind, computed)
        self.enter(slot, pair, extra, as_buffer=False)

    def enter(self, slot, pair, extra, *, as_buffer):
        amount = -(-pair.expected.computed // self.block_size) + extra
        lists = [self.new_blocks(amount) for _ in range(self.groups)]
        for group, ids in enumerate(lists):
            hidden = self.oracle.hidden(pair.expected.committed, self.oracle.windows[group])
            ids[:hidden] = [-1] * hidden
        block_ids = tuple(array("i", ids) if as_buffer else ids for ids in lists)
        expected = outcome(self.oracle.add_request, slot, pair.expected, block_ids)
        assert expected == outcome(self.batch.add_request, slot, pair.actual, block_ids)
        if expected[0] == "returned":
            self.in_batch[slot] = pair
        else:
            self.not_in_batch.append(pair)

    @rule(new_sequences=st.lists(st.tuples(st.integers(1, 7), samplings), min_size=2, max_size=6))
    def admit_several(self, new_sequences):
        empty = [slot for slot in range(self.size) if slot not in self.in_batch]
        for slot, (length, options) in zip(empty, new_sequences, strict=False):
            self.admit_one(slot, [length] * length, options, 1, as_buffer=False)

    def admit_wrongly(self, slot, block_ids, choice):
        """Add a sequence that may be in the batch already, to a slot that may not exist, with bad blocks."""
        pairs = [*self.in_batch.values(), *self.not_in_batch]
        if not pairs:
            return
        pair = pairs[choice % len(pairs)]
        expected = outcome(self.oracle.add_request, slot, pair.expected, block_ids)
        assert expected[0] == outcome(self.batch.add_request, slot, pair.actual, block_ids)[0]
        if expected[0] == "returned":
            self.not_in_batch.remove(pair)
            self.in_batch[slot] = pair

    def describe_invalid_sequence(self, options):
        options = {"key": 1, "prompt": [1], "max_tokens": 1} | options
        expected = outcome(SequenceStateOracle, **options)
        assert expected[0] == "raised"
        assert expected == outcome(self.new_state, **options)

    # Removing sequences

    @rule(slot=slots)
    def remove(self, slot):
        self.remove_one(slot)

    def remove_one(self, slot):
        if self.both("remove_request", slot)[0] == "returned":
            self.note_removal(slot)

    def note_removal(self, slot):
        self.not_in_batch.append(self.in_batch.pop(slot))
        self.ended.discard(slot)

    @rule()
    def condense(self):
        order = self.batch.order()
        _, moves = self.both("condense")
        for source, target in moves:
            assert source > target
            assert order[source] != -1 == order[target]
            order[source], order[target] = -1, order[source]
        assert order[: len(self.in_batch)] == self.batch.order()
        assert sorted(self.in_batch) == sorted(self.batch.order())

    # Blocks

    @rule(slot=st.integers(-1, 6), amounts=st.lists(st.integers(0, 3), min_size=3, max_size=3))
    def append(self, slot, amounts):
        self.both(
            "append_block_ids", slot, tuple(self.new_blocks(amount) for amount in amounts[: self.groups])
        )

    def append_wrongly(self, slot, block_ids):
        expected = outcome(self.oracle.append_block_ids, slot, block_ids)
        assert expected[0] == outcome(self.batch.append_block_ids, slot, block_ids)[0]

    @rule(slot=slots, group=st.integers(0, 2))
    def slide(self, slot, group):
        self.slide_one(slot, group % self.groups)

    def slide_one(self, slot, group):
        before = self.batch.block_ids(slot) if slot in self.in_batch else None
        result = self.both("slide", slot, group)
        if result[0] == "returned":
            freed = [block for block in before[group] if block not in self.batch.block_ids(slot)[group]]
            assert result[1] == freed
            assert -1 not in freed

    # Steps

    @precondition(lambda self: self.in_batch)
    @rule(
        max_rows=st.sampled_from([0, 1, 2, 3, 100, 100, 100, 100]),
        chunk=st.sampled_from([1, 2, 5, 100, 100]),
        excluded=st.sets(slots, max_size=2),
        drafting=draftings,
    )
    def step(self, max_rows, chunk, excluded, drafting):
        self.step_once(max_rows, chunk, excluded, drafting)

    def step_once(self, max_rows, chunk, excluded, drafting=None):
        """Prepare a step as a scheduler does: survey, allocate blocks, set prefill counts, prepare."""
        _, survey = self.both("survey", max_rows)
        self.check_survey(survey, max_rows)
        for slot in survey.short:
            self.both("append_block_ids", slot, tuple(self.new_blocks(1) for _ in range(self.groups)))
        budget = self.oracle.max_batched_tokens - survey.decodes
        for slot in survey.prefills:
            state = self.oracle.state(slot)
            amount = max(min(chunk, budget, state.num_tokens - state.computed), 0)
            budget -= amount
            need = -(-(state.computed + amount) // self.block_size)
            missing = [max(need - held, 0) for held in self.oracle.block_counts(slot)]
            self.both("append_block_ids", slot, tuple(map(self.new_blocks, missing)))
            self.oracle.num_scheduled[slot] = self.batch.num_scheduled[slot] = amount
        for slot in excluded & self.in_batch.keys():
            self.oracle.num_scheduled[slot] = self.batch.num_scheduled[slot] = 0
        if drafting is not None:
            self.draft(budget, *drafting)
        self.prepare()

    def draft(self, budget, ngram, drafts):
        """Look up drafts, and set others where there is room for them."""
        _, short = self.both("look_up_drafts", ngram, budget)
        for slot in self.in_batch:
            state = self.oracle.state(slot)
            is_last = self.oracle.num_scheduled[slot] == state.num_tokens - state.computed > 0
            if drafts and is_last and not state.pending:
                amount = min(len(drafts), self.oracle.most_drafts)
                self.set_drafts(slot, amount, drafts)
                budget -= amount
            amount = self.oracle.num_drafts[slot]
            assert list(self.oracle.drafts[slot : slot + 1].tolist()[0])[:amount] == self.drafted(slot)
            need = -(-(state.computed + self.oracle.num_scheduled[slot] + amount) // self.block_size)
            missing = [max(need - held, 0) for held in self.oracle.block_counts(slot)]
            if amount and any(missing):
                assert drafts or slot in short
                self.both("append_block_ids", slot, tuple(map(self.new_blocks, missing)))

    def set_drafts(self, slot, amount, drafts):
        for batch in (self.oracle, self.batch):
            batch.num_drafts[slot] = amount
            for index, draft in enumerate(drafts[: batch.drafts.shape[1]]):
                batch.drafts[slot, index] = draft

    def drafted(self, slot):
        return self.batch.drafts.tolist()[slot][: self.batch.num_drafts[slot]]

    def check_survey(self, survey, max_rows):
        assert survey.decodes + len(survey.prefills) <= max_rows
        for slot in self.in_batch:
            assert self.oracle.num_scheduled[slot] == self.batch.num_scheduled[slot]
            assert not (slot in self.ended and self.batch.num_scheduled[slot])

    @rule(
        counts=impossible_counts,
        amount=st.sampled_from([0, 0, -1, 1, 2, 5]),
        draft=st.sampled_from([-1, 1, VOCABULARY]),
    )
    def prepare_invalid_counts(self, counts, amount, draft):
        """Prepare a step with counts or drafts that are mostly invalid."""
        for slot in self.in_batch:
            self.oracle.num_scheduled[slot] = self.batch.num_scheduled[slot] = counts.get(slot, 0)
            self.set_drafts(slot, amount, [draft] * 4)
        self.prepare()

    def prepare(self):
        order = self.batch.order()
        expected = outcome(self.oracle.prepare_inputs)
        actual = outcome(self.batch.prepare_inputs)
        if expected[0] == "raised" or expected[1] is None:
            assert expected == actual
            assert order == self.batch.order()
            return
        assert actual[0] == "returned"
        self.steps.append((actual[1], expected[1]))
        self.check_equal(*self.steps[-1])
        self.check_step(actual[1])
        self.replay_writes(actual[1])

    def check_equal(self, actual, expected):
        names = (
            "number",
            "tokens",
            "rows",
            "decodes",
            "samples",
            "drafts",
            "processes_logits",
            "arena_index",
        )
        for name in (*names, *SECTIONS):
            assert plain(getattr(expected, name)) == plain(getattr(actual, name)), name
        assert plain(expected.slot_mapping) == plain(actual.slot_mapping)
        assert plain(expected.block_writes) == plain(actual.block_writes)
        assert plain(expected.arena) == plain(actual.arena)
        assert tuple(expected.offsets) == tuple(actual.offsets)

    def check_step(self, step):
        """Check the contract of a step, independently of the oracle."""
        starts = step.query_starts
        assert all(start <= end for start, end in pairwise(starts))
        assert (starts[0], starts[-1]) == (0, step.tokens)
        assert list(range(step.decodes + 1)) == list(starts[: step.decodes + 1])
        assert list(range(step.decodes)) == list(step.sample_tokens[: step.decodes])
        assert len(set(step.slots)) == step.rows or self.oracle.one_sample_a_row
        if self.oracle.one_sample_a_row:
            assert set(step.sample_tokens) <= {end - 1 for end in starts[1:]}
        for row, slot in enumerate(step.slots):
            ids = self.batch.state(slot).token_ids()
            for at in range(starts[row], starts[row + 1]):
                position = step.positions[at]
                assert position - step.sequence_lengths[row] == at - starts[row + 1]
                drafts = self.drafted(slot)
                if position < len(ids):
                    assert ids[position] == step.input_ids[at]
                elif drafts:
                    assert drafts[position - len(ids)] == step.input_ids[at]
                else:
                    earlier = self.steps[-2][0]
                    assert slot == earlier.sample_slots[-1 - step.input_ids[at]]
                for group, mapping in enumerate(step.slot_mapping):
                    block = self.batch.block_ids(slot)[group][position // self.block_size]
                    assert block * self.block_size + position % self.block_size == mapping[at]

    def replay_writes(self, step):
        """Apply the block writes to the shadow as the device does, from the arena alone."""
        arena = list(step.arena)
        offsets = Offsets(*arena[HEADER - len(Offsets._fields) : HEADER])
        at, seen = offsets.block_writes, set()
        while at < len(arena):
            group, slot, first, amount = arena[at : at + 4]
            assert (group, slot) not in seen
            seen.add((group, slot))
            self.shadow[group][slot][first : first + amount] = arena[at + 4 : at + 4 + amount]
            at += 4 + amount
        assert (len(arena) - offsets.block_writes, len(seen)) == tuple(arena[4:6])
        for slot in self.in_batch:
            for group, ids in enumerate(self.batch.block_ids(slot)):
                for column, block in enumerate(ids):
                    assert block in (-1, self.shadow[group][slot][column])

    @precondition(lambda self: self.steps)
    @rule(
        token_choices=st.lists(st.integers(4, VOCABULARY - 1), min_size=1, max_size=6),
        replacement=st.sampled_from([None, None, None, -1, VOCABULARY, 2, 3]),
        removes=st.booleans(),
        right=st.integers(0, 4),
    )
    def commit(self, token_choices, replacement, removes, right):
        self.commit_one(token_choices, replacement, removes=removes, right=right)

    def commit_one(self, token_choices, replacement, *, removes, right=2):
        """Commit the oldest step; of each row, the first `right` drafts are what was sampled."""
        actual, expected = self.steps.pop(0)
        sampled = array("i", (token_choices * expected.samples)[: expected.samples])
        at = 0
        for _, _, _, samples, drafts in expected.members:
            for index, draft in enumerate(drafts[:right]):
                sampled[at + index] = draft
            at += samples + len(drafts)
        if replacement is not None and expected.samples:
            sampled[len(token_choices) % expected.samples] = replacement
        expected_result = self.oracle.commit_tokens(expected, sampled)
        found = self.batch.commit_tokens(actual, sampled)
        assert plain(expected_result[:-2]) == plain(found[:-2])
        self.check_results_unchanged(found)
        assert sorted(expected_result.filled) == sorted(found.filled)
        assert sorted(expected_result.rewound) == sorted(found.rewound)
        assert [view.format for view in found[:4]] == ["q", "B", "i", "i"]
        assert [sampled[sample] for sample in found.samples] == list(found.tokens)
        for slot, *_ in expected_result.finished + expected_result.failed:
            self.ended.add(slot)
        for slot in expected_result.rewound:
            self.both("take_unused_blocks", slot)
        if removes:
            for slot in list(self.ended):
                self.remove_one(slot)

    def check_results_unchanged(self, found):
        """Check that results still referenced are not overwritten. Others may be."""
        for recent, before in self.recent_results:
            assert before == plain(recent)
        self.recent_results.append((found, plain(found)))
        if len(self.recent_results) == 3:
            self.recent_results.clear()

    @precondition(lambda self: self.steps)
    @rule(which=st.integers(0, 1))
    def cancel(self, which):
        self.cancel_one(which)

    @precondition(lambda self: len(self.steps) == 2)
    @rule(options=samplings)
    def fail_to_launch(self, options):
        """Cancel the later step, remove its sequences and prepare others beside the earlier step."""
        self.cancel_one(1)
        for slot in list(self.ended):
            self.remove_one(slot)
        empty = next((slot for slot in range(self.size) if slot not in self.in_batch), None)
        if empty is not None:
            self.admit_one(empty, [1, 1], options, 2, as_buffer=False)
            self.step_once(100, 100, set())

    @precondition(lambda self: self.steps and self.in_batch)
    @rule(
        choice=st.integers(0, 5), options=samplings, token_choices=st.lists(token_ids, min_size=1, max_size=6)
    )
    def abort_while_a_step_is_under_way(self, choice, options, token_choices):
        """Abort a sequence, and add another to its slot before the results arrive."""
        slot = sorted(self.in_batch)[choice % len(self.in_batch)]
        self.remove_one(slot)
        self.admit_one(slot, [1, 1], options, 1, as_buffer=False)
        self.commit_one(token_choices, None, removes=False)

    def cancel_one(self, which):
        actual, expected = self.steps.pop(which % len(self.steps))
        expected_result = self.oracle.cancel_step(expected)
        assert expected_result == self.batch.cancel_step(actual)
        self.ended.update(expected_result)
        for row in [row for table in self.shadow for row in table]:
            row[:] = [None] * self.columns  # as if no write under way had arrived
        assert outcome(self.batch.cancel_step, actual)[0] == "raised"
        assert outcome(self.batch.commit_tokens, actual, array("i", bytes(4 * actual.samples)))[0] == "raised"

    def commit_wrongly(self, more):
        if not self.steps:
            return
        actual, _ = self.steps[0]
        assert outcome(self.batch.commit_tokens, actual, [0] * actual.samples)[0] == "raised"
        wrong = array("i", bytes(4 * max(actual.samples + more, 0)))
        if len(wrong) != actual.samples:
            assert outcome(self.batch.commit_tokens, actual, wrong)[0] == "raised"
        if len(self.steps) > 1:
            later, _ = self.steps[1]
            right = array("i", bytes(4 * later.samples))
            assert outcome(self.batch.commit_tokens, later, right)[0] == "raised"

    @precondition(lambda self: self.in_batch)
    @rule(
        overlap=st.booleans(),
        token_choices=st.lists(st.sampled_from(range(1, VOCABULARY)), min_size=1, max_size=9),
        drafting=draftings,
    )
    def run_steps(self, overlap, token_choices, drafting):
        """Run steps as an engine does, with all possible rows and, for `overlap`, one step under way."""
        for start in range(min(len(token_choices), 5)):
            if len(self.steps) < (2 if overlap else 1) and self.in_batch:
                self.step_once(100, 100, set(), drafting)
            while len(self.steps) > overlap:
                self.commit_one(token_choices[start:], None, removes=True)
            for slot in self.in_batch:
                for group in range(self.groups):
                    self.slide_one(slot, group)

    @rule(
        invalid_call=st.one_of(
            st.tuples(
                st.just("admit_wrongly"),
                st.integers(-2, 7),
                st.sampled_from(
                    [
                        None,
                        (),
                        ([],),
                        ([0],),
                        ([-1],),
                        ([2**31],),
                        (["1"],),
                        ([1.0],),
                        ([0], [0]),
                        ([0], []),
                        [[0]],
                    ]
                ),
                st.integers(0, 9),
            ),
            st.tuples(st.just("describe_invalid_sequence"), impossible_samplings),
            st.tuples(
                st.just("append_wrongly"),
                st.integers(-1, 6),
                st.sampled_from(
                    [
                        None,
                        (),
                        ([-1],),
                        ([2**31 - 1],),
                        (["1"],),
                        ([0], [0], [0], [0]),
                        ([], [-1]),
                        ([], [], ["1"]),
                    ]
                ),
            ),
            st.tuples(st.just("both"), st.just("take_unused_blocks"), st.integers(-1, 6)),
            st.tuples(st.just("both"), st.just("look_up_drafts"), st.just(0), st.just(9)),
            st.tuples(st.just("slide_one"), st.integers(-1, 6), st.sampled_from([-1, 3])),
            st.tuples(st.just("commit_wrongly"), st.sampled_from([-1, 1])),
        )
    )
    def invalid_call(self, invalid_call):
        """Make an invalid call. The invariants check that it changed nothing."""
        method, *arguments = invalid_call
        getattr(self, method)(*arguments)

    # Invariants

    @invariant()
    def observable_state_is_equal(self):
        assert self.oracle.num_reqs == self.batch.num_reqs == len(self.in_batch)
        assert self.oracle.steps_under_way == self.batch.steps_under_way == len(self.steps)
        assert self.oracle.order() == self.batch.order()
        assert list(self.oracle.num_scheduled) == list(self.batch.num_scheduled)
        for since in (0, self.oracle.version // 2, self.oracle.version):
            assert tuple(self.oracle.changes(since)) == tuple(self.batch.changes(since))
        for name in COLUMNS:
            expected, actual = getattr(self.oracle, name), getattr(self.batch, name)
            assert len(expected) == len(actual) == self.size
            for slot in self.in_batch:
                assert expected[slot] == actual[slot], name
        for pair in [*self.in_batch.values(), *self.not_in_batch]:
            for fact in STATE_FACTS:
                assert getattr(pair.expected, fact) == getattr(pair.actual, fact), fact
            assert pair.expected.token_ids() == pair.actual.token_ids()
            assert pair.expected.token_ids(1) == pair.actual.token_ids(1)
            assert list(pair.expected.tokens_view()) == list(pair.actual.tokens_view())

    @invariant()
    def slots_and_rows_map_to_each_other(self):
        for slot, pair in self.in_batch.items():
            assert slot == self.batch.order()[self.batch.row_of(slot)]
            assert pair.actual is self.batch.state(slot)
        for slot in set(range(-1, self.size + 1)) - self.in_batch.keys():
            assert outcome(self.batch.row_of, slot) == ("raised", ValueError)
            assert outcome(self.batch.state, slot) == ("raised", ValueError)

    @invariant()
    def tables_are_equal(self):
        for slot in self.in_batch:
            block_ids = self.batch.block_ids(slot)
            assert self.oracle.block_ids(slot) == block_ids
            assert tuple(map(len, block_ids)) == self.batch.block_counts(slot)
            for group, ids in enumerate(block_ids):
                assert ids.tolist() == self.batch.block_table(group).tolist()[slot][: len(ids)]

    @invariant()
    def needed_blocks_are_present(self):
        """Every block that tokens from the last committed one on can see is present."""
        for slot, pair in self.in_batch.items():
            committed = pair.expected.committed
            for ids, window in zip(self.batch.block_ids(slot), self.oracle.windows, strict=True):
                first = 0 if window is None else max(committed - window + 1, 0)
                assert -1 not in ids[first // self.block_size :]


def plain(value):
    """Convert views and arrays to lists, at any depth."""
    if isinstance(value, (memoryview, array)):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value
