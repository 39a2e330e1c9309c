"""An input batch in plain Python, written to be obviously correct. Slow on purpose."""

from array import array
from typing import NamedTuple

INT32_MAX = 2**31 - 1
HEADER = 16
STEPS_AT_ONCE = 2
STOP, LENGTH = 1, 2


class Survey(NamedTuple):
    decodes: int
    prefills: array
    short: array


class SlotChanges(NamedTuple):
    version: int
    removed: list[int]
    added: list[int]


class Offsets(NamedTuple):
    input_ids: int
    positions: int
    slot_mapping: int
    query_starts: int
    sequence_lengths: int
    slots: int
    sample_tokens: int
    sample_slots: int
    block_writes: int


class Committed(NamedTuple):
    keys: memoryview
    counts: memoryview
    tokens: memoryview
    samples: memoryview
    finished: list[tuple[int, int, int]]
    failed: list[tuple[int, int]]
    filled: array
    rewound: array


class SequenceStateOracle:
    """The interface of `SequenceState`. `tokens` are committed; `pending` counts those of steps under way."""

    def __init__(
        self,
        key,
        prompt,
        *,
        max_tokens,
        min_tokens=0,
        ignore_eos=False,
        stop_token_ids=(),
        processes_logits=False,
        sampling=None,
    ):
        self.tokens = checked_integers(prompt, 0)
        check(len(self.tokens) >= 1)
        check(1 <= max_tokens <= INT32_MAX and 0 <= min_tokens <= INT32_MAX)
        self.key, self.sampling = key, sampling
        self.prompt_length = len(self.tokens)
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        self.ignore_eos, self.processes_logits = ignore_eos, processes_logits
        self.stop_token_ids = tuple(checked_integers(stop_token_ids, -INT32_MAX - 1))
        self.computed = self.committed = self.pending = 0
        self.slot = -1

    @property
    def num_tokens(self):
        return len(self.tokens) + self.pending

    @property
    def output_length(self):
        return len(self.tokens) - self.prompt_length

    def token_ids(self, start=0):
        check(0 <= start <= len(self.tokens))
        return array("i", self.tokens[start:])

    def tokens_view(self):
        return memoryview(self.token_ids()).toreadonly()

    def rewind(self, computed):
        check(self.slot == -1 and 0 <= computed < len(self.tokens))
        self.computed = self.committed = computed


class Occupant:
    """A sequence in a slot. `version` is the number of its addition."""

    def __init__(self, state, version, blocks, latest):
        self.state, self.version = state, version
        self.last_scheduled = latest  # as if it were in the latest step
        self.blocks = blocks  # by group
        self.staged = [0] * len(blocks)  # by group: the first column not yet on the device; None: all are
        self.drafting = False  # drafts of it are under way
        self.ended = False  # finished, failed or canceled: takes part in no further step, to be removed
        self.sample = 0  # index of its pending token, if there is one, among its step's samples


class StepOracle:
    """The interface of `Step`: views into an arena."""

    def __init__(self, number, arena_index, arena, sections, members, *, decodes):
        self.number, self.arena_index, self.decodes = number, arena_index, decodes
        self.members = members  # (slot, occupant, count, samples, drafts)
        offsets, words = [], []
        for section in sections[:-2]:
            offsets.append(HEADER + len(words))
            words += section
        self.samples, starts = len(sections[-2]), sections[3]
        self.drafts = sum(len(drafts) for *_, drafts in members)
        ends = [end - 1 for end in starts[1:]]
        if sections[6] == ends:  # each row samples once, so the section `slots` is the same
            offsets.append(offsets[5])
        else:
            offsets.append(HEADER + len(words))
            words += sections[-2]
        offsets.append(HEADER + len(words))
        words += [word for write in sections[-1] for word in write]
        self.offsets = Offsets(*offsets)
        self.tokens, self.rows = len(sections[0]), len(ends)
        self.processes_logits = any(
            samples and occupant.state.processes_logits for _, occupant, _, samples, _ in members
        )
        self.groups = len(sections[2]) // self.tokens
        sizes = [self.tokens, self.rows, self.decodes, self.samples]
        header = [*sizes, HEADER + len(words) - offsets[-1], len(sections[-1]), self.groups, *offsets]
        for i, word in enumerate(header + words):
            arena[i] = word
        self.arena = arena[: HEADER + len(words)]

    def section(self, name, length):
        start = getattr(self.offsets, name)
        return self.arena[start : start + length]

    @property
    def input_ids(self):
        return self.section("input_ids", self.tokens)

    @property
    def positions(self):
        return self.section("positions", self.tokens)

    @property
    def slot_mapping(self):
        every = self.section("slot_mapping", self.groups * self.tokens)
        return tuple(every[group * self.tokens : (group + 1) * self.tokens] for group in range(self.groups))

    @property
    def query_starts(self):
        return self.section("query_starts", self.rows + 1)

    @property
    def sequence_lengths(self):
        return self.section("sequence_lengths", self.rows)

    @property
    def slots(self):
        return self.section("slots", self.rows)

    @property
    def sample_tokens(self):
        return self.section("sample_tokens", self.samples)

    @property
    def sample_slots(self):
        return self.section("sample_slots", self.samples)

    @property
    def block_writes(self):
        return self.arena[self.offsets.block_writes :]


