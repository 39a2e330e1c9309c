"""The contract of a slot map, on the kernel and its oracle; then state machines and mutants."""

import sys
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cext.slot_map_machine import MACHINE_SETTINGS, SlotMapMachine
from cext.slot_map_oracle import SlotMapOracle
from fairlead._cext.slotmap import NoSlotFree, SlotMap, StaleHandle
from first_failure import until_first_failure

both = pytest.mark.parametrize("new_map", [SlotMap, SlotMapOracle], ids=["kernel", "oracle"])


def slot_of(handle):
    return handle & 0xFFFFFFFF


@both
def test_ids_are_allocated_from_zero_and_each_has_one_owner(new_map):
    slots = new_map(3)
    handles = [slots.alloc(key) for key in (70, 80, 90)]
    assert [slot_of(handle) for handle in handles] == [0, 1, 2]
    assert [slots.get(handle) for handle in handles] == [70, 80, 90]
    assert (len(slots), slots.available) == (3, 0)


@both
def test_handle_never_equals_its_slot_number(new_map):
    slots = new_map(2)
    assert slots.alloc(1) == 1 << 32
    assert not slots.is_valid(0)


@both
def test_stale_handle_is_refused_after_its_id_is_reused(new_map):
    slots = new_map(1)
    stale = slots.alloc(1)
    slots.free(stale)
    new_handle = slots.alloc(2)
    assert slot_of(stale) == slot_of(new_handle)
    assert not slots.is_valid(stale)
    for refuse in (slots.get, slots.free, lambda handle: slots.free_many([handle])):
        with pytest.raises(StaleHandle):
            refuse(stale)
    assert slots.get(new_handle) == 2


@both
def test_full_map_raises_and_changes_nothing(new_map):
    slots = new_map(2)
    first = slots.alloc(1)
    with pytest.raises(NoSlotFree):
        slots.alloc_many([2, 3])
    assert [slot_of(first)] == slots.slots()
    second = slots.alloc(2)
    with pytest.raises(NoSlotFree):
        slots.alloc(3)
    assert [slots.get(first), slots.get(second)] == [1, 2]


@both
@pytest.mark.parametrize("number", [-1, 0, 2, 1 << 32, (1 << 32) + 5, -(1 << 63), 1 << 64, -(1 << 80)])
def test_is_valid_accepts_any_integer(new_map, number):
    slots = new_map(2)
    slots.alloc(1)
    assert (number == 1 << 32) == slots.is_valid(number)


@both
def test_handles_and_keys_of_a_wrong_type_or_range_raise(new_map):
    slots = new_map(2)
    for call in (slots.get, slots.free, slots.alloc, lambda it: slots.free_many([it])):
        for wrong in ("1", 1.5, None):
            with pytest.raises(TypeError):
                call(wrong)
    with pytest.raises(OverflowError):
        slots.alloc_many([1, 2**63])
    assert slots.available == 2


@both
@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": -1}, {"capacity": 2**40}])
def test_capacity_must_be_possible(new_map, options):
    with pytest.raises(ValueError):
        new_map(**options)


@both
@pytest.mark.parametrize("first_generation", [0, -1, 2**31])
def test_invalid_first_generation_raises(new_map, first_generation):
    with pytest.raises(ValueError):
        new_map(1, first_generation=first_generation)


def test_large_map_returns_the_key_of_each_live_handle():
    slots, chance, owners = SlotMap(10_000), Random(1), {}
    for round_number in range(20):
        keys = [round_number * 10_000 + i for i in range(slots.available)]
        owners |= dict(zip(slots.alloc_many(keys), keys, strict=True))
        leaving = chance.sample(sorted(owners), 5_000)
        slots.free_many(leaving)
        for handle in leaving:
            del owners[handle]
        assert all(slots.get(handle) == key for handle, key in owners.items())


def test_sizeof_is_16_to_32_bytes_per_slot():
    assert 1_000 * 16 <= sys.getsizeof(SlotMap(1_000)) <= 1_000 * 32


# State machines ------------------------------------------------------------------------------------


def run_machine(new_map, machine_settings=MACHINE_SETTINGS):
    machine = type(f"{new_map.__name__}Machine", (SlotMapMachine,), {"new_map": new_map})
    run_state_machine_as_test(machine, settings=machine_settings)


def test_kernel_passes_the_state_machine():
    run_machine(SlotMap)


def test_oracle_passes_the_state_machine():
    """Otherwise the mutants below could fail because of a fault in the state machine."""
    run_machine(SlotMapOracle, settings(MACHINE_SETTINGS, max_examples=50))


class GenerationsDoNotAdvance(SlotMapOracle):
    def release(self, handle):
        super().release(handle)
        self.generations[slot_of(handle)] = handle >> 32


class OldestIdIsUsedFirst(SlotMapOracle):
    def release(self, handle):
        super().release(handle)
        self.free_slots.insert(0, self.free_slots.pop())


class StaleHandlesFreeTheNewOwner(SlotMapOracle):
    def free(self, handle):
        new_handle = [other for other in self.owners if slot_of(other) == slot_of(handle)]
        super().free(*new_handle if isinstance(handle, int) and new_handle else [handle])


class SomeAreFreedBeforeOneIsStale(SlotMapOracle):
    def free_many(self, handles):
        for handle in handles:
            super().free_many([handle])


class OneIdIsNeverUsed(SlotMapOracle):
    def alloc_many(self, keys):
        if len(keys) == self.available > 0:
            raise NoSlotFree
        return super().alloc_many(keys)


class GenerationsRunIntoTheSign(SlotMapOracle):
    def release(self, handle):
        generation = self.generations[slot_of(handle)]
        super().release(handle)
        self.generations[slot_of(handle)] = generation + 1


class StaleHandlesReturnOtherKeys(SlotMapOracle):
    def get(self, handle):
        new_handles = [other for other in self.owners if slot_of(other) == slot_of(handle)]
        return super().get(new_handles[0] if new_handles else handle)


@pytest.mark.parametrize("mutant", SlotMapOracle.__subclasses__(), ids=lambda mutant: mutant.__name__)
def test_state_machine_detects_each_mutant(mutant):
    with pytest.raises(AssertionError):
        run_machine(mutant, until_first_failure(MACHINE_SETTINGS, max_examples=4000))
