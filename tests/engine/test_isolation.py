"""What a tenant finds in the prefix cache does not depend on other tenants, as long as nothing is evicted.

The oracle is noninterference: each tenant's requests, run alone, find the same. Evictions and preemptions
depend on the memory that all use, so the cache is large enough here, except where a test says otherwise.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fake_model import Loop
from engine.test_prefix_cache import loop, sampling, text
from fairlead.engine.memory import Memory

TENANTS = (b"", b"A", b"B")
# Few beginnings and lengths, so that most prompts of all tenants begin alike.
PROMPTS = st.builds(
    lambda beginning, length, more: [*text(beginning, length), *text(9 + more, more)],
    st.integers(1, 2),
    st.sampled_from([15, 16, 33, 64, 200]),
    st.sampled_from([0, 1, 40]),
)
# A request waits until its tenant's earlier ones have ended, but not for those of others.
REQUESTS = st.lists(
    st.tuples(st.sampled_from(TENANTS), PROMPTS, st.integers(1, 40), st.integers(0, 5)), max_size=12
)


def found_by(requests: list, tested: Loop) -> dict[bytes, list[int]]:
    """Run the requests; return how many cached tokens each one has found, by tenant and in order."""
    found: dict[bytes, list[int]] = {}
    reported: dict[int, int] = {}
    collect = tested.collect_output

    def observe(output):
        reported[output.key] = max(reported.get(output.key, 0), output.cached_tokens)
        collect(output)

    tested.collect_output = observe  # type: ignore[method-assign]
    latest: dict[bytes, int] = {}
    for key, (tenant, prompt, tokens, turns) in enumerate(requests):
        while tenant in latest and latest[tenant] not in tested.ends:
            tested.turn()
        latest[tenant] = key
        tested.engine.submit(key, prompt, sampling(tokens), salt=tenant)
        for _ in range(turns):
            tested.turn()
    tested.run()
    for key, (tenant, *_) in enumerate(requests):
        assert tested.ends[key].error is None
        found.setdefault(tenant, []).append(reported.get(key, 0))
    return found


def alone(requests: list, **options: object) -> dict[bytes, list[int]]:
    """Return what each tenant finds if no other one sends anything."""
    found: dict[bytes, list[int]] = {}
    for tenant in TENANTS:
        own = [request for request in requests if request[0] == tenant]
        found |= found_by(own, loop(**options))
    return found


@pytest.mark.parametrize("windows", [(None,), (None, 100)])
@given(requests=REQUESTS, overlaps=st.booleans(), slots=st.sampled_from([2, 8]))
def test_tenant_finds_what_it_would_find_alone(windows, requests, overlaps, slots):
    options = {"windows": windows, "overlaps": overlaps, "slots": slots, "eviction_threshold": 1.0}
    assert found_by(requests, loop(**options)) == alone(requests, **options)


@given(requests=REQUESTS)
def test_tenant_never_finds_more_than_it_has_sent_where_memory_is_short(requests):
    options = {"blocks": 30, "slots": 4}
    found, most = found_by(requests, loop(**options)), alone(requests, eviction_threshold=1.0)
    for tenant, tokens in found.items():
        assert all(some <= all_of_it for some, all_of_it in zip(tokens, most[tenant], strict=True))


def test_mutants_of_the_salt_are_caught(monkeypatch):
    same = [(tenant, text(1, 64), 1, 5) for tenant in (b"A", b"B", b"A")]
    assert found_by(same, loop()) == {b"A": [0, 48], b"B": [0]}
    new_hashes = Memory.new_hashes
    for mutant in (b"", b"always the same"):
        monkeypatch.setattr(Memory, "new_hashes", lambda memory, _salt, salt=mutant: new_hashes(memory, salt))
        assert found_by(same, loop()) != alone(same), mutant
