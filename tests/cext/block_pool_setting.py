"""A block pool, kernel or oracle, and the operations of a sequence on it."""

from array import array

from cext.block_pool_oracle import BlockHashesOracle, BlockPoolOracle
from fairlead._cext.blockpool import BlockHashes, BlockPool

HASH_KEY = bytes(range(16))


class Kernel:
    pool, hashes = BlockPool, BlockHashes


class Oracle:
    pool, hashes = BlockPoolOracle, BlockHashesOracle


class PoolDriver:
    """A pool with blocks of two tokens, and the operations of a sequence on it."""

    def __init__(self, kind, blocks=8, **options):
        self.kind = kind
        self.pool = kind.pool(blocks, 2, hash_key=HASH_KEY, **options)

    def hashes(self, tokens, salt=b""):
        chain = self.kind.hashes(HASH_KEY, 2, salt)
        chain.extend(array("i", tokens))
        return chain

    def run(self, tokens):
        """Allocate the blocks that these tokens need, and fill them."""
        blocks = self.pool.get_new_blocks(self.pool.blocks_for(len(tokens)))
        full = len(tokens) // 2
        self.pool.cache_full_blocks(blocks, array("i", tokens), 0, full, self.kind.hashes(HASH_KEY, 2))
        return blocks

    def run_and_retire(self, key, tokens):
        blocks = self.run(tokens)
        self.pool.retire(key, blocks)
        return blocks

    def match(self, tokens, limit=99, **options):
        return self.pool.match_prefix(self.hashes(tokens), limit, **options)

    def counts(self):
        statistics = self.pool.statistics()
        return statistics.free, statistics.evictable, statistics.referenced
