"""FreeBlocks: which free block is given out next, so that what is likely to be found again stays longest."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# Digests remembered of blocks that were given out, for each block of the pool, of either kind.
REMEMBERED = 2


@dataclass(slots=True, eq=False)
class KVBlock:
    """One block of the KVStore. `digest` and `token_ids` are set while its content can be found by prefix."""

    block_id: int
    ref_count: int = 0
    digest: bytes | None = None
    token_ids: tuple[int, ...] = ()
    used_again: bool = False  # found by prefix, now or not long before it was last given out
    queue: "FreeQueue | None" = field(default=None, repr=False)  # that it is in while it is free
    previous_free: "KVBlock | None" = field(default=None, repr=False)
    next_free: "KVBlock | None" = field(default=None, repr=False)


class FreeQueue:
    """Doubly linked list of free blocks, O(1) at both ends and for removal from the middle (a prefix hit)."""

    def __init__(self, blocks: Iterable[KVBlock] = ()) -> None:
        self._head = KVBlock(-1)
        self._tail = KVBlock(-1)
        self._head.next_free, self._tail.previous_free = self._tail, self._head
        self._num_blocks = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._num_blocks

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
        block.previous_free = block.next_free = block.queue = None
        self._num_blocks -= 1

    def _link(self, left: KVBlock, block: KVBlock, right: KVBlock) -> None:
        block.previous_free, block.next_free, block.queue = left, right, self
        left.next_free = right.previous_free = block
        self._num_blocks += 1

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._head.next_free
        while block is not self._tail:
            yield block
            block = block.next_free


class FreeBlocks:
    """All free blocks: blank ones go first, then cached ones by Adaptive Replacement (Megiddo and Modha 2003, FAST).

    Cached blocks that were used once and those that were found again wait in a queue each, least recently used first.
    `once_share` is how much of both the former may be. It follows the digests that come back after their block was
    given out: what was in the one queue should have had more room there. A flood of prompts that never come again thus
    passes through one queue and leaves the other alone. Every operation is O(1).
    """

    def __init__(self, blocks: Iterable[KVBlock]) -> None:
        self._blank = FreeQueue(blocks)
        self._once, self._again = FreeQueue(), FreeQueue()
        self._gone_once: OrderedDict[bytes, None] = OrderedDict()
        self._gone_again: OrderedDict[bytes, None] = OrderedDict()
        self._num_blocks = len(self._blank)  # of the pool
        self.once_share = 0.5

    def __len__(self) -> int:
        return len(self._blank) + len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[KVBlock]:
        for queue in (self._blank, self._once, self._again):
            yield from queue

    def add(self, block: KVBlock) -> None:
        if block.digest is None:
            self._blank.append_left(block)
        else:
            (self._again if block.used_again else self._once).append(block)

    def remove(self, block: KVBlock) -> None:
        block.queue.remove(block)

    def take(self) -> KVBlock:
        """The block to give out, its digest remembered for a while."""
        if self._blank:
            return self._blank.pop_left()
        cached = len(self._once) + len(self._again)
        from_once = bool(self._once) and len(self._once) >= self.once_share * cached
        block = (self._once if from_once else self._again).pop_left()
        gone = self._gone_once if from_once else self._gone_again
        gone[block.digest] = None
        if len(gone) > REMEMBERED * self._num_blocks:
            gone.popitem(last=False)
        return block

    def recall(self, digest: bytes) -> bool:
        """Whether a block with this content was given out not long ago. Learns from it, and forgets it."""
        for gone, others, sign in (
            (self._gone_once, self._gone_again, 1),
            (self._gone_again, self._gone_once, -1),
        ):
            if digest in gone:
                step = max(1.0, len(others) / len(gone)) / self._num_blocks
                self.once_share = min(1.0, max(0.0, self.once_share + sign * step))
                del gone[digest]
                return True
        return False
