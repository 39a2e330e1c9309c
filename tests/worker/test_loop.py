"""The child's loop without a socket, a process or a device: the order of its actions, and its frames."""

from array import array
from itertools import count
from random import Random

import pytest

from engine import fake_model
from fairlead import messages
from fairlead.engine.engine import Engine
from fairlead.engine.step import SampledTokens
from fairlead.job import Sampling
from fairlead.worker.loop import Loop
from fairlead.worker.main import ParentGone

VOCABULARY = 50
ENDLESS = Sampling(max_tokens=900)


class World:
    """A loop with its clock, inbox and device; `log` has the events in order.

    A step takes `step_s` from its launch. A launch or a wait raises the error under its number in
    `launch_errors` or `wait_errors`. The loop reads `inbox`; blocking on an empty one raises `ParentGone`.
    """

    def __init__(self, *, overlaps: bool = False, slots: int = 4, **options: float) -> None:
        self.overlaps = overlaps
        self.arenas = 2
        self.log: list[str] = []
        self.inbox: list[messages.ToChild] = []
        self.frames: list[messages.StepOutputs] = []
        self.released: list[tuple[float, list[list[int]]]] = []
        self.reports: list[Exception] = []
        self.launch_errors: dict[int, Exception] = {}
        self.wait_errors: dict[int, Exception] = {}
        self.now_s = 100.0
        self.step_s = 2.0
        self._numbers = count(1)
        self._free_at_s = 0.0
        self.engine = Engine(
            self,
            slots=slots,
            max_batch=slots,
            max_batched_tokens=64,
            max_model_len=1000,
            blocks_total=200,
            block_size=16,
            vocab_size=VOCABULARY,
            eos_token_ids=(0,),
            draw_seed=lambda: 1,
            **options,
        )
        self.loop = Loop(
            self.engine, self, self, clock=lambda: self.now_s, report_failure=self.reports.append
        )

    # The channel -------------------------------------------------------------------------------------

    def read(self, *, wait_s: float | None) -> list[bytes]:
        if not self.inbox and wait_s is None:
            self.log.append("blocked")
            raise ParentGone
        if not self.inbox:
            self.now_s += wait_s
        frames, self.inbox = [messages.encode_frame(message)[4:] for message in self.inbox], []
        return frames

    def write(self, message: messages.ToParent) -> None:
        assert isinstance(message, messages.StepOutputs)
        self.frames.append(message)
        self.log.append(f"frame {len(self.frames)}")

    # The device --------------------------------------------------------------------------------------

    def launch(self, step, batch) -> "Pending":
        number = next(self._numbers)
        assert batch is self.engine.batch
        if number in self.launch_errors:
            raise self.launch_errors[number]
        self.log.append(f"launch {number}")
        self._free_at_s = max(self._free_at_s, self.now_s) + self.step_s
        if not self.overlaps:
            self.now_s = self._free_at_s
        return Pending(self, number, step.samples, self._free_at_s)

    def release(self, blocks) -> None:
        self.released.append((self.now_s, blocks))

    # For the tests -----------------------------------------------------------------------------------

    def submit(self, key: int, sampling: Sampling = ENDLESS, prompt=(5, 6, 7), **options) -> None:
        self.inbox.append(messages.Submit(key, messages.pack_tokens(prompt), sampling, **options))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()

    def until_blocked(self) -> None:
        with pytest.raises(ParentGone):
            self.loop.run()


class Pending:
    def __init__(self, world: World, number: int, samples: int, done_at_s: float) -> None:
        self._world, self._number, self._samples, self._done_at_s = world, number, samples, done_at_s

    def wait(self) -> SampledTokens:
        self._world.now_s = max(self._world.now_s, self._done_at_s)
        if self._number in self._world.wait_errors:
            raise self._world.wait_errors[self._number]
        self._world.log.append(f"done {self._number}")
        return SampledTokens(array("i", [9] * self._samples))


both = pytest.mark.parametrize("overlaps", [False, True])


def test_without_overlap_a_step_is_reported_before_the_next_is_launched():
    world = World()
    world.submit(1)
    world.turn(2)
    assert world.log == ["launch 1", "done 1", "frame 1", "launch 2", "done 2", "frame 2"]


def test_with_overlap_the_next_step_runs_while_the_last_one_is_reported():
    world = World(overlaps=True)
    world.submit(1)
    world.turn(3)
    assert world.log == ["launch 1", "launch 2", "done 1", "frame 1", "launch 3", "done 2", "frame 2"]
    assert [list(frame.plain()) for frame in world.frames] == [[(1, 9)]] * 2


@both
def test_output_does_not_depend_on_overlap(overlaps):
    world = World(overlaps=overlaps)
    world.submit(1, Sampling(max_tokens=3))
    world.submit(2, Sampling(max_tokens=5))
    world.until_blocked()
    received: dict[int, int] = {1: 0, 2: 0}
    ends = {}
    for frame in world.frames:
        for key, _ in frame.plain():
            received[key] += 1
        for output in frame.outputs:
            received[output.key] += len(output.token_ids)
            ends[output.key] = output.finish_reason
    assert (received, ends) == ({1: 3, 2: 5}, {1: "length", 2: "length"})


