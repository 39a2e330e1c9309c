"""The rules of `ResponseStore` by example, a state machine with a model, and mutants that it catches."""

import gc
import tracemalloc

import pytest
from hypothesis.stateful import run_state_machine_as_test

from fairlead.server.responses.store import RESPONSE_BYTES, ResponseStore, StoredResponse
from first_failure import until_first_failure
from server.routes.responses_machine import MACHINE_SETTINGS, ResponsesMachine

ENTRY = RESPONSE_BYTES + 1000  # a response with an object of 1000 bytes


def stored(store, name, *, tenant="a", owner="", size=1000, now_s=0.0):
    response = StoredResponse(name, owner, tenant)
    store.begin(response)
    store.end(response, b"x" * size, now_s)
    return response


def names(store, responses):
    return [response.id for response in responses if store.find(response.id, response.owner, 0.0)]


@pytest.mark.parametrize(("events", "responses"), [(20_000, 1), (0, 2000)])
def test_what_counts_is_at_least_the_memory_of_small_events_and_responses(events, responses):
    store = ResponseStore(1 << 30, 60)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(responses):
            response = StoredResponse(f"response {number}", f"owner {number}", f"tenant {number}")
            store.begin(response)
            store.append(response, (b"%d" % index for index in range(100_000, 100_000 + events)))
            store.end(response, b"%d" % number, 0.0)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= store.size


def test_response_is_found_by_its_owner_only():
    store = ResponseStore(100_000, 60)
    response = stored(store, "r", owner="key-1")
    assert store.find("r", "key-1", 0.0) is response
    assert store.find("r", "key-2", 0.0) is None
    assert store.find("r", "", 0.0) is None
    assert store.find("s", "key-1", 0.0) is None


def test_response_in_progress_is_found_once_it_has_an_object():
    store = ResponseStore(100_000, 60)
    response = StoredResponse("r", "", "a")
    store.begin(response)
    assert store.find("r", "", 0.0) is None
    store.set_document(response, b"{}")
    assert store.find("r", "", 0.0) is response


def test_response_expires_after_its_time_to_live():
    store = ResponseStore(100_000, 60)
    stored(store, "r", now_s=5.0)
    assert store.find("r", "", 64.9) is not None
    assert store.find("r", "", 65.0) is None
    assert (store.size, len(store), store.tenants) == (0, 0, 0)


def test_response_in_progress_does_not_expire():
    store = ResponseStore(100_000, 60)
    response = StoredResponse("r", "", "a")
    store.begin(response)
    store.expire(1000.0)
    store.end(response, b"{}", 1000.0)
    assert store.find("r", "", 1059.0) is response


def test_renewed_response_lives_as_long_as_a_new_one():
    store = ResponseStore(100_000, 60)
    first, second = stored(store, "first"), stored(store, "second", now_s=1.0)
    store.renew(first, 50.0)
    store.expire(100.0)
    assert (first.is_gone, second.is_gone) == (False, True)


def test_tenant_with_the_most_bytes_loses_its_oldest_response():
    store = ResponseStore(5 * ENTRY, 60)
    large = [stored(store, f"large {index}") for index in range(4)]
    small = stored(store, "small", tenant="b")
    last = stored(store, "last", tenant="c")
    assert names(store, [*large, small, last]) == ["large 1", "large 2", "large 3", "small", "last"]


def test_responses_in_progress_are_removed_last():
    store = ResponseStore(3 * ENTRY, 60)
    removed = []
    running = StoredResponse("running", "", "a", on_removed=lambda: removed.append("running"))
    store.begin(running)
    ended = [stored(store, f"ended {index}") for index in range(4)]
    assert names(store, ended) == ["ended 2", "ended 3"]
    assert removed == []
    store.append(running, [bytes(3 * ENTRY)])
    assert (removed, running.events, store.size) == (["running"], [], 0)


def test_response_above_the_bound_is_not_kept_and_its_use_has_no_effect():
    store = ResponseStore(3 * ENTRY, 60)
    response = StoredResponse("r", "", "a", input=bytes(4 * ENTRY))
    store.begin(response)
    assert response.is_gone
    store.set_document(response, b"{}")
    store.append(response, [b"event"])
    store.end(response, b"{}", 0.0)
    store.renew(response, 0.0)
    store.remove(response)
    assert (len(store), store.size, response.document, response.events) == (0, 0, b"", [])


def test_ten_thousand_responses_leave_memory_flat():
    store = ResponseStore(50 * ENTRY, 60)
    for index in range(10_000):
        stored(store, f"r{index}", tenant=f"tenant {index}", now_s=index / 1000)
        assert store.size <= 50 * ENTRY
    gc.collect()
    alive = sum(type(each) is StoredResponse for each in gc.get_objects())
    assert (len(store), store.tenants, alive) == (50, 50, 50)


TestResponses = ResponsesMachine.TestCase
TestResponses.settings = MACHINE_SETTINGS


class FindsOfOthers(ResponseStore):
    """Finds responses of any owner."""

    def find(self, response_id, owner, now_s):
        self.expire(now_s)
        found = self._responses.get(response_id)
        return found if found is not None and found.document else None


class FindsHidden(ResponseStore):
    """Finds responses that have no object yet."""

    def find(self, response_id, owner, now_s):
        found = self._responses.get(response_id)
        return super().find(response_id, owner, now_s) or (
            found if found is not None and found.owner == owner else None
        )


class FindsExpired(ResponseStore):
    """Keeps everything until it is evicted."""

    def expire(self, now_s):
        """Remove nothing."""


class EvictsNewest(ResponseStore):
    """Removes the newest response of the largest tenant."""

    def _grow(self, response, amount):
        tenant = self._tenants[response.tenant]
        tenant.ended = dict(reversed(tenant.ended.items()))
        super()._grow(response, amount)
        tenant.ended = dict(reversed(tenant.ended.items()))


class EvictsGrowing(ResponseStore):
    """Removes the response that grows."""

    def _grow(self, response, amount):
        if self.size + amount > self._max_bytes:
            self.remove(response)
        else:
            super()._grow(response, amount)


class ForgetsEvents(ResponseStore):
    """Does not count events."""

    def append(self, response, events):
        if not response.is_gone:
            response.events += events


class ForgetsToRenew(ResponseStore):
    """Does not renew."""

    def renew(self, response, now_s):
        """Change nothing."""


class ForgetsToReport(ResponseStore):
    """Does not report the removal of responses in progress."""

    def remove(self, response):
        response.on_removed = lambda: None
        super().remove(response)


MUTANTS = [
    FindsOfOthers,
    FindsHidden,
    FindsExpired,
    EvictsNewest,
    EvictsGrowing,
    ForgetsEvents,
    ForgetsToRenew,
    ForgetsToReport,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_catches_a_mutant(mutant):
    class Machine(ResponsesMachine):
        new_store = mutant

    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Machine, settings=until_first_failure(MACHINE_SETTINGS, max_examples=4000))
