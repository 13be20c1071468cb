"""BlockPool: who uses a block, what a block holds, and which free block goes next."""

from collections.abc import Iterable, Sequence

from llmq.runtime.free_blocks import FreeBlocks, KVBlock


class BlockPool:
    """Reference counts, and contents by digest.

    A free block keeps its content until it is taken for another use (in FreeBlocks' order): a prefix hit may revive it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlocks(self.blocks)
        self._cached: dict[bytes, KVBlock] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[KVBlock]:
        """Take `count` blocks for writing, forgetting what they held. The caller has checked `num_free_blocks`."""
        taken = []
        for _ in range(count):
            block = self._free.take()
            self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def find(self, digest: bytes, token_ids: Sequence[int]) -> KVBlock | None:
        """The block that holds exactly these tokens after the prefix that `digest` stands for."""
        block = self._cached.get(digest)
        # Compared token by token: a collision of the digest must not serve another prompt's KV.
        return block if block is not None and block.token_ids == tuple(token_ids) else None

    def acquire(self, block: KVBlock) -> None:
        """Share a block with one user more."""
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def reuse(self, block: KVBlock) -> None:
        """Share a block that was found by its content."""
        block.used_again = True
        self.acquire(block)

    def release(self, blocks: Iterable[KVBlock]) -> None:
        """Give back one reference of each, in the order given: pass a sequence's tail first, since a prefix is worth
        more than what follows it."""
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.add(block)

    def register(self, block: KVBlock, digest: bytes, token_ids: Sequence[int]) -> None:
        """Make a full, computed block findable. The first block with this content wins; later twins stay anonymous."""
        if block.digest is None and digest not in self._cached:
            block.digest, block.token_ids = digest, tuple(token_ids)
            block.used_again = self._free.recall(digest)
            self._cached[digest] = block

    def _forget(self, block: KVBlock) -> None:
        if block.digest is not None:
            del self._cached[block.digest]
            block.digest, block.token_ids, block.used_again = None, (), False

    def check_integrity(self, references: dict[int, int]) -> None:
        """Raise AssertionError unless the pool agrees with `references` (block id -> number of users)."""
        free_ids = [block.block_id for block in self._free]
        assert len(free_ids) == len(set(free_ids)) == len(self._free), "free queue holds a block twice"
        for block in self.blocks:
            expected = references.get(block.block_id, 0)
            assert block.ref_count == expected, (
                f"block {block.block_id}: {block.ref_count} references, {expected} users"
            )
        assert set(free_ids) == {b.block_id for b in self.blocks if b.ref_count == 0}, "free queue and counts disagree"
        for digest, block in self._cached.items():
            assert block.digest == digest, f"block {block.block_id} is cached under another digest"
        assert sum(b.digest is not None for b in self.blocks) == len(self._cached), "a digest without a cache entry"