@both
def test_it_waits_for_a_message_only_when_nothing_is_left_to_do(overlaps):
    world = World(overlaps=overlaps)
    world.submit(1, Sampling(max_tokens=4))
    world.until_blocked()
    assert [entry for entry in world.log if entry == "blocked"] == ["blocked"]
    assert world.log[-1] == "blocked"
    assert world.engine.idle
    assert world.frames[-1].statistics.running == 0


@both
def test_refusal_is_reported_without_a_step(overlaps):
    world = World(overlaps=overlaps)
    world.submit(1, prompt=(VOCABULARY,))
    world.until_blocked()
    (output,) = world.frames[0].outputs
    assert "token id 50" in str(output.error)
    assert world.log == ["frame 1", "blocked"]


@both
def test_each_message_is_answered_by_a_frame_and_an_idle_loop_sends_none(overlaps):
    world = World(overlaps=overlaps)
    world.inbox.append(messages.Abort(77))  # unknown: nothing changes, and a frame still answers it
    world.turn()
    assert world.log == ["frame 1"]
    world.submit(1)
    world.turn(2)
    world.inbox.append(messages.Abort(1))
    world.turn()
    last = world.frames[-1]
    assert (last.keys, last.outputs, last.statistics.running) == (b"", [], 0)
    frames = len(world.frames)
    world.until_blocked()
    assert frames == len(world.frames)


@both
def test_resources_freed_by_an_abort_are_reported_before_the_next_step(overlaps):
    world = World(overlaps=overlaps)
    world.submit(1)
    world.submit(2)
    world.turn(2)
    world.inbox.append(messages.Abort(1))
    world.log.clear()
    frames = len(world.frames)
    world.turn()
    assert world.log[0] == f"frame {frames + 1}"
    assert world.log[1].startswith("launch")
    assert world.frames[frames].statistics.slots_free == 3


@both
def test_timeout_is_reported_even_when_no_step_is_left(overlaps):
    world = World(overlaps=overlaps)
    world.submit(1, timeout_s=5.0)
    world.until_blocked()
    outputs = [output for frame in world.frames for output in frame.outputs]
    assert [output.code for output in outputs] == ["request_timeout"]
    assert 100 + 5 <= world.now_s <= 100 + 5 + 3 * world.step_s
    assert world.frames[-1].statistics.slots_free - 3 == 1


@both
def test_priority_timeout_and_salt_reach_the_engine(overlaps, monkeypatch):
    world = World(overlaps=overlaps)
    seen = []
    submit = world.engine.submit
    monkeypatch.setattr(
        world.engine, "submit", lambda *args, **options: (seen.append(options), submit(*args, **options))
    )
    world.submit(1, Sampling(max_tokens=1), priority=2, timeout_s=9.0, salt=b"tenant")
    world.until_blocked()
    assert seen == [{"priority": 2, "timeout_s": 9.0, "salt": b"tenant", "embed": False}]


# Failed steps --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("where", ["launch_errors", "wait_errors"])
def test_step_that_raises_fails_its_sequences_and_the_loop_continues(overlaps, where):
    world = World(overlaps=overlaps)
    error = RuntimeError("on fire")
    getattr(world, where)[2] = error
    world.submit(1)
    world.until_blocked()
    (output,) = [output for frame in world.frames for output in frame.outputs]
    assert (output.key, output.error) == (1, "the engine's step failed: RuntimeError: on fire")
    assert [error] == world.reports
    assert world.frames[-1].statistics.slots_free == 4
    world.log.clear()
    world.submit(2, Sampling(max_tokens=2))
    world.until_blocked()
    assert world.frames[-1].outputs[0].finish_reason == "length"


def test_with_overlap_the_step_before_a_failed_launch_is_still_reported():
    world = World(overlaps=True)
    world.launch_errors[2] = RuntimeError("on fire")
    world.submit(1)
    world.turn(2)
    first, second = world.frames
    assert list(first.plain()) == [(1, 9)]
    assert [output.key for output in second.outputs if output.error] == [1]


@both
@pytest.mark.parametrize("where", ["launch_errors", "wait_errors"])
def test_the_third_failed_step_in_a_row_is_raised(overlaps, where):
    world = World(overlaps=overlaps, slots=1)
    errors = {number: RuntimeError(f"fire {number}") for number in range(1, 10)}
    getattr(world, where).update(errors)
    for key in range(1, 6):
        world.submit(key)
    with pytest.raises(RuntimeError, match="fire 3"):
        world.loop.run()
    assert [errors[1], errors[2]] == world.reports


@both
def test_successful_step_resets_the_count_of_failed_steps(overlaps):
    world = World(overlaps=overlaps, slots=1)
    world.launch_errors = {number: RuntimeError("fire") for number in (1, 2, 4, 5, 7, 8)}
    for key in range(1, 10):
        world.submit(key, Sampling(max_tokens=1))
    world.until_blocked()
    assert len(world.reports) == 6
    assert world.frames[-1].statistics.pending == 0


