"""A fake model: a function of the tokens, a runner that reads its input from a fake KV cache, and a loop.

Errors change the output: a block shared by mistake, a row at a wrong position, a lost token, or a block table
that was not copied to the device.
"""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ReadOnlySequence

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.base.job import Sampling
from fairlead.base.messages import EngineStatistics, Output, StepOutputs
from fairlead.engine.engine import Engine
from fairlead.engine.step import Outcome, PendingStep, Runner, SampledTokens

VOCABULARY = 13
EOS = 0
START = 7

Pick = Callable[[InputBatch, Step, int, int | str], int | str]


def mixed(state: int, token_id: int) -> int:
    """Return the state of a layer with full attention after one more token."""
    return (state * 31 + token_id + 1) % 10_007


def chosen(state: int, seen: ReadOnlySequence[int]) -> int:
    """Return the next token, from the state after all tokens and from those within a window."""
    return (state + sum(place * token_id for place, token_id in enumerate(seen, 1))) % VOCABULARY


def next_token(token_ids: ReadOnlySequence[int], windows: ReadOnlySequence[int | None] = (None,)) -> int:
    """Return the token that follows these tokens."""
    state = START
    for token_id in token_ids:
        state = mixed(state, token_id)
    seen = [token_id for window in windows if window is not None for token_id in token_ids[-window:]]
    return chosen(state if None in windows else START, seen)


def answer(
    prompt: ReadOnlySequence[int],
    sampling: Sampling,
    longest: int,
    windows: ReadOnlySequence[int | None] = (None,),
) -> tuple[list[int], str]:
    """Return the whole output and its finish reason, computed token by token in a plain loop."""
    output: list[int] = []
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    most = min(sampling.max_tokens, longest - len(prompt))
    least = min(sampling.min_tokens, most)
    while len(output) < most:
        output.append(next_token([*prompt, *output], windows))
        if output[-1] in stops and len(output) >= least:
            return output, "stop"
    return output, "length"


