"""The child's loop without a socket, a process or a device: the order of its actions, and its frames."""

from array import array
from itertools import count
from random import Random

import pytest

from engine import fake_model
from fairlead.base import messages
from fairlead.base.frames import PeerGone
from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine
from fairlead.engine.step import SampledTokens
from fairlead.engine.worker.loop import Loop

VOCABULARY = 50
ENDLESS = Sampling(max_tokens=900)


class Harness:
    """A loop with its clock, inbox and device; `log` has the events in order.

    A step takes `step_s` from its launch. A launch or a wait raises the error under its number in
    `launch_errors` or `wait_errors`. The loop reads `inbox`; blocking on an empty one raises `PeerGone`.
    """

    def __init__(self, *, overlaps: bool = False, slots: int = 4, **options: float) -> None:
        self.overlaps = overlaps
        self.arenas = 2
        self.samples_several = True
        self.columns: dict[str, int] = {}
        self.log: list[str] = []
        self.inbox: list[messages.ToEngine] = []
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

    def read(self, *, wait_s: float | None) -> list[messages.ToEngine]:
        if not self.inbox and wait_s is None:
            self.log.append("blocked")
            raise PeerGone
        if not self.inbox:
            self.now_s += wait_s
        received, self.inbox = self.inbox, []
        return received

    def write(self, message: messages.ToParent) -> None:
        assert isinstance(message, messages.StepOutputs)
        self.frames.append(message)
        self.log.append(f"frame {len(self.frames)}")

    # The device --------------------------------------------------------------------------------------

    def launch(self, step, batch) -> "FakeStep":
        number = next(self._numbers)
        assert batch is self.engine.batch
        if number in self.launch_errors:
            raise self.launch_errors[number]
        self.log.append(f"launch {number}")
        self._free_at_s = max(self._free_at_s, self.now_s) + self.step_s
        if not self.overlaps:
            self.now_s = self._free_at_s
        return FakeStep(self, number, step.samples, self._free_at_s)

    def release(self, blocks) -> None:
        self.released.append((self.now_s, blocks))

    # Control by the tests ----------------------------------------------------------------------------

    def submit(self, key: int, sampling: Sampling = ENDLESS, prompt=(5, 6, 7), **options) -> None:
        self.inbox.append(messages.Submit(key, messages.pack_tokens(prompt), sampling, **options))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()

    def run_until_blocked(self) -> None:
        with pytest.raises(PeerGone):
            self.loop.run()


class FakeStep:
    def __init__(self, harness: Harness, number: int, samples: int, done_at_s: float) -> None:
        self._harness, self._number, self._samples, self._done_at_s = harness, number, samples, done_at_s

    def wait(self) -> SampledTokens:
        self._harness.now_s = max(self._harness.now_s, self._done_at_s)
        if self._number in self._harness.wait_errors:
            raise self._harness.wait_errors[self._number]
        self._harness.log.append(f"done {self._number}")
        return SampledTokens(array("i", [9] * self._samples))


with_and_without_overlap = pytest.mark.parametrize("overlaps", [False, True])


def test_without_overlap_a_step_is_reported_before_the_next_is_launched():
    harness = Harness()
    harness.submit(1)
    harness.turn(2)
    assert harness.log == ["launch 1", "done 1", "frame 1", "launch 2", "done 2", "frame 2"]


def test_with_overlap_a_step_runs_while_the_one_before_is_reported():
    harness = Harness(overlaps=True)
    harness.submit(1)
    harness.turn(3)
    assert harness.log == ["launch 1", "launch 2", "done 1", "frame 1", "launch 3", "done 2", "frame 2"]
    assert [list(frame.plain()) for frame in harness.frames] == [[(1, 9)]] * 2


