"""Owns the pages of the KV cache: which are free. Knows neither who holds a block nor what lies in it."""

from collections.abc import Sequence


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were asked for; nothing has changed."""


class BlockPool:
    """Block ids 0 … `total` − 1, each free or taken; a block holds `block_size` tokens."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        # A stack, so that the block used last, which caches still hold, is the next one taken.
        self._free = list(range(total - 1, -1, -1))
        self._taken = bytearray(total)

    @property
    def free(self) -> int:
        """How many blocks could be allocated now."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks that many tokens fill, the last one perhaps partly."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; raise `OutOfBlocksError`, with nothing changed, when fewer are free."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks were asked for, {len(self._free)} are free")
        split = len(self._free) - count
        taken = self._free[split:][::-1]
        del self._free[split:]
        for block in taken:
            self._taken[block] = True
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. One that is free already is a bug and raises: two sequences would share it."""
        for block in blocks:
            if not self._taken[block]:
                raise AssertionError(f"block {block} was released twice")
            self._taken[block] = False
        self._free.extend(reversed(blocks))