class FakeRunner:
    """Runs steps, in order, on a fake device with its own block tables and KV cache.

    With `overlaps`, a step runs as late as possible: in `wait`, from the arena's contents at that time.
    `pick` receives the batch, the step, the row and the model's next token. It returns the token to use
    instead, or an error message for the row.
    """

    def __init__(
        self,
        block_size: int,
        *,
        windows: ReadOnlySequence[int | None] = (None,),
        overlaps: bool = False,
        samples_several: bool = True,
        pick: Pick | None = None,
    ) -> None:
        self.overlaps = overlaps
        self.samples_several = samples_several
        self.columns: dict[str, int] = {}
        self.arenas = 2
        self.windows = windows
        self.steps = 0
        self.computed = 0  # tokens that the model computed
        self._block_size = block_size
        self._pick = pick
        self._tables: dict[tuple[int, int], dict[int, int]] = {}  # (group, slot): column → block
        self._cache: list[dict[int, tuple[int, int, int | None]]] = [{} for _ in windows]
        self._picked: dict[int, array[int]] = {}
        self._queue: deque[PendingFake] = deque()

    def launch(self, step: Step, batch: InputBatch) -> "PendingFake":
        pending = PendingFake(self, step, batch)
        self._queue.append(pending)
        if not self.overlaps:
            self.work_until(pending)
        return pending

    def release(self, blocks: ReadOnlySequence[ReadOnlySequence[int]]) -> None:
        """Do nothing: the cache is a dictionary."""

    def work_until(self, pending: "PendingFake") -> None:
        while pending.picks is None and pending.error is None:
            oldest = self._queue.popleft()
            try:
                oldest.picks = self.run(oldest.step, oldest.batch, broken=oldest.broken)
            except Exception as error:  # noqa: BLE001  raised by `wait` of that step
                oldest.error = error

    def run(self, step: Step, batch: InputBatch, *, broken: bool = False) -> SampledTokens:
        self.steps += 1
        self.computed += step.tokens
        self._take_block_writes(list(step.block_writes))
        if broken:
            raise RuntimeError("the device is broken")
        before = self._picked.get(step.number - 1)
        token_id: int | str
        token_ids = array("i")
        errors: dict[int, str] = {}
        sampled = set(step.sample_tokens)
        for row in range(step.rows):
            first, last = step.query_starts[row], step.query_starts[row + 1]
            slot = step.slots[row]
            for index in range(first, last):
                token_id = step.input_ids[index]
                if token_id < 0:
                    # A failed step has no tokens, and the sequences that continue from it have failed too.
                    token_id = 0 if before is None else before[-1 - token_id]
                self._compute(step, index, slot, token_id)
                if index not in sampled:
                    continue
                token_id = self._answer(slot, step.positions[index])
                if self._pick is not None:
                    token_id = self._pick(batch, step, row, token_id)
                if isinstance(token_id, str):
                    errors[len(token_ids)] = token_id
                token_ids.append(-1 if isinstance(token_id, str) else token_id)
            assert step.sequence_lengths[row] == step.positions[last - 1] + 1
        self._picked = {step.number: token_ids}
        return SampledTokens(token_ids, {}, errors)

    def _take_block_writes(self, words: list[int]) -> None:
        while words:
            group, slot, first, count, *words = words
            table = self._tables.setdefault((group, slot), {})
            for column, block in enumerate(words[:count], first):
                table[column] = block
            words = words[count:]

    def _place(self, group: int, slot: int, position: int) -> int:
        block = self._tables.get((group, slot), {}).get(position // self._block_size, -1)
        return -1 if block < 0 else block * self._block_size + position % self._block_size

    def _compute(self, step: Step, index: int, slot: int, token_id: int) -> None:
        """Write a token to the cache: its id, its position and the state of all tokens up to it."""
        position = step.positions[index]
        for group, window in enumerate(self.windows):
            place = self._place(group, slot, position)
            state: int | None = START
            if window is None and position > 0:
                state = self._read(group, slot, position - 1)[1]
            self._cache[group][place] = token_id, position, None if state is None else mixed(state, token_id)
            if place != step.slot_mapping[group][index]:
                self._cache[group][place] = token_id, -1, None

    def _read(self, group: int, slot: int, position: int) -> tuple[int, int | None]:
        """Return the token at a position and the state up to it; None if the cache lacks that position."""
        token_id, at, state = self._cache[group].get(self._place(group, slot, position), (0, -1, None))
        return (token_id, state) if at == position else (0, None)

    def _answer(self, slot: int, position: int) -> int | str:
        """Return the next token. Only a sequence that has left may read unwritten positions: an error."""
        state: int | None = START
        seen = []
        for group, window in enumerate(self.windows):
            if window is None:
                state = self._read(group, slot, position)[1]
                continue
            for earlier in range(max(0, position - window + 1), position + 1):
                token_id, made = self._read(group, slot, earlier)
                seen.append(token_id)
                state = None if made is None else state
        return "read what was never written" if state is None else chosen(state, seen)


_runner_type: type[Runner] = FakeRunner  # so that mypy compares them


class PendingFake(PendingStep):
    def __init__(self, runner: FakeRunner, step: Step, batch: InputBatch) -> None:
        self._runner, self.step, self.batch = runner, step, batch
        self.broken = False  # set it before the step runs
        self.picks: SampledTokens | None = None
        self.error: Exception | None = None

    def wait(self) -> SampledTokens:
        self._runner.work_until(self)
        if self.broken:
            raise RuntimeError("the device is broken")
        if self.error is not None:
            raise self.error
        assert self.picks is not None
        return self.picks


class Loop:
    """Runs an engine with a runner as a model's process does, and collects the outputs of each sequence."""

    def __init__(self, engine: Engine, runner: FakeRunner) -> None:
        self.engine, self.runner = engine, runner
        self.now_s = 0.0
        self.under_way: tuple[Step, PendingFake] | None = None
        self.token_ids_of: dict[int, list[int]] = {}
        self.ends: dict[int, Output] = {}

    def turn(self, seconds: float = 0.01) -> None:
        self.now_s += seconds
        before, self.under_way = self.under_way, None
        step = self.engine.plan(self.now_s)
        if step is not None:
            self.under_way = step, self.runner.launch(step, self.engine.batch)
        if before is None and step is None:
            self.collect(self.engine.take_outcome())
        if before is not None:
            self.finish(*before)
        if self.under_way is not None and not self.runner.overlaps:
            before, self.under_way = self.under_way, None
            self.finish(*before)

    def finish(self, step: Step, pending: PendingFake) -> None:
        try:
            picks = pending.wait()
        except RuntimeError as error:
            self.collect(self.engine.fail(step, str(error)))
            return
        self.collect(self.engine.commit(step, picks))

    def collect(self, outcome: Outcome) -> None:
        named = [*memoryview(outcome.keys).cast("q"), *(output.key for output in outcome.outputs)]
        assert len(set(named)) == len(named)
        frame = StepOutputs(outcome.keys, outcome.tokens, [], EngineStatistics(), outcome.counts)
        for key, token_id in frame.plain():
            self.collect_output(Output(key, [token_id]))
        for output in outcome.outputs:
            self.collect_output(output)

    def collect_output(self, output: Output) -> None:
        assert output.key not in self.ends
        self.token_ids_of.setdefault(output.key, []).extend(output.token_ids)
        if output.finish_reason is not None or output.error is not None:
            self.ends[output.key] = output

    def run(self, turns: int = 10_000) -> "Loop":
        """Turn until the engine is idle; more than `turns` turns would be a livelock."""
        for _ in range(turns):
            if self.engine.idle and self.under_way is None:
                return self
            self.turn()
        raise AssertionError("the engine does not come to an end")