@with_and_without_overlap
def test_output_does_not_depend_on_overlap(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.submit(1, Sampling(max_tokens=3))
    harness.submit(2, Sampling(max_tokens=5))
    harness.run_until_blocked()
    received: dict[int, int] = {1: 0, 2: 0}
    ends = {}
    for frame in harness.frames:
        for key, _ in frame.plain():
            received[key] += 1
        for output in frame.outputs:
            received[output.key] += len(output.token_ids)
            ends[output.key] = output.finish_reason
    assert (received, ends) == ({1: 3, 2: 5}, {1: "length", 2: "length"})


@with_and_without_overlap
def test_loop_blocks_only_when_it_is_idle(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.submit(1, Sampling(max_tokens=4))
    harness.run_until_blocked()
    assert [entry for entry in harness.log if entry == "blocked"] == ["blocked"]
    assert harness.log[-1] == "blocked"
    assert harness.engine.idle
    assert harness.frames[-1].statistics.running == 0


@with_and_without_overlap
def test_refusal_is_reported_without_a_step(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.submit(1, prompt=(VOCABULARY,))
    harness.run_until_blocked()
    (output,) = harness.frames[0].outputs
    assert "no token 50" in str(output.error)
    assert harness.log == ["frame 1", "blocked"]


@with_and_without_overlap
def test_each_message_is_answered_by_a_frame_and_an_idle_loop_sends_none(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.inbox.append(messages.Abort(77))  # unknown: nothing changes, and a frame still answers it
    harness.turn()
    assert harness.log == ["frame 1"]
    harness.submit(1)
    harness.turn(2)
    harness.inbox.append(messages.Abort(1))
    harness.turn()
    last = harness.frames[-1]
    assert (last.keys, last.outputs, last.statistics.running) == (b"", [], 0)
    frames = len(harness.frames)
    harness.run_until_blocked()
    assert frames == len(harness.frames)


@with_and_without_overlap
def test_resources_freed_by_an_abort_are_reported_before_the_next_step(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.submit(1)
    harness.submit(2)
    harness.turn(2)
    harness.inbox.append(messages.Abort(1))
    harness.log.clear()
    frames = len(harness.frames)
    harness.turn()
    assert harness.log[0] == f"frame {frames + 1}"
    assert harness.log[1].startswith("launch")
    assert harness.frames[frames].statistics.slots_free == 3


@with_and_without_overlap
def test_timeout_is_reported_even_when_no_step_is_left(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.submit(1, timeout_s=5.0)
    harness.run_until_blocked()
    outputs = [output for frame in harness.frames for output in frame.outputs]
    assert [output.code for output in outputs] == ["request_timeout"]
    assert 100 + 5 <= harness.now_s <= 100 + 5 + 3 * harness.step_s
    assert harness.frames[-1].statistics.slots_free - 3 == 1


@with_and_without_overlap
def test_priority_timeout_and_salt_reach_the_engine(overlaps, monkeypatch):
    harness = Harness(overlaps=overlaps)
    seen = []
    submit = harness.engine.submit
    monkeypatch.setattr(
        harness.engine, "submit", lambda *args, **options: (seen.append(options), submit(*args, **options))
    )
    harness.submit(1, Sampling(max_tokens=1), priority=2, timeout_s=9.0, salt=b"tenant", tenant=7)
    harness.run_until_blocked()
    assert seen == [{"priority": 2, "timeout_s": 9.0, "salt": b"tenant", "embed": False, "tenant": 7}]


# Failed steps --------------------------------------------------------------------------------------


@with_and_without_overlap
@pytest.mark.parametrize("where", ["launch_errors", "wait_errors"])
def test_step_that_raises_fails_its_sequences_and_the_loop_continues(overlaps, where):
    harness = Harness(overlaps=overlaps)
    error = RuntimeError("device failed")
    getattr(harness, where)[2] = error
    harness.submit(1)
    harness.run_until_blocked()
    (output,) = [output for frame in harness.frames for output in frame.outputs]
    assert (output.key, output.error) == (1, "the engine's step failed: RuntimeError: device failed")
    assert [error] == harness.reports
    assert harness.frames[-1].statistics.slots_free == 4
    harness.log.clear()
    harness.submit(2, Sampling(max_tokens=2))
    harness.run_until_blocked()
    assert harness.frames[-1].outputs[0].finish_reason == "length"


def test_with_overlap_the_step_before_a_failed_launch_is_still_reported():
    harness = Harness(overlaps=True)
    harness.launch_errors[2] = RuntimeError("device failed")
    harness.submit(1)
    harness.turn(2)
    first, second = harness.frames
    assert list(first.plain()) == [(1, 9)]
    assert [output.key for output in second.outputs if output.error] == [1]


@with_and_without_overlap
@pytest.mark.parametrize("where", ["launch_errors", "wait_errors"])
def test_third_failed_step_in_a_row_is_raised(overlaps, where):
    harness = Harness(overlaps=overlaps, slots=1)
    errors = {number: RuntimeError(f"fire {number}") for number in range(1, 10)}
    getattr(harness, where).update(errors)
    for key in range(1, 6):
        harness.submit(key)
    with pytest.raises(RuntimeError, match="fire 3"):
        harness.loop.run()
    assert [errors[1], errors[2]] == harness.reports


@with_and_without_overlap
def test_successful_step_resets_the_count_of_failed_steps(overlaps):
    harness = Harness(overlaps=overlaps, slots=1)
    harness.launch_errors = {number: RuntimeError("fire") for number in (1, 2, 4, 5, 7, 8)}
    for key in range(1, 10):
        harness.submit(key, Sampling(max_tokens=1))
    harness.run_until_blocked()
    assert len(harness.reports) == 6
    assert harness.frames[-1].statistics.pending == 0


# Counts --------------------------------------------------------------------------------------------


@with_and_without_overlap
def test_step_time_is_device_time_without_overlap_counted_twice(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.submit(1, Sampling(max_tokens=10))
    harness.run_until_blocked()
    statistics = harness.frames[-1].statistics
    launches = sum(entry.startswith("launch") for entry in harness.log)
    assert statistics.steps == launches
    assert pytest.approx(launches * harness.step_s) == statistics.step_s


def test_statistics_count_tokens_prefixes_and_cache():
    harness = Harness()
    prompt = [1 + number % 40 for number in range(48)]
    harness.submit(1, Sampling(max_tokens=2), prompt)
    harness.run_until_blocked()
    harness.submit(2, Sampling(max_tokens=2), prompt)
    harness.run_until_blocked()
    statistics = harness.frames[-1].statistics
    assert statistics.prompt_tokens + statistics.prefix_hits == 96
    assert statistics.prefix_hits >= 32
    assert statistics.prefix_queries >= statistics.prefix_hits
    assert statistics.generated_tokens == 4
    assert 96 - statistics.prefix_hits + 2 == statistics.step_tokens
    assert statistics.cached_tokens >= 48
    assert (statistics.running, statistics.preemptions, statistics.cache_usage) == (0, 0, 0.0)


# Random messages -----------------------------------------------------------------------------------


@with_and_without_overlap
@pytest.mark.parametrize("seed", range(4))
def test_output_of_each_sequence_is_independent_of_the_times_of_messages(overlaps, seed):
    choose = Random(seed)
    harness = Harness(overlaps=overlaps)
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
    loop = Loop(engine, device, harness, clock=lambda: harness.now_s)
    submitted: dict[int, tuple[list[int], Sampling]] = {}
    aborted: set[int] = set()
    for key in range(1, 400):
        if choose.random() < 0.4:
            prompt = [choose.randrange(1, fake_model.VOCABULARY) for _ in range(choose.randint(1, 20))]
            sampling = Sampling(max_tokens=choose.randint(1, 30), temperature=0.0)
            submitted[key] = prompt, sampling
            harness.submit(key, sampling, prompt)
        if choose.random() < 0.1 and submitted:
            aborted.add(choose.choice(list(submitted)))
            harness.inbox += [messages.Abort(key) for key in aborted]
        if not (engine.idle and not harness.inbox):
            loop.turn()
    with pytest.raises(PeerGone):
        loop.run()

    received: dict[int, list[int]] = {key: [] for key in submitted}
    ends: dict[int, str | None] = {}
    for frame in harness.frames:
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
    last = harness.frames[-1].statistics
    assert (last.running, last.pending, last.slots_free, last.blocks_free) == (0, 0, 3, 14)


def test_idle_cache_is_trimmed_below_its_threshold_and_its_memory_released():
    """A burst fills the cache; then three minutes pass without a message."""
    harness = Harness(slots=4, eviction_threshold=0.5, cleanup_interval_s=120.0)
    for key in range(1, 5):  # 4 × 40 of 200 blocks, kept when they end
        harness.submit(key, Sampling(max_tokens=1, ignore_eos=True), prompt=[1 + key] * 640)
    harness.turn()
    while not harness.engine.idle:
        harness.turn()
    burst_ended_s = harness.now_s
    assert harness.engine.statistics().cached_tokens > 0.5 * 200 * 16
    harness.run_until_blocked()
    assert harness.now_s - burst_ended_s <= 180.0
    assert harness.engine.statistics().cached_tokens <= 0.5 * 200 * 16
    assert harness.frames[-1].statistics.cached_tokens == harness.engine.statistics().cached_tokens
    ((_, (free,)),) = harness.released
    assert len(free) == 200 - harness.engine.statistics().cached_tokens // 16
    frames = len(harness.frames)
    harness.run_until_blocked()  # the loop is idle and waits without a timeout
    assert (len(harness.frames), len(harness.released)) == (frames, 1)


def test_idle_engine_that_computed_nothing_waits_without_a_timeout():
    harness = Harness(cleanup_interval_s=10.0)
    harness.run_until_blocked()
    assert (harness.now_s, harness.released) == (100.0, [])


@with_and_without_overlap
def test_loop_blocks_while_all_sequences_are_suspended_and_answers_pings(overlaps):
    harness = Harness(overlaps=overlaps)
    harness.submit(1, Sampling(max_tokens=6))
    harness.turn(2)
    harness.inbox += [messages.Suspend(1), messages.Suspend(99)]
    harness.run_until_blocked()
    assert harness.frames[-1].statistics.suspended == 1
    harness.inbox.append(messages.Ping())
    harness.log.clear()
    harness.turn()
    assert harness.log == [f"frame {len(harness.frames)}"]
    harness.run_until_blocked()
    assert not harness.engine.idle
    harness.inbox.append(messages.Resume(1))
    harness.run_until_blocked()
    assert harness.engine.idle
    tokens = sum(len(list(frame.plain())) for frame in harness.frames)
    tokens += sum(len(output.token_ids) for frame in harness.frames for output in frame.outputs)
    assert tokens == 6


@with_and_without_overlap
def test_suspended_sequence_ends_at_its_time_limit_and_not_before(overlaps):
    harness = Harness(overlaps=overlaps)
    began_at_s = harness.now_s
    harness.inbox.append(messages.Submit(1, messages.pack_tokens([5]), ENDLESS, timeout_s=50.0))
    harness.turn(2)
    harness.inbox.append(messages.Suspend(1))
    harness.run_until_blocked()
    (end,) = [output for frame in harness.frames for output in frame.outputs]
    assert end.code == "request_timeout"
    assert 50.0 < harness.now_s - began_at_s < 50.1
    assert harness.engine.idle
