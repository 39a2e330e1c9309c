"""Run random operations on a slot map and on its oracle, and compare everything observable."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from cext.slot_map_oracle import LAST_GENERATION, SlotMapOracle

MACHINE_SETTINGS = settings(
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

keys = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
wrong_keys = st.sampled_from([2**63, 2**70, "1", 1.5, None])
offsets = st.sampled_from([1, -1, 1 << 32, -1 << 32, 1 << 63, 1 << 64, -1 << 70])


class SlotMapMachine(RuleBasedStateMachine):
    """Subclasses set `new_map` to the implementation under test. `owners` maps live handles to keys."""

    new_map = SlotMapOracle
    handles = Bundle("handles")

    @initialize(
        capacity=st.sampled_from([1, 3, 3, 8]),
        first_generation=st.sampled_from([1, 1, LAST_GENERATION - 1, LAST_GENERATION]),
    )
    def begin(self, **options):
        self.oracle = SlotMapOracle(**options)
        self.map = self.new_map(**options)
        self.capacity = options["capacity"]
        self.owners = {}

    @rule(target=handles, key=keys)
    def alloc(self, key):
        kind, handle = self.attempt("alloc", key)
        return self.check_allocated([handle] if kind == "returned" else [], [key])

    @rule(target=handles, keys=st.lists(keys, max_size=4))
    def alloc_many(self, keys):
        kind, handles = self.attempt("alloc_many", keys)
        return self.check_allocated(handles if kind == "returned" else [], keys)

    @rule(key=wrong_keys, others=st.lists(keys, max_size=2), many=st.booleans())
    def alloc_for_invalid_key(self, key, others, many):
        kind, _ = self.attempt("alloc_many", [*others, key]) if many else self.attempt("alloc", key)
        assert kind == "raised"

    @rule(handle=handles)
    def free(self, handle):
        self.attempt("free", handle)
        self.owners.pop(handle, None)

    @rule(handles=st.lists(handles, max_size=4), wrong=st.sampled_from([None, None, "1", 1.5, 2**70]))
    def free_many(self, handles, wrong):
        named = handles if wrong is None else [*handles, wrong]
        kind, _ = self.attempt("free_many", named)
        all_live = len(set(named)) == len(named) and self.owners.keys() >= set(named)
        assert ("returned" if all_live else "raised") == kind
        if all_live:
            for handle in handles:
                del self.owners[handle]

    @rule(handle=handles)
    def look_up(self, handle):
        kind, key = self.attempt("get", handle)
        assert (handle in self.owners) == (kind == "returned") == self.map.is_valid(handle)
        if kind == "returned":
            assert self.owners[handle] == key

    @rule(handle=handles, offset=offsets)
    def use_forged_handle(self, handle, offset):
        forged = handle + offset
        if forged not in self.owners:
            assert not self.map.is_valid(forged)
            assert self.attempt("get", forged)[0] == "raised"
            assert self.attempt("free", forged)[0] == "raised"

    @invariant()
    def every_id_is_free_or_bound_to_one_owner(self):
        bound = sorted(handle & 0xFFFFFFFF for handle in self.owners)
        assert bound == self.map.slots()
        assert len(bound) == len(set(bound)) == len(self.map) == self.capacity - self.map.available
        assert all(self.map.get(handle) == key for handle, key in self.owners.items())

    def check_allocated(self, handles, keys):
        for handle, key in zip(handles, keys, strict=bool(handles)):
            assert 0 <= handle & 0xFFFFFFFF < self.capacity
            assert handle not in self.owners
            self.owners[handle] = key
        return multiple(*handles)

    def attempt(self, method, *arguments):
        expected = outcome(getattr(self.oracle, method), *arguments)
        actual = outcome(getattr(self.map, method), *arguments)
        assert expected == actual
        return actual


def outcome(call, *arguments):
    """Return the result of a call, or the type of its exception, for comparison."""
    try:
        return "returned", call(*arguments)
    except Exception as error:  # noqa: BLE001  (any exception is an outcome)
        return "raised", type(error)
