"""BlockPool: who uses a block, what a block holds, and which free block goes next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class KVBlock:
    """One block of the KVStore. `digest` and `token_ids` are set while its content can be found by prefix."""

    block_id: int
    ref_count: int = 0
    digest: bytes | None = None
    token_ids: tuple[int, ...] = ()
    previous_free: "KVBlock | None" = field(default=None, repr=False)
    next_free: "KVBlock | None" = field(default=None, repr=False)


class FreeQueue:
    """Doubly linked list of free blocks, O(1) at both ends and for removal from the middle (a prefix hit)."""

    def __init__(self, blocks: Iterable[KVBlock]) -> None:
        self._head = KVBlock(-1)
        self._tail = KVBlock(-1)
        self._head.next_free, self._tail.previous_free = self._tail, self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVBlock) -> None:
        """Put `block` last in line: it keeps its content longest."""
        self._link(self._tail.previous_free, block, self._tail)

    def append_left(self, block: KVBlock) -> None:
        """Put `block` first in line: it is the next to be reused."""
        self._link(self._head, block, self._head.next_free)

    def pop_left(self) -> KVBlock:
        block = self._head.next_free
        self.remove(block)
        return block

    def remove(self, block: KVBlock) -> None:
        block.previous_free.next_free = block.next_free
        block.next_free.previous_free = block.previous_free
        block.previous_free = block.next_free = None
        self.num_blocks -= 1

    def _link(self, left: KVBlock, block: KVBlock, right: KVBlock) -> None:
        block.previous_free, block.next_free = left, right
        left.next_free = right.previous_free = block
        self.num_blocks += 1

    def __iter__(self):
        block = self._head.next_free
        while block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """Reference counts, contents by digest, and the free order (least recently used first, uncached before cached).

    A free block keeps its content until it is taken for another use, so a prefix hit may revive it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeQueue(self.blocks)
        self._cached: dict[bytes, KVBlock] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_blocks

    def allocate(self, count: int) -> list[KVBlock]:
        """Take `count` blocks for writing, forgetting what they held. The caller has checked `num_free_blocks`."""
        taken = []
        for _ in range(count):
            block = self._free.pop_left()
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
        """Share a block that was found."""
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def release(self, blocks: Iterable[KVBlock]) -> None:
        """Give back one reference of each, in the order given: pass a sequence's tail first, since a prefix is worth
        more than what follows it."""
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.digest is None:
                    self._free.append_left(block)
                else:
                    self._free.append(block)

    def register(self, block: KVBlock, digest: bytes, token_ids: Sequence[int]) -> None:
        """Make a full, computed block findable. The first block with this content wins; later twins stay anonymous."""
        if block.digest is None and digest not in self._cached:
            block.digest, block.token_ids = digest, tuple(token_ids)
            self._cached[digest] = block

    def _forget(self, block: KVBlock) -> None:
        if block.digest is not None:
            del self._cached[block.digest]
            block.digest, block.token_ids = None, ()

    def check_integrity(self, references: dict[int, int]) -> None:
        """Raise AssertionError unless the pool agrees with `references` (block id -> number of users)."""
        free_ids = [block.block_id for block in self._free]
        assert len(free_ids) == len(set(free_ids)) == self._free.num_blocks, "free queue holds a block twice"
        for block in self.blocks:
            expected = references.get(block.block_id, 0)
            assert block.ref_count == expected, (
                f"block {block.block_id}: {block.ref_count} references, {expected} users"
            )
        assert set(free_ids) == {b.block_id for b in self.blocks if b.ref_count == 0}, "free queue and counts disagree"
        for digest, block in self._cached.items():
            assert block.digest == digest, f"block {block.block_id} is cached under another digest"
        assert sum(b.digest is not None for b in self.blocks) == len(self._cached), "a digest without a cache entry"
