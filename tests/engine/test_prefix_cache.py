"""Cached prefixes are not computed again, measured by the number of tokens that the model computed."""

import pytest

from engine.fake_model import FakeRunner, Loop, answer
from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine

VOCABULARY = 13
WINDOWS = [(None,), (None, 100), (100,)]
SYSTEM = [(place * place) % 11 + 1 for place in range(480)]


def sampling(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def loop(*, windows=(None,), blocks=400, overlaps=False, slots=8, pick=None, **more) -> Loop:
    """Return a new engine and its loop; `blocks`: of each group, or a list by group."""
    runner = FakeRunner(16, windows=windows, overlaps=overlaps, pick=pick)
    engine = Engine(
        runner,
        slots=slots,
        max_batch=slots,
        max_batched_tokens=512,
        max_model_len=4096,
        blocks_total=blocks if isinstance(blocks, list) else [blocks] * len(windows),
        windows=windows,
        block_size=16,
        vocab_size=VOCABULARY,
        eos_token_ids=[0],
        draw_seed=lambda: 1,
        hash_key=bytes(16),
        **more,
    )
    return Loop(engine, runner)


def computed(tested: Loop, key: int, prompt: list[int], tokens: int = 1, **more) -> int:
    """Run a sequence to its end; return how many tokens the model computed for it."""
    before = tested.runner.computed
    tested.engine.submit(key, prompt, sampling(tokens), **more)
    tested.run()
    assert answer(prompt, sampling(tokens), 4096, tested.runner.windows)[0] == tested.token_ids_of[key]
    return tested.runner.computed - before


def text(seed: int, length: int) -> list[int]:
    return [(seed * 7 + place * (seed + 3)) % 12 + 1 for place in range(length)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_second_turn_of_a_2000_token_conversation_prefills_only_new_tokens(windows, overlaps):
    tested = loop(windows=windows, overlaps=overlaps)
    first = text(1, 1900)
    assert computed(tested, 1, first, 100) == 1900 + 99
    second = [*first, *tested.token_ids_of[1], *text(2, 30)]
    # The last output token was never computed, and only full blocks are cached: 1999 // 16 · 16 = 1984.
    assert len(second) - 1984 == computed(tested, 2, second)
    counts = tested.engine.statistics()
    assert (counts.prefix_hits, counts.prefix_queries) == (1984, 1900 + len(second))
    assert 1900 + len(second) - 1984 == counts.prompt_tokens


def test_repeated_prompt_computes_at_least_one_token():
    tested = loop()
    assert computed(tested, 1, SYSTEM) == 480
    assert computed(tested, 2, SYSTEM) == 16  # 29 of 30 full blocks match: a token must be computed
    assert computed(tested, 3, [*SYSTEM, 5]) == 1


def test_running_sequence_shares_its_prefix_with_new_ones():
    tested = loop()
    tested.engine.submit(1, [*SYSTEM, 3], sampling(50))
    tested.turn()
    before = tested.engine.statistics().blocks_free
    for key in range(2, 6):
        tested.engine.submit(key, [*SYSTEM, key], sampling(2))
    tested.turn()
    assert before - 4 == tested.engine.statistics().blocks_free
    tested.run()
    assert tested.runner.computed == 480 + 1 + 49 + 4 * 2


def test_cached_prefix_is_kept_while_usage_is_below_the_threshold():
    tested = loop(blocks=100)  # at most 80 are kept
    computed(tested, 1, SYSTEM)  # 30
    for key in range(2, 5):
        computed(tested, key, text(key, 160))  # 10 each
        tested.turn(5.0)
    assert computed(tested, 9, [*SYSTEM, 5]) == 1


def test_least_recently_used_requests_go_when_the_threshold_is_passed():
    tested = loop(blocks=100)
    computed(tested, 1, SYSTEM)
    computed(tested, 2, text(2, 320))
    computed(tested, 3, [*SYSTEM, 5])  # uses the first request's blocks again
    computed(tested, 4, text(4, 640))  # 30 + 20 + 40 blocks, of which 80 may be kept
    tested.turn(5.0)
    assert computed(tested, 5, [*SYSTEM, 6]) == 1
    assert computed(tested, 6, [*text(2, 320), 6]) == 321


def test_cached_tokens_never_exceed_max_entries_between_cleanups():
    tested = loop(max_entries=1000, eviction_threshold=0.9, cleanup_interval_s=1e6)
    kept = []
    for key in range(1, 12):
        computed(tested, key, text(key, 320))
        kept.append(tested.engine.statistics().cached_tokens)
    assert kept[:3] == [320, 640, 960]
    assert 0 < max(kept) <= 1000
    assert computed(tested, 99, [*text(11, 320), 5]) == 1, "the most recently used request is kept"


def test_requests_with_different_salts_never_share_blocks():
    tested = loop()
    computed(tested, 1, SYSTEM, salt=b"tenant A")
    assert computed(tested, 2, [*SYSTEM, 5], salt=b"tenant B") == 481
    assert computed(tested, 3, [*SYSTEM, 6], salt=b"tenant A") == 1


def test_computed_blocks_of_an_aborted_request_stay_cached():
    tested = loop()
    tested.engine.submit(1, SYSTEM, sampling(50))
    tested.turn()
    tested.engine.abort(1)
    assert computed(tested, 2, [*SYSTEM, 5]) == 1


def test_window_group_needs_only_its_last_blocks_for_a_hit():
    tested = loop(windows=(None, 100), blocks=400)
    first = text(1, 1000)
    computed(tested, 1, first, 30)
    everything, window = tested.engine._memory.pools
    assert everything.evictable == window.evictable == 1029 // 16
    window.free_blocks(window.get_new_blocks(window.free + 57))  # which evicts what slid out
    assert window.evictable == 7
    assert computed(tested, 2, [*first, *tested.token_ids_of[1], *text(5, 7)]) == 1037 - 1024


# Sliding windows -----------------------------------------------------------------------------------------

SLIDING = WINDOWS[1:]
LONG = [(place * place) % 12 + 1 for place in range(900)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_beginning_of_900_tokens_that_two_requests_share_is_computed_once(windows, overlaps):
    tested = loop(windows=windows, overlaps=overlaps)
    assert computed(tested, 1, [*LONG, *text(2, 300)], 50) == 1249
    assert computed(tested, 2, [*LONG, *text(3, 100)]) == 1000 - 896
    assert computed(tested, 3, LONG[:500]) == 500 - 496
    assert tested.engine.statistics().prefix_hits == 896 + 496


@pytest.mark.parametrize("windows", SLIDING)
def test_beginning_is_found_while_the_request_that_computed_it_runs(windows):
    tested = loop(windows=windows)
    tested.engine.submit(1, [*LONG, *text(2, 300)], sampling(300))
    for _ in range(100):
        tested.turn()
    assert computed(tested, 2, [*LONG, *text(3, 100)], 5) - 104 < 300 + 4
    assert tested.engine.statistics().prefix_hits == 896


@pytest.mark.parametrize("windows", SLIDING)
def test_blocks_that_slid_out_count_as_free_and_are_taken_when_they_are_needed(windows):
    tested = loop(windows=windows, blocks=100)
    computed(tested, 1, [*LONG, *text(2, 300)], 100)  # 82 blocks
    assert tested.engine.statistics().blocks_free == 100
    assert computed(tested, 2, text(5, 1500)) == 1500
    assert computed(tested, 3, [*LONG, 5]) == 901
    assert tested.engine.statistics().preemptions == 0


@pytest.mark.parametrize("windows", SLIDING)
def test_beginning_that_was_used_least_recently_is_evicted_first(windows):
    tested = loop(windows=windows, blocks=[400] * (len(windows) - 1) + [150])
    first, second = text(1, 640), text(2, 640)
    for key, prompt in enumerate((first, second)):
        computed(tested, key, [*prompt, *text(8, 160)], 40)  # 52 blocks each
    assert computed(tested, 2, [*first, 5]) == 1
    assert computed(tested, 3, text(4, 2100)) == 2100
    assert [computed(tested, 4 + key, [*prompt, 6]) for key, prompt in enumerate((first, second))] == [1, 641]


@pytest.mark.parametrize("windows", SLIDING)
def test_blocks_that_slid_out_of_running_requests_never_exceed_max_entries(windows):
    tested = loop(windows=windows, max_entries=1500, eviction_threshold=0.9, cleanup_interval_s=1e6)
    window = tested.engine._memory.pools[-1]
    evictable = []
    for key in range(3):
        tested.engine.submit(key, text(key, 400), sampling(1000))
    while not tested.engine.idle:
        tested.turn()
        evictable.append(16 * window.evictable)
    assert 1200 < max(evictable) <= 1500


def test_idle_engine_reports_that_it_evicted_blocks_that_slid_out():
    tested = loop(windows=(100,), blocks=100)  # at most 80 are kept
    computed(tested, 1, text(1, 1500))
    assert tested.engine.trim_if_due(1e9).evicted == 1500 // 16 - 80


@pytest.mark.parametrize("windows", SLIDING)
def test_blocks_that_slid_out_are_found_with_their_own_salt_only(windows):
    tested = loop(windows=windows)
    computed(tested, 1, [*LONG, *text(2, 300)], salt=b"tenant A")
    assert computed(tested, 2, [*LONG, 5], salt=b"tenant B") == 901
    assert computed(tested, 3, [*LONG, 6], salt=b"tenant A") == 901 - 896


@pytest.mark.parametrize("windows", SLIDING)
def test_blocks_that_slid_out_of_a_failed_request_are_not_found(windows):
    failing = []

    def pick(_batch, step, row, token_id):
        return "it is not finite" if step.slots[row] in failing else token_id

    tested = loop(windows=windows, pick=pick)
    computed(tested, 1, [*LONG[:400], *text(2, 300)])
    tested.engine.submit(2, [*LONG, *text(3, 300)], sampling(40))
    for _ in range(10):
        tested.turn()
    failing.extend(range(8))
    tested.run()
    assert tested.ends[2].error == "it is not finite"
    failing.clear()
    assert computed(tested, 3, [*LONG, 5]) == 901 - 400, "only what the first request computed is found"


@pytest.mark.parametrize("windows", SLIDING)
def test_preempted_request_with_a_window_finds_its_prefix(windows):
    tested = loop(windows=windows, blocks=400)
    tested.engine.submit(1, LONG, sampling(100))
    for _ in range(35):
        tested.turn()
    scheduler = tested.engine._scheduler
    scheduler._preempt(scheduler.running_in(0))
    tested.run()
    assert answer(LONG, sampling(100), 4096, windows)[0] == tested.token_ids_of[1]
    assert 0 < tested.engine.recomputed_tokens < 16


@pytest.mark.parametrize("windows", SLIDING)
def test_prompt_longer_than_the_blocks_of_a_window_evicts_what_slid_out_of_it(windows):
    tested = loop(windows=windows, blocks=[400] * (len(windows) - 1) + [50])
    for key in range(3):
        assert computed(tested, key, text(key, 3000), 20) == 3019
    assert tested.engine._memory.pools[-1].available == 50


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_outputs_are_the_same_with_and_without_prefix_cache_when_memory_is_short(windows, overlaps):
    token_ids = []
    for prefix_cache in (False, True):
        tested = loop(windows=windows, overlaps=overlaps, blocks=60, slots=8, prefix_cache=prefix_cache)
        for key in range(24):
            prompt = SYSTEM[: 60 + 17 * (key % 7)] + text(key % 5, 3 * key + 1)
            tested.engine.submit(key, prompt, sampling(20 + 5 * (key % 11)))
            tested.turn()
        tested.run()
        token_ids.append(tested.token_ids_of)
        assert {end.finish_reason for end in tested.ends.values()} == {"length"}
    assert token_ids[0] == token_ids[1]
    assert tested.engine.statistics().prefix_hits > 0


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_suspended_sequence_computes_no_token_twice_and_its_prompt_is_counted_once(windows, prefix_cache):
    tested = loop(windows=windows, prefix_cache=prefix_cache)
    prompt = [*SYSTEM, *text(1, 900)]
    first = computed(tested, 1, SYSTEM)
    tested.engine.submit(2, prompt, sampling(200))
    before = tested.runner.computed
    for number in range(60):
        (tested.engine.suspend if number % 3 == 0 else tested.engine.resume)(2)
        tested.turn()
    tested.engine.resume(2)
    tested.run()
    assert answer(prompt, sampling(200), 4096, windows)[0] == tested.token_ids_of[2]
    hit = 480 if prefix_cache else 0
    assert tested.runner.computed - before == len(prompt) - hit + 199
    counts = tested.engine.statistics()
    assert counts.prompt_tokens == first + len(prompt) - hit
    assert (counts.preemptions, tested.engine.recomputed_tokens) == (0, 0)
    assert counts.prefix_hits == hit
