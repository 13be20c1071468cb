"""KVCacheManager: which blocks each request holds, in every KV-cache group."""

import hashlib
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from llmq.profiles.kv_spec import KVCacheGroup, KVCacheLayout
from llmq.runtime.block_pool import BlockPool
from llmq.runtime.free_blocks import KVBlock
from llmq.runtime.request import Request

# A request's blocks in one group, by position. None where a window has passed and the block was given back.
BlockList = list[KVBlock | None]


@dataclass(frozen=True)
class PrefixHit:
    """Blocks already computed for the first `num_tokens` tokens of a request, for each group."""

    num_tokens: int
    blocks: tuple[BlockList, ...]
    # The block after the hit is being computed for a running request: once it is there, it is a hit too.
    continues_soon: bool = False


class KVCacheManager:
    """Owns request -> blocks. The pool owns counts, contents and the free order; nobody else touches either.

    A block of group g holds `g.block_tokens` consecutive tokens of all of g's layers. Its digest chains over the
    blocks before it (SHA-256 of parent digest, group, salt and token ids), so one digest stands for a whole prefix.
    """

    def __init__(self, layout: KVCacheLayout, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.groups = layout.groups
        self.pool = BlockPool(num_blocks)
        self._block_tokens = tuple(group.block_tokens for group in self.groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queries = 0  # tokens asked for, tokens found
        self.prefix_cache_hits = 0
        self._blocks: dict[str, tuple[BlockList, ...]] = {}
        self._room: dict[str, int] = {}  # request -> tokens up to which nothing is to be done for it, see `_room_of`
        self._news: dict[str, list[int]] = {}  # request -> where, in each group, its table differs from what was told
        self._copies: list[tuple[int, int]] = []
        self._being_computed: dict[bytes, str] = {}  # digest of a full block -> who is at it
        self._announced: dict[str, list[bytes]] = {}
        self._num_registered: dict[str, list[int]] = {}  # full blocks already offered to the prefix cache, by group
        # Tokens from one block border of every group to the next: a hit has to end on one.
        self.alignment = math.lcm(*(group.block_tokens for group in self.groups))

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest prefix that is cached in every group, at most `request.max_cached_tokens`. Takes no reference."""
        limit = request.max_cached_tokens // self.alignment * self.alignment
        if not self.enable_prefix_caching or limit <= 0:
            return PrefixHit(0, tuple([] for _ in self.groups))
        self._extend_digests(request)
        num_tokens, previous = limit, -1
        while num_tokens != previous and num_tokens > 0:
            previous = num_tokens
            for index, group in enumerate(self.groups):
                num_tokens = self._longest_hit(request, index, group, num_tokens)
        return PrefixHit(
            num_tokens,
            tuple(self._hit_blocks(request, index, group, num_tokens) for index, group in enumerate(self.groups)),
            continues_soon=num_tokens < limit
            and any(
                request.block_digests[index][num_tokens // group.block_tokens] in self._being_computed
                for index, group in enumerate(self.groups)
            ),
        )

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        num_lookahead_tokens: int = 0,
    ) -> bool:
        """Give `request` room for `num_new_tokens` more tokens; a new request brings its prefix hit.

        All or nothing: False when the pool cannot, and then the request holds what it held (blocks that left its
        window apart). Slots for `num_lookahead_tokens` behind them come where the pool has them to spare.
        """
        wished = num_new_tokens + num_lookahead_tokens
        if num_lookahead_tokens and self.has_room(wished) and self._allocate_slots(request, wished, hit):
            return True
        return self._allocate_slots(request, num_new_tokens, hit)

    def _allocate_slots(self, request: Request, num_new_tokens: int, hit: PrefixHit | None) -> bool:
        name = request.request_id
        if hit is None and request.num_computed_tokens + num_new_tokens <= self._room.get(name, 0):
            return True  # what nearly every decode step finds
        held = self._blocks.get(name) or tuple([] for _ in self.groups)
        num_computed = hit.num_tokens if hit else request.num_computed_tokens
        self._release_outside_window(held, num_computed)
        lists = hit.blocks if hit else held
        missing = [
            max(0, -(-(num_computed + num_new_tokens) // group.block_tokens) - len(blocks))
            for group, blocks in zip(self.groups, lists, strict=True)
        ]
        shared = [] if hit else self._shared_blocks_to_write(held, num_computed, num_new_tokens)
        # Reviving a cached block that nobody uses takes it from the free queue too.
        revived = {b.block_id for blocks in hit.blocks for b in blocks if b and not b.ref_count} if hit else ()
        if sum(missing) + len(shared) > self.pool.num_free_blocks - len(revived):
            return False
        if hit:
            for blocks in hit.blocks:
                for block in blocks:
                    if block is not None:
                        self.pool.reuse(block)
            held = tuple(list(blocks) for blocks in hit.blocks)
            self._num_registered[name] = [len(blocks) for blocks in held]
            self.prefix_cache_queries += request.num_tokens if self.enable_prefix_caching else 0
            self.prefix_cache_hits += hit.num_tokens
            self._announce(request)
        news = self._news.setdefault(
            name, [len(blocks) for blocks in held] if name in self._blocks else [0] * len(held)
        )
        for index, position in shared:
            source, (target,) = held[index][position], self.pool.allocate(1)
            self._copies.append((source.block_id, target.block_id))
            held[index][position] = target
            news[index] = min(news[index], position)
            self.pool.release([source])
        for blocks, count in zip(held, missing, strict=True):
            blocks.extend(self.pool.allocate(count))
        self._blocks[name] = held
        self._room[name] = self._room_of(held, num_computed)
        self._num_registered.setdefault(name, [0] * len(self.groups))
        return True

    def has_room(self, num_tokens: int) -> bool:
        """Whether any request could be given `num_tokens` more now, wherever they begin."""
        return sum(-(-num_tokens // size) + 1 for size in self._block_tokens) <= self.pool.num_free_blocks

    def blocks_to_admit(self, request: Request, hit: PrefixHit) -> int:
        """Free blocks that the whole of `request` as it stands will take beyond its prefix hit."""
        revived = sum(b is not None and not b.ref_count for blocks in hit.blocks for b in blocks)
        return revived + sum(
            max(0, group.blocks_for(request.num_tokens) - sum(b is not None for b in blocks))
            for group, blocks in zip(self.groups, hit.blocks, strict=True)
        )

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give `child_id` the blocks of its parent, shared: whoever writes into a shared block gets a copy first."""
        self._blocks[child_id] = tuple(list(blocks) for blocks in self._blocks[parent_id])
        self._num_registered[child_id] = list(self._num_registered[parent_id])
        self._news[child_id] = [0] * len(self.groups)
        self._room[parent_id] = 0  # the block that it writes next is shared now
        for blocks in self._blocks[child_id]:
            for block in blocks:
                if block is not None:
                    self.pool.acquire(block)

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(source, target) of every copy-on-write since the last call: to be carried out before anything is written."""
        copies, self._copies = self._copies, []
        return copies

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Block table of each group. A block that left the window is given as 0: attention does not read there."""
        return tuple(_ids(blocks) for blocks in self._blocks[request_id])

    def take_new_block_ids(self, request_id: str) -> tuple[tuple[int, ...], tuple[list[int], ...]]:
        """What changed in a request's block tables since the last call: for each group the position that the news begin
        at, and the block ids from there on. Two empty tuples where nothing did."""
        firsts = self._news.pop(request_id, None)
        if firsts is None:
            return (), ()
        tables = self._blocks[request_id]
        return tuple(firsts), tuple(_ids(blocks[first:]) for first, blocks in zip(firsts, tables, strict=True))

    def commit(self, request: Request) -> None:
        """Offer the full blocks of `request.num_computed_tokens` tokens to the prefix cache.

        Call it when those tokens are final: a rejected draft's KV must never be found by prefix.
        """
        if not self.enable_prefix_caching:
            return
        registered = self._num_registered[request.request_id]
        computed = request.num_computed_tokens
        for size, done in zip(self._block_tokens, registered):  # noqa: B905 (asked at every decode step of every request)
            if computed // size > done:
                break
        else:
            return
        self._extend_digests(request)
        for index, (group, blocks) in enumerate(zip(self.groups, self._blocks[request.request_id], strict=True)):
            num_full = min(request.num_computed_tokens // group.block_tokens, len(request.block_digests[index]))
            for position in range(registered[index], num_full):
                digest = request.block_digests[index][position]
                if blocks[position] is not None:
                    self.pool.register(blocks[position], digest, _block_tokens(request, group, position))
                self._withdraw(request.request_id, [digest])
            registered[index] = max(registered[index], num_full)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, its tail first."""
        self._withdraw(request_id, self._announced.pop(request_id, ()))
        for known in (self._num_registered, self._room, self._news):
            known.pop(request_id, None)
        for blocks in self._blocks.pop(request_id, ()):
            self.pool.release(block for block in reversed(blocks) if block is not None)

    def check_integrity(self) -> None:
        """Raise AssertionError where counts, free queue and block tables disagree."""
        references: dict[int, int] = {}
        for lists in self._blocks.values():
            for blocks in lists:
                for block in blocks:
                    if block is not None:
                        references[block.block_id] = references.get(block.block_id, 0) + 1
        self.pool.check_integrity(references)

    def _announce(self, request: Request) -> None:
        """Let requests that share its prefix wait for what this one is about to compute."""
        hit = self._num_registered[request.request_id]
        digests = [digest for chain, known in zip(request.block_digests, hit, strict=False) for digest in chain[known:]]
        self._announced[request.request_id] = digests
        for digest in digests:
            self._being_computed.setdefault(digest, request.request_id)

    def _withdraw(self, request_id: str, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if self._being_computed.get(digest) == request_id:
                del self._being_computed[digest]

    def _room_of(self, held: tuple[BlockList, ...], num_computed: int) -> int:
        """Tokens until which a request has its blocks, shares none that it writes, and none leaves a window."""
        room = []
        for group, blocks in zip(self.groups, held, strict=True):
            first = num_computed // group.block_tokens
            own = next((at for at in range(first, len(blocks)) if blocks[at].ref_count > 1), len(blocks))
            room.append(own * group.block_tokens)
            if group.spec.window is not None:
                room.append((_first_needed_block(group, num_computed) + 1) * group.block_tokens + group.spec.window - 1)
        return min(room)

    def _shared_blocks_to_write(
        self, held: tuple[BlockList, ...], num_computed: int, num_new_tokens: int
    ) -> list[tuple[int, int]]:
        """Blocks that the next tokens go into and others hold too, as (group, position)."""
        found = []
        for index, (group, blocks) in enumerate(zip(self.groups, held, strict=True)):
            last = (num_computed + num_new_tokens - 1) // group.block_tokens
            for position in range(num_computed // group.block_tokens, min(last + 1, len(blocks))):
                if blocks[position].ref_count > 1:
                    found.append((index, position))
        return found

    def _release_outside_window(self, held: tuple[BlockList, ...], num_computed: int) -> None:
        """The next query sees positions from num_computed - window + 1 on; blocks that end before are given back."""
        for group, blocks in zip(self.groups, held, strict=True):
            if group.spec.window is None:
                continue
            passed = []
            for position in range(min(_first_needed_block(group, num_computed), len(blocks)) - 1, -1, -1):
                if blocks[position] is None:
                    break  # everything before went earlier
                passed.append(blocks[position])
                blocks[position] = None
            self.pool.release(passed)

    def _extend_digests(self, request: Request) -> None:
        if not request.block_digests:
            request.block_digests = [[] for _ in self.groups]
        for index, (group, digests) in enumerate(zip(self.groups, request.block_digests, strict=True)):
            for position in range(len(digests), request.num_tokens // group.block_tokens):
                parent = digests[-1] if digests else f"{index}:{request.cache_salt}".encode()
                tokens = array("q", _block_tokens(request, group, position)).tobytes()
                digests.append(hashlib.sha256(len(parent).to_bytes(4, "little") + parent + tokens).digest())

    def _find(self, request: Request, index: int, group: KVCacheGroup, position: int) -> KVBlock | None:
        return self.pool.find(request.block_digests[index][position], _block_tokens(request, group, position))

    def _longest_hit(self, request: Request, index: int, group: KVCacheGroup, limit: int) -> int:
        """Most tokens, at most `limit` and aligned, after which this group has every block that the next query sees."""
        size = group.block_tokens
        if group.spec.window is None:
            position = 0
            while (position + 1) * size <= limit and self._find(request, index, group, position):
                position += 1
            return position * size // self.alignment * self.alignment
        for num_tokens in range(limit, 0, -self.alignment):
            needed = range(_first_needed_block(group, num_tokens), num_tokens // size)
            if all(self._find(request, index, group, position) for position in needed):
                return num_tokens
        return 0

    def _hit_blocks(self, request: Request, index: int, group: KVCacheGroup, num_tokens: int) -> BlockList:
        first = _first_needed_block(group, num_tokens)
        return [
            self._find(request, index, group, position) if position >= first else None
            for position in range(num_tokens // group.block_tokens)
        ]


def _first_needed_block(group: KVCacheGroup, num_computed: int) -> int:
    """Index of the first block that the query at position `num_computed` still sees."""
    if group.spec.window is None:
        return 0
    return max(0, num_computed - group.spec.window + 1) // group.block_tokens


def _ids(blocks: BlockList) -> list[int]:
    return [block.block_id if block else 0 for block in blocks]


def _block_tokens(request: Request, group: KVCacheGroup, position: int) -> list[int]:
    return request.token_ids[position * group.block_tokens : (position + 1) * group.block_tokens]