# Counts --------------------------------------------------------------------------------------------


@both
def test_step_time_is_that_of_the_device_and_each_second_counts_once(overlaps):
    world = World(overlaps=overlaps)
    world.submit(1, Sampling(max_tokens=10))
    world.until_blocked()
    statistics = world.frames[-1].statistics
    launches = sum(entry.startswith("launch") for entry in world.log)
    assert statistics.steps == launches
    assert pytest.approx(launches * world.step_s) == statistics.step_s


def test_statistics_count_tokens_prefixes_and_cache():
    world = World()
    prompt = [1 + number % 40 for number in range(48)]
    world.submit(1, Sampling(max_tokens=2), prompt)
    world.until_blocked()
    world.submit(2, Sampling(max_tokens=2), prompt)
    world.until_blocked()
    statistics = world.frames[-1].statistics
    assert statistics.prompt_tokens + statistics.prefix_hits == 96
    assert statistics.prefix_hits >= 32
    assert statistics.prefix_queries >= statistics.prefix_hits
    assert statistics.generated_tokens == 4
    assert 96 - statistics.prefix_hits + 2 == statistics.step_tokens
    assert statistics.cached_tokens >= 48
    assert (statistics.running, statistics.preemptions, statistics.cache_usage) == (0, 0, 0.0)


# Random messages -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("seed", range(4))
def test_each_answer_equals_that_of_the_sequence_alone_whenever_messages_arrive(overlaps, seed):
    choose = Random(seed)
    world = World(overlaps=overlaps)
    device = fake_model.FakeRunner(4, overlaps=overlaps)
    engine = Engine(
        device,
        slots=3,
        max_batch=2,
        max_batched_tokens=6,
        max_model_len=40,
        blocks_total=14,  # so few that sequences are preempted
        block_size=4,
        vocab_size=fake_model.VOCABULARY,
        eos_token_ids=(fake_model.EOS,),
        draw_seed=lambda: 1,
    )
    loop = Loop(engine, device, world, clock=lambda: world.now_s)
    submitted: dict[int, tuple[list[int], Sampling]] = {}
    aborted: set[int] = set()
    for key in range(1, 400):
        if choose.random() < 0.4:
            prompt = [choose.randrange(1, fake_model.VOCABULARY) for _ in range(choose.randint(1, 20))]
            sampling = Sampling(max_tokens=choose.randint(1, 30), temperature=0.0)
            submitted[key] = prompt, sampling
            world.submit(key, sampling, prompt)
        if choose.random() < 0.1 and submitted:
            aborted.add(choose.choice(list(submitted)))
            world.inbox += [messages.Abort(key) for key in aborted]
        if not (engine.idle and not world.inbox):
            loop.turn()
    with pytest.raises(ParentGone):
        loop.run()

    received: dict[int, list[int]] = {key: [] for key in submitted}
    ends: dict[int, str | None] = {}
    for frame in world.frames:
        for key, token_id in frame.plain():
            assert key not in ends
            received[key].append(token_id)
        for output in frame.outputs:
            assert output.key not in ends
            received[output.key] += output.token_ids
            ends[output.key] = output.finish_reason
    for key, (prompt, sampling) in submitted.items():
        expected, reason = fake_model.answer(prompt, sampling, 40)
        if key in ends:
            assert (expected, reason) == (received[key], ends[key])
        else:
            assert key in aborted
            assert expected[: len(received[key])] == received[key]
    last = world.frames[-1].statistics
    assert (last.running, last.pending, last.slots_free, last.blocks_free) == (0, 0, 3, 14)


def test_idle_cache_is_trimmed_below_its_threshold_and_its_memory_given_back():
    """A burst fills the cache; then three minutes pass without a message."""
    world = World(slots=4, eviction_threshold=0.5, cleanup_interval_s=120.0)
    for key in range(1, 5):  # 4 × 40 of 200 blocks, kept when they end
        world.submit(key, Sampling(max_tokens=1, ignore_eos=True), prompt=[1 + key] * 640)
    world.turn()
    while not world.engine.idle:
        world.turn()
    burst_ended_s = world.now_s
    assert world.engine.statistics().cached_tokens > 0.5 * 200 * 16
    world.until_blocked()
    assert world.now_s - burst_ended_s <= 180.0
    assert world.engine.statistics().cached_tokens <= 0.5 * 200 * 16
    assert world.frames[-1].statistics.cached_tokens == world.engine.statistics().cached_tokens
    ((_, (free,)),) = world.released
    assert len(free) == 200 - world.engine.statistics().cached_tokens // 16
    frames = len(world.frames)
    world.until_blocked()  # nothing is left to do: it waits without a bound
    assert (len(world.frames), len(world.released)) == (frames, 1)


def test_idle_engine_that_computed_nothing_waits_without_a_bound():
    world = World(cleanup_interval_s=10.0)
    world.until_blocked()
    assert (world.now_s, world.released) == (100.0, [])