class InputBatchOracle:
    """The interface of `InputBatch`, ended `SequenceStateOracle`."""

    def __init__(
        self,
        *,
        slots,
        max_batched_tokens,
        max_model_len,
        block_size,
        vocab_size,
        windows=(None,),
        eos_token_ids=(),
        arenas=2,
        most_drafts=0,
        one_sample_a_row=False,
    ):
        self.most_drafts, self.one_sample_a_row = most_drafts, one_sample_a_row
        self.num_drafts = memoryview(array("i", bytes(4 * slots)))
        self.drafts = memoryview(bytearray(4 * slots * max(1, most_drafts))).cast(
            "i", (slots, max(1, most_drafts))
        )
        check(slots >= 1 and max_batched_tokens >= 1 and block_size >= 1 and vocab_size >= 1)
        check(max_model_len >= 2 and len(windows) >= 1)
        check(all(window is None or window >= 1 for window in windows))
        self.slots, self.max_batched_tokens, self.max_model_len = slots, max_batched_tokens, max_model_len
        self.block_size, self.vocab_size, self.windows = block_size, vocab_size, tuple(windows)
        self.eos_token_ids = set(eos_token_ids)
        self.columns = -(-max_model_len // block_size)
        self.largest_block = (INT32_MAX + 1) // block_size - 1  # so that a cache index fits in int32
        size = self.arena_size(
            slots=slots,
            max_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            groups=len(windows),
            most_drafts=most_drafts,
        )
        if isinstance(arenas, int):
            arenas = [bytearray(size) for _ in range(arenas)]
        self.arenas = [memoryview(arena).cast("B").cast("i") for arena in arenas]
        check(len(self.arenas) >= 1)
        check(all(arena.nbytes >= size and not arena.readonly for arena in self.arenas))
        self.occupants = {}  # slot -> Occupant
        self.rows = []  # slot by row; -1: a hole
        self.under_way = []
        self.steps = self.version = 0
        self.changed = {}  # slot -> version of its latest addition or removal
        self.last_served = self.last_chosen = 0  # versions; 0: all could be chosen
        self.arena_last = len(self.arenas) - 1
        self.num_scheduled = memoryview(array("i", bytes(4 * slots)))
        self.tables = [
            memoryview(bytearray(4 * slots * self.columns)).cast("i", (slots, self.columns)) for _ in windows
        ]

    @staticmethod
    def arena_size(*, slots, max_batched_tokens, max_model_len, block_size, groups=1, most_drafts=0):
        rows = min(slots * (1 + most_drafts), max_batched_tokens)
        columns = -(-max_model_len // block_size)
        words = HEADER + (2 + groups) * max_batched_tokens + 5 * rows + 1 + groups * slots * (4 + columns)
        return 4 * words

    # Membership

    @property
    def num_reqs(self):
        return len(self.occupants)

    @property
    def steps_under_way(self):
        return len(self.under_way)

    def add_request(self, slot, state, block_ids):
        check(0 <= slot < self.slots and slot not in self.occupants and state.slot == -1)
        check(isinstance(block_ids, tuple) and len(block_ids) == len(self.windows))
        blocks = [checked_integers(ids, -1, self.largest_block) for ids in block_ids]
        for ids, window in zip(blocks, self.windows, strict=True):
            check(len(ids) <= self.columns and len(ids) * self.block_size >= state.computed)
            hidden = self.hidden(state.committed, window)
            check(all(block >= 0 or column < hidden for column, block in enumerate(ids)))
        check(state.num_tokens < self.max_model_len and state.output_length < state.max_tokens)
        check(state.computed < len(state.tokens) and max(state.tokens) < self.vocab_size)
        self.version += 1
        self.changed[slot] = self.version
        self.occupants[slot] = Occupant(state, self.version, blocks, self.steps)
        state.slot = slot
        for group, ids in enumerate(blocks):
            for column, block in enumerate(ids):
                self.tables[group][slot, column] = block
        self.num_scheduled[slot] = self.num_drafts[slot] = 0
        return self.enter_row(slot)

    def enter_row(self, slot):
        if -1 in self.rows:
            row = self.rows.index(-1)
            self.rows[row] = slot
        else:
            row = len(self.rows)
            self.rows.append(slot)
        return row

    def remove_request(self, slot):
        state = self.occupant(slot).state
        del self.occupants[slot]
        self.version += 1
        self.changed[slot] = self.version
        state.pending, state.slot = 0, -1
        state.computed = state.committed
        self.num_scheduled[slot] = self.num_drafts[slot] = 0
        self.rows[self.rows.index(slot)] = -1

    def changes(self, since):
        slots = sorted(slot for slot, version in self.changed.items() if version > since)
        return SlotChanges(
            self.version,
            [slot for slot in slots if slot not in self.occupants],
            [slot for slot in slots if slot in self.occupants],
        )

    def condense(self):
        moves = []
        while True:
            while self.rows and self.rows[-1] == -1:
                self.rows.pop()
            if -1 not in self.rows:
                return moves
            target = self.rows.index(-1)
            moves.append((len(self.rows) - 1, target))
            self.rows[target] = self.rows.pop()

    def order(self):
        return list(self.rows)

    def row_of(self, slot):
        self.occupant(slot)
        return self.rows.index(slot)

    def state(self, slot):
        return self.occupant(slot).state

    def occupant(self, slot):
        check(slot in self.occupants)
        return self.occupants[slot]

    # Block tables

    def append_block_ids(self, slot, block_ids):
        occupant = self.occupant(slot)
        check(isinstance(block_ids, tuple) and len(block_ids) == len(self.windows))
        appended = [checked_integers(ids, 0, self.largest_block) for ids in block_ids]
        for blocks, ids in zip(occupant.blocks, appended, strict=True):
            check(len(blocks) + len(ids) <= self.columns)
        for group, ids in enumerate(appended):
            for block in ids:
                self.append(slot, group, block)

    def append(self, slot, group, block):
        occupant = self.occupants[slot]
        column = len(occupant.blocks[group])
        occupant.blocks[group].append(block)
        self.tables[group][slot, column] = block
        if occupant.staged[group] is None:
            occupant.staged[group] = column

    def block_ids(self, slot):
        return tuple(array("i", blocks) for blocks in self.occupant(slot).blocks)

    def block_counts(self, slot):
        return tuple(len(blocks) for blocks in self.occupant(slot).blocks)

    def block_table(self, group):
        check(0 <= group < len(self.windows))
        return self.tables[group]

    def take_unused_blocks(self, slot):
        occupant = self.occupant(slot)
        columns = -(-occupant.state.num_tokens // self.block_size)
        taken = tuple(blocks[columns:] for blocks in occupant.blocks)
        for group, blocks in enumerate(occupant.blocks):
            del blocks[columns:]
            if occupant.staged[group] is not None and occupant.staged[group] >= len(blocks):
                occupant.staged[group] = None
        return taken

    def slide(self, slot, group):
        occupant = self.occupant(slot)
        check(0 <= group < len(self.windows))
        freed = []
        for column in range(self.hidden(occupant.state.committed, self.windows[group])):
            if occupant.blocks[group][column] >= 0:
                freed.append(occupant.blocks[group][column])
                occupant.blocks[group][column] = -1
                self.tables[group][slot, column] = -1
        return freed

    def hidden(self, committed, window):
        """Return how many blocks no token from `committed` on can see."""
        return 0 if window is None else max(0, committed - window + 1) // self.block_size

    # A step

    def remaining(self, occupant):
        return occupant.state.num_tokens - occupant.state.computed

    def limit(self, state):
        """Return the number of tokens at which a sequence ends."""
        return min(state.prompt_length + state.max_tokens, self.max_model_len)

    def may_run(self, occupant):
        going_on = not (occupant.ended or occupant.drafting)
        return going_on and occupant.state.num_tokens < self.limit(occupant.state)

    def holds(self, occupant, tokens):
        return all(len(blocks) * self.block_size >= tokens for blocks in occupant.blocks)

    def survey(self, max_rows):
        check(max_rows >= 0)
        able = [slot for slot in self.rows if slot != -1 and self.may_run(self.occupants[slot])]
        chosen = self.most_urgent(able)[:max_rows]
        self.last_chosen = self.occupants[chosen[-1]].version if 0 < len(chosen) < len(able) else 0
        decodes = [slot for slot in able if slot in chosen and self.remaining(self.occupants[slot]) == 1]
        prefills = [slot for slot in chosen if self.remaining(self.occupants[slot]) > 1]
        for slot in self.occupants:
            self.num_scheduled[slot] = int(slot in decodes)
            self.num_drafts[slot] = 0
        return Survey(
            decodes=len(decodes),
            prefills=array("i", sorted(prefills, key=lambda slot: self.occupants[slot].version)),
            short=array(
                "i",
                [
                    s
                    for s in decodes
                    if not self.holds(self.occupants[s], self.occupants[s].state.computed + 1)
                ],
            ),
        )

    def most_urgent(self, slots):
        """Sort by last step, oldest first. Equals are in order of admission, starting after `last_served`."""

        def urgency(slot):
            occupant = self.occupants[slot]
            return occupant.last_scheduled, occupant.version <= self.last_served, occupant.version

        return sorted(slots, key=urgency)

    def prepare_inputs(self):
        if len(self.under_way) == min(STEPS_AT_ONCE, len(self.arenas)):
            raise RuntimeError
        counts = {slot: self.num_scheduled[slot] for slot in self.occupants}
        for slot, count in counts.items():
            occupant = self.occupants[slot]
            if count:
                check(0 < count <= self.remaining(occupant))
                drafts = self.drafts_of(slot)
                check(
                    self.may_run(occupant) and self.may_have(occupant, count, self.num_drafts[slot], drafts)
                )
                check(self.holds(occupant, occupant.state.computed + count + len(drafts)))
        drafts = sum(len(self.drafts_of(slot)) for slot, count in counts.items() if count)
        check(sum(counts.values()) + drafts <= self.max_batched_tokens)
        if not any(counts.values()):
            return None
        self.condense()
        self.last_served = self.last_chosen or self.last_served
        step = self.new_step(self.step_rows({slot: count for slot, count in counts.items() if count}))
        self.under_way.append(step)
        return step

    def step_rows(self, counts):
        scheduled = [slot for slot in self.rows if slot in counts]
        decodes = [
            slot
            for slot in scheduled
            if counts[slot] == 1 == self.remaining(self.occupants[slot])
            and (self.one_sample_a_row or not self.drafts_of(slot))
        ]
        others = [slot for slot in scheduled if slot not in decodes]
        self.decodes = sum(1 + len(self.drafts_of(slot)) for slot in decodes)
        return [
            (
                slot,
                self.occupants[slot],
                counts[slot],
                counts[slot] == self.remaining(self.occupants[slot]),
                self.drafts_of(slot),
            )
            for slot in decodes + others
        ]

    def drafts_of(self, slot):
        """Return a slot's drafts; none if there can be none."""
        amount = self.num_drafts[slot] if self.most_drafts else 0
        return [self.drafts[slot, index] for index in range(min(max(amount, 0), self.most_drafts))]

    def may_have(self, occupant, count, amount, drafts):
        """Return whether a row of `count` tokens may have these drafts, of which there should be `amount`."""
        if not self.most_drafts or amount == 0:
            return True
        state = occupant.state
        return (
            amount == len(drafts)
            and state.pending == 0
            and count == self.remaining(occupant)
            and len(state.tokens) + amount < self.limit(state)
            and all(0 <= draft < self.vocab_size for draft in drafts)
        )

    def look_up_drafts(self, ngram, budget):
        check(ngram >= 1)
        short = []
        for slot in [slot for slot in self.rows if slot != -1]:
            occupant = self.occupants[slot]
            state = occupant.state
            may = self.remaining(occupant) == 1 and not state.pending
            if budget <= 0 or self.num_scheduled[slot] != 1 or not may:
                continue
            most = min(self.most_drafts, budget, self.limit(state) - len(state.tokens) - 1)
            drafts = self.what_followed(state.tokens, ngram, most)
            for index, draft in enumerate(drafts):
                self.drafts[slot, index] = draft
            self.num_drafts[slot] = len(drafts)
            budget -= len(drafts)
            if not self.holds(occupant, state.computed + 1 + len(drafts)):
                short.append(slot)
        return array("i", short)

    def what_followed(self, tokens, ngram, most):
        """Return `most` tokens after the latest earlier place of the last `ngram`, which may go on there."""
        for end in range(len(tokens) - 1, ngram - 1, -1):
            if tokens[end - ngram : end] == tokens[-ngram:]:
                text = list(tokens)
                for index in range(most):
                    text.append(text[end + index])
                return text[len(tokens) :]
        return []

    def new_step(self, members):
        input_ids, positions, slot_mapping = [], [], [[] for _ in self.windows]
        query_starts, sequence_lengths, slots, sample_tokens, sample_slots = [0], [], [], [], []
        self.steps += 1
        for slot, occupant, count, samples, drafts in members:
            state = occupant.state
            known = self.known(occupant) + drafts
            after_known = state.computed + count
            for position in range(state.computed, after_known + len(drafts)):
                input_ids.append(known[position])
                positions.append(position)
                for group, mapping in enumerate(slot_mapping):
                    mapping.append(self.cache_slot(occupant.blocks[group], position))
                if position >= after_known - 1 and samples:
                    if position < after_known:
                        occupant.sample = len(sample_tokens)
                    sample_tokens.append(len(input_ids) - 1)
                    sample_slots.append(slot)
                is_last = position == after_known + len(drafts) - 1
                if is_last or (self.one_sample_a_row and position >= after_known - 1):
                    query_starts.append(len(input_ids))
                    sequence_lengths.append(position + 1)
                    slots.append(slot)
            state.computed = after_known + len(drafts)
            state.pending += samples
            occupant.drafting = bool(drafts)
            occupant.last_scheduled = self.steps
        sections = [
            input_ids,
            positions,
            [word for mapping in slot_mapping for word in mapping],
            query_starts,
            sequence_lengths,
            slots,
            sample_tokens,
            sample_slots,
            self.take_staged(),
        ]
        index = self.next_arena()
        return StepOracle(self.steps, index, self.arenas[index], sections, members, decodes=self.decodes)

    def known(self, occupant):
        """Return the known token ids, then placeholders for the pending ones."""
        return occupant.state.tokens + [-1 - occupant.sample] * occupant.state.pending

    def next_arena(self):
        taken = [step.arena_index for step in self.under_way]
        while True:
            self.arena_last = (self.arena_last + 1) % len(self.arenas)
            if self.arena_last not in taken:
                return self.arena_last

    def cache_slot(self, blocks, position):
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def take_staged(self):
        """Return the staged writes in the order of slots, without leading blocks that slid out."""
        writes = []
        for group in range(len(self.windows)):
            for slot, occupant in sorted(self.occupants.items()):
                first, blocks = occupant.staged[group], occupant.blocks[group]
                occupant.staged[group] = None
                if first is None:
                    continue
                while first < len(blocks) and blocks[first] == -1:
                    first += 1
                ids = blocks[first:]
                if ids:
                    writes.append([group, slot, first, len(ids), *ids])
        return writes

    def commit_tokens(self, step, sampled):  # noqa: C901  in one piece, to be read beside the kernel
        check(self.under_way and step is self.under_way[0])
        sampled = memoryview(sampled)
        check(sampled.format == "i" and sampled.shape == (step.samples,))
        self.under_way.pop(0)
        keys, counts, tokens, which = array("q"), array("B"), array("i"), array("i")
        finished, failed, filled, rewound = [], [], array("i"), array("i")
        samples_left = iter(enumerate(sampled))
        for slot, occupant, count, samples, drafts in step.members:
            own = [next(samples_left) for _ in range(1 + len(drafts))] if samples else []
            if not self.is_present(slot, occupant):
                continue
            state, taken = occupant.state, []
            before = state.committed
            for (index, token), expected in zip(own, [None, *drafts], strict=False):
                if taken and taken[-1] != expected:
                    break
                if not 0 <= token < self.vocab_size:
                    if not taken:
                        failed.append((slot, index))
                        self.end(occupant)
                    break
                state.tokens.append(token)
                taken.append(token)
                tokens.append(token)
                which.append(index)
                reason = self.reason_to_end(state, token)
                if reason:
                    finished.append((slot, reason, len(keys)))
                    self.end(occupant)
                    break
            if taken:
                keys.append(state.key)
                counts.append(len(taken))
            if own and not occupant.ended:
                state.pending -= 1
            right = max(0, len(taken) - 1)
            state.committed += count + right
            if drafts:
                occupant.drafting = False
                state.computed = state.committed
                if right < len(drafts):
                    rewound.append(slot)
            if state.committed // self.block_size > before // self.block_size:
                filled.append(slot)
        views = map(memoryview, (keys, counts, tokens, which))
        return Committed(*views, finished, failed, filled, rewound)

    def is_present(self, slot, occupant):
        return self.occupants.get(slot) is occupant and not occupant.ended

    def end(self, occupant):
        occupant.ended = True
        occupant.state.pending = 0

    def reason_to_end(self, state, token):
        ends = token in state.stop_token_ids or (token in self.eos_token_ids and not state.ignore_eos)
        if ends and state.output_length >= state.min_tokens:
            return STOP
        return LENGTH if len(state.tokens) >= self.limit(state) else None

    def cancel_step(self, step):
        check(step in self.under_way)
        self.under_way.remove(step)
        present = [(slot, occupant) for slot, occupant, *_ in step.members if self.is_present(slot, occupant)]
        for _, occupant in present:
            self.end(occupant)
        for occupant in self.occupants.values():
            occupant.staged = [0 for _ in self.windows]  # which of its writes arrived is unknown
        return [slot for slot, _ in present]

    # Columns that change

    def column(self, value_of):
        values = [
            value_of(self.occupants[slot].state) if slot in self.occupants else 0
            for slot in range(self.slots)
        ]
        return memoryview(array("i", values))

    @property
    def num_tokens(self):
        return self.column(lambda state: state.num_tokens)

    @property
    def num_prompt_tokens(self):
        return self.column(lambda state: state.prompt_length)

    @property
    def num_computed_tokens(self):
        return self.column(lambda state: state.computed)

    @property
    def output_tokens(self):
        return self.column(lambda state: state.output_length)


def checked_integers(values, least, most=INT32_MAX):
    """Return the numbers of a list or int32 buffer. Raise ValueError unless each is `least` … `most`."""
    if not isinstance(values, (list, tuple, range)):
        view = memoryview(values)
        if view.format not in ("i", "l") or view.itemsize != 4 or view.ndim != 1 or not view.c_contiguous:
            raise TypeError
        values = view
    values = list(values)
    if not all(type(value) is int for value in values):
        raise TypeError
    check(all(least <= value <= most for value in values))
    return values


def check(condition):
    if not condition:
        raise ValueError
