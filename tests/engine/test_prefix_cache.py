"""Cached prefixes are not computed again, measured by the number of tokens that the model computed."""

import pytest

from engine.fake_model import FakeRunner, Loop, answer
from fairlead.engine.engine import Engine
from fairlead.job import Sampling

VOCABULARY = 13
WINDOWS = [(None,), (None, 100), (100,)]
SYSTEM = [(place * place) % 11 + 1 for place in range(480)]


def sampling(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def loop(*, windows=(None,), blocks=400, overlaps=False, slots=8, **more) -> Loop:
    runner = FakeRunner(16, windows=windows, overlaps=overlaps)
    engine = Engine(
        runner,
        slots=slots,
        max_batch=slots,
        max_batched_tokens=512,
        max_model_len=4096,
        blocks_total=[blocks] * len(windows),
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
    computed(tested, 1, first)
    everything, window = tested.engine._memory.pools
    assert 62 == everything.evictable > window.evictable
    assert computed(tested, 2, [*first, *text(5, 7)]) == 1007 - 992


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
    assert (tested.engine.statistics().prefix_hits > 0) or windows != (None,)
