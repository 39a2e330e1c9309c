"""The kernel behaves like the oracle, and the state machine detects pools with one fault each."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cext.block_pool_machine import MACHINE_SETTINGS, BlockPoolMachine
from cext.block_pool_oracle import BlockHashesOracle, BlockPoolOracle, Request, check
from cext.mutants import mutant_params
from fairlead._cext.blockpool import BlockHashes, BlockPool, OutOfBlocks
from first_failure import until_first_failure


def run_machine(new_pool, new_hashes=BlockHashesOracle, machine_settings=MACHINE_SETTINGS):
    fixed_options = getattr(new_pool, "detected_with", {})
    attributes = {"new_pool": new_pool, "new_hashes": new_hashes, "fixed_options": fixed_options}
    machine = type(f"{new_pool.__name__}Machine", (BlockPoolMachine,), attributes)
    run_state_machine_as_test(machine, settings=machine_settings)


def test_kernel_passes_the_state_machine():
    run_machine(BlockPool, BlockHashes)


def test_oracle_passes_the_state_machine():
    """Otherwise the mutants below could fail because of a fault in the state machine."""
    run_machine(BlockPoolOracle, machine_settings=settings(MACHINE_SETTINGS, max_examples=50))


# References ----------------------------------------------------------------------------------------


class DoubleFreeIsIgnored(BlockPoolOracle):
    def drop_references(self, block_ids):
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.references = max(block.references - 1, 0)


class FailedFreeIsNotUndone(BlockPoolOracle):
    def drop_references(self, block_ids):
        for block_id in block_ids:
            check(self.blocks[block_id].references > 0)
            self.blocks[block_id].references -= 1


class FreeBlocksCanBeTouched(BlockPoolOracle):
    def in_use(self, block_id):
        return super().in_use(block_id) or self.touching

    touching = False

    def touch(self, block_ids):
        self.touching = True
        try:
            super().touch(block_ids)
        finally:
            self.touching = False


class EvictionTakesReferencedBlocks(BlockPoolOracle):
    def release(self, request):
        super().release(request)
        taken = [block_id for block_id in request.held if block_id not in self.free_list]
        self.free_list[:0] = taken


class OutOfBlocksEvictsFirst(BlockPoolOracle):
    def get_new_blocks(self, count):
        while count > self.free and self.requests:
            self.evict_oldest()
        return super().get_new_blocks(count)


class SharedCountsBlocksNotReferences(BlockPoolOracle):
    @property
    def shared(self):
        return sum(block.references > 1 for block in self.blocks)


class LastBlockIsNeverAllocated(BlockPoolOracle):
    def get_new_blocks(self, count):
        if count and count == self.available:
            raise OutOfBlocks
        return super().get_new_blocks(count)


# Contents ------------------------------------------------------------------------------------------


class FreeBlocksStayInTheIndex(BlockPoolOracle):
    def forget(self, block_id):
        self.blocks[block_id].hash = None


class DuplicateTakesOverTheIndex(BlockPoolOracle):
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def cache_full_blocks(self, block_ids, token_ids, first, last, hashes):
        super().cache_full_blocks(block_ids, token_ids, first, last, hashes)
        for i in range(first, last):
            if list(block_ids)[i] != -1:
                self.index[hashes[i]] = list(block_ids)[i]


class DuplicateIsKeptItself(BlockPoolOracle):
    detected_with = {"blocks": 20, "block_size": 1, "max_entries": None}  # noqa: RUF012

    def holder(self, block_id):
        super().holder(block_id)
        return block_id


class FreeingADuplicateClearsTheIndex(BlockPoolOracle):
    def forget(self, block_id):
        self.index.pop(self.blocks[block_id].hash, None)
        super().forget(block_id)


class WindowRequiresTheStart(BlockPoolOracle):
    def match_prefix(self, hashes, limit, *, window=None):
        found = super().match_prefix(hashes, limit)
        seen_from = 0 if window is None else max(len(found) - window, 0)
        return [-1] * seen_from + found[seen_from:]


class HashesIgnoreTheParent(BlockHashesOracle):
    def digest(self, message):
        return super().digest(message if message.startswith(b"salt") else message[16:])


class HashesIgnoreTheSalt(BlockHashesOracle):
    def __init__(self, hash_key, block_size, salt=b""):
        super().__init__(hash_key, block_size)


class LastBlockIsNotHashed(BlockHashesOracle):
    def extend(self, token_ids):
        return super().extend(memoryview(token_ids)[:-1])


# Finished requests ---------------------------------------------------------------------------------


class EvictsTheNewest(BlockPoolOracle):
    def evict_oldest(self):
        newest = list(self.requests.values())[-1]
        self.release(newest)
        self.evicted_requests += not newest.slid
        return newest


class TouchDoesNotCountAsUse(BlockPoolOracle):
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def use(self, request):
        pass


class FirstOwnerIsUsed(BlockPoolOracle):
    detected_rarely = True
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def touch(self, block_ids):
        super().touch(block_ids)
        for block_id in self.checked(block_ids)[:1]:
            if self.blocks[block_id].owner:
                self.use(self.blocks[block_id].owner)


class EvictsOneMoreThanNeeded(BlockPoolOracle):
    def get_new_blocks(self, count):
        evicts = self.free < count <= self.available
        taken = super().get_new_blocks(count)
        if evicts and self.requests:
            self.evict_oldest()
        return taken


class SharedBlocksAreDroppedWithTheFirst(BlockPoolOracle):
    def release(self, request):
        for block_id in request.held:
            self.forget(block_id)
        super().release(request)


class CoveredRequestsAreKept(BlockPoolOracle):
    def keep(self, request):
        for block_id in request.held:
            self.blocks[block_id].tip_of = None
        super().keep(request)


class CoveringIgnoresTheFirstBlocks(BlockPoolOracle):
    def keep(self, request):
        for block_id in request.held:
            if self.blocks[block_id].tip_of and self.blocks[block_id].tip_of.key != request.key:
                self.release(self.blocks[block_id].tip_of)
        super().keep(request)


class OwnerOutlivesItsRequest(BlockPoolOracle):
    """As if the oldest request took its position in the order of eviction."""

    detected_rarely = True
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def release(self, request):
        owned = [block_id for block_id in request.held if self.blocks[block_id].owner is request]
        super().release(request)
        for block_id in owned:
            if self.blocks[block_id].kept:
                self.blocks[block_id].owner = next(iter(self.requests.values()))

    def use(self, request):
        if request.key in self.requests:
            super().use(request)


class EmptyRequestReplacesAnother(BlockPoolOracle):
    def retire(self, key, block_ids):
        if not any(self.blocks[block_id].hash for block_id in self.checked(block_ids)):
            super().retire(key, block_ids)
            if key in self.requests:
                self.release(self.requests[key])
        else:
            super().retire(key, block_ids)


class SameKeyIsKeptTwice(BlockPoolOracle):
    def keep(self, request):
        earlier = self.requests.pop(request.key, None)
        super().keep(request)
        if earlier:
            self.requests[(earlier.key, len(self.requests))] = earlier

    def release(self, request):
        key = next(key for key, value in self.requests.items() if value is request)
        self.requests[request.key] = self.requests.pop(key)
        super().release(request)


class PartialBlocksAreKept(BlockPoolOracle):
    def retire(self, key, block_ids):
        partial = [block_id for block_id in self.checked(block_ids) if not self.blocks[block_id].hash]
        super().retire(key, block_ids)
        kept = self.requests.get(key)
        if isinstance(kept, Request) and partial and partial[-1] in self.free_list:
            self.free_list.remove(partial[-1])
            self.blocks[partial[-1]].kept += 1
            kept.held.insert(0, partial[-1])


# Blocks that slid out of a window -------------------------------------------------------------------


class SlidBlocksAreFreed(BlockPoolOracle):
    def retire_blocks(self, block_ids):
        self.free_blocks(block_ids)


class SlidBlocksAreEvictedTogether(BlockPoolOracle):
    def evict_oldest(self):
        oldest = super().evict_oldest()
        for other in list(self.requests.values()):
            if oldest.slid and other.slid:
                self.release(other)
        return oldest


class SlidBlocksAreEvictedFromTheLast(BlockPoolOracle):
    def retire_blocks(self, block_ids):
        super().retire_blocks(list(reversed(self.checked(block_ids))))


class HitDoesNotUseSlidBlocks(BlockPoolOracle):
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def use(self, request):
        if not request.slid:
            super().use(request)


class DuplicateThatSlidOutIsKeptItself(BlockPoolOracle):
    detected_with = {"blocks": 20, "block_size": 1, "max_entries": None}  # noqa: RUF012

    def keep_block(self, block_id):
        for other, block in enumerate(self.blocks):
            if block.hash == self.blocks[block_id].hash and other != block_id and not block.kept:
                super().keep_block(other)
                return
        super().keep_block(block_id)


class BlockThatARequestEndsWithIsNotKeptByItself(BlockPoolOracle):
    """Then another request under the same key would drop it."""

    detected_rarely = True
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def keep_block(self, block_id):
        if self.blocks[block_id].tip_of:
            self.use(self.blocks[block_id].tip_of)
        else:
            super().keep_block(block_id)


class ShorterRequestReplacesALongerOneWithTheSameEnd(BlockPoolOracle):
    detected_rarely = True
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def is_covered(self, request):
        return False


class SlidBlockStaysBesideTheRequestThatHoldsIt(BlockPoolOracle):
    detected_rarely = True
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def keep(self, request):
        slid = [(block, block.slid_as) for block in self.blocks]
        for block in self.blocks:
            block.slid_as = None
        super().keep(request)
        for block, slid_as in slid:
            block.slid_as = slid_as


class SlidBlocksCountAsRequests(BlockPoolOracle):
    def statistics(self):
        return super().statistics()._replace(cached_requests=len(self.requests))


class FailedSequencesKeepWhatSlidOut(BlockPoolOracle):
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def forget_blocks(self, hashes, first, last):
        self.check_hashes(hashes)
        check(first >= 0 and last >= 0)


class FailureForgetsEarlierBlocksToo(BlockPoolOracle):
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def forget_blocks(self, hashes, first, last):
        super().forget_blocks(hashes, 0, last)


class FailureForgetsRequestsOfOthers(BlockPoolOracle):
    detected_rarely = True
    detected_with = {"blocks": 14, "block_size": 1}  # noqa: RUF012

    def forget_blocks(self, hashes, first, last):
        super().forget_blocks(hashes, first, last)
        for i in range(first, min(last, len(hashes))):
            block = self.index.get(hashes[i])
            if block is not None and self.blocks[block].tip_of:
                self.release(self.blocks[block].tip_of)


# Thresholds ------------------------------------------------------------------------------------------


class TrimGoesBelowTheThreshold(BlockPoolOracle):
    detected_with = {"blocks": 4, "threshold": 0.5, "max_entries": None}  # noqa: RUF012

    def is_over(self):
        return (self.total - self.free) >= self.threshold * self.total or super().is_over()


class TrimIgnoresTheEntries(BlockPoolOracle):
    def is_over(self):
        return (self.total - self.free) > self.threshold * self.total


class TrimStopsAtReferencedBlocks(BlockPoolOracle):
    def trim(self):
        return [] if self.referenced else super().trim()


@pytest.mark.parametrize("mutant", mutant_params(BlockPoolOracle.__subclasses__()))
def test_state_machine_detects_each_pool_mutant(mutant):
    with pytest.raises(AssertionError):
        run_machine(mutant, machine_settings=until_first_failure(MACHINE_SETTINGS, max_examples=4000))


@pytest.mark.parametrize("mutant", mutant_params(BlockHashesOracle.__subclasses__()))
def test_state_machine_detects_each_hash_mutant(mutant):
    with pytest.raises(AssertionError):
        run_machine(BlockPoolOracle, mutant, until_first_failure(MACHINE_SETTINGS, max_examples=4000))
