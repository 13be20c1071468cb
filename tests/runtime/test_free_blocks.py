"""The order in which free blocks are given out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.runtime.block_pool import BlockPool
from llmq.runtime.free_blocks import REMEMBERED, FreeBlocks, KVBlock


def use(pool: BlockPool, *contents: int) -> list[bool]:
    """Ask for each content, compute what is not there, and give all back; whether each was found."""
    found = []
    for content in contents:
        block = pool.find(bytes([content]), [content])
        found.append(block is not None)
        if block is not None:
            pool.reuse(block)
        else:
            (block,) = pool.allocate(1)
            pool.register(block, bytes([content]), [content])
        pool.release([block])
    return found


def test_blank_blocks_go_first():
    pool = BlockPool(3)
    use(pool, 1, 2)
    blank = pool.allocate(1)
    assert blank[0].block_id == 2
    pool.release(blank)
    assert pool.allocate(1) == blank
    assert use(pool, 1, 2) == [True, True]


def test_the_least_recently_used_goes_first():
    pool = BlockPool(3)
    use(pool, 1, 2, 3, 4)
    assert use(pool, 2) == [True]
    assert use(pool, 1) == [False]


def test_a_flood_of_what_never_comes_again_leaves_what_was_found_again():
    pool = BlockPool(4)
    use(pool, 1, 2, 1, 2)
    use(pool, *range(10, 200))
    assert use(pool, 1, 2) == [True, True]


def test_what_comes_back_soon_after_it_was_given_out_makes_room_for_its_kind():
    pool = BlockPool(4)
    use(pool, 1, 2, 1, 2, 3, 4, 5)  # 3 is gone
    before = pool._free.once_share
    assert use(pool, 3) == [False]
    assert pool._free.once_share > before
    assert pool.find(bytes([3]), [3]).used_again


def test_what_was_found_again_and_is_gone_asks_for_its_room_back():
    pool = BlockPool(2)
    use(pool, 1, 2, 1, 2, 3)  # both were found again: the older one is gone
    before = pool._free.once_share
    assert use(pool, 1) == [False]
    assert pool._free.once_share < before


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 20), max_size=80))
def test_all_blocks_stay_and_what_is_remembered_is_bounded(num_blocks, contents):
    pool = BlockPool(num_blocks)
    use(pool, *contents)
    pool.check_integrity({})
    free = pool._free
    assert len(free._gone_once) <= REMEMBERED * num_blocks
    assert len(free._gone_again) <= REMEMBERED * num_blocks
    assert not set(pool._cached) & ({*free._gone_once} | {*free._gone_again})
    assert 0 <= free.once_share <= 1


def test_a_block_leaves_the_queue_that_it_is_in():
    blocks = [KVBlock(number, digest=bytes([number])) for number in range(4)]
    free = FreeBlocks([])
    for number, block in enumerate(blocks):
        block.used_again = number % 2 == 1
        free.add(block)
    free.remove(blocks[1])
    free.remove(blocks[2])
    assert sorted(block.block_id for block in free) == [0, 3]
    assert len(free) == 2
