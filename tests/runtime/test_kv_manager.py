"""Blocks under any order of admission, growth, commit, release: nothing lost, nothing shared by mistake."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.request import EngineRequest, Request
from llmq.runtime.sampling_params import SamplingParams

FULL = KVCacheSpec(1, 8, 8, KV_DTYPES["fp32"])
WINDOW = KVCacheSpec(1, 8, 8, KV_DTYPES["fp32"], window=10)
ONE_GROUP = KVCacheLayout((KVCacheGroup(FULL, (0, 1), 4),))
WINDOW_ALONE = KVCacheLayout((KVCacheGroup(WINDOW, (0, 1), 4),))
# One full layer beside two with a window: a block holds 8 tokens of the one or 4 tokens of the two.
TWO_GROUPS = KVCacheLayout((KVCacheGroup(FULL, (0,), 8), KVCacheGroup(WINDOW, (1, 2), 4)))


def new_request(name: str, token_ids: list[int], salt: str = "") -> Request:
    return Request(
        EngineRequest(request_id=name, prompt_token_ids=token_ids, sampling_params=SamplingParams(), cache_salt=salt)
    )


class BlockMachine(RuleBasedStateMachine):
    """Plays the scheduler against a small pool, with a model of what each block was written with."""

    layout: KVCacheLayout
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(self.layout, num_blocks=14)
        self.live: dict[str, Request] = {}
        self.written: dict[int, tuple] = {}  # block -> (group, position, tokens from the start to its end)
        self.count = 0

    @rule(target=requests, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), salt=st.sampled_from(["", "b"]))
    def admit(self, tokens, salt):
        self.count += 1
        request = new_request(f"r{self.count}", tokens, salt)
        hit = self.kv.get_computed_blocks(request)
        assert hit.num_tokens <= len(tokens) - 1
        for group, blocks in enumerate(hit.blocks):
            size = self.layout.groups[group].block_tokens
            for position, block in enumerate(blocks):
                if block is not None:  # what is found was written for this very prefix
                    prefix = tuple(tokens[: (position + 1) * size])
                    assert self.written[block.block_id] == (group, position, salt, prefix)
        if not self.kv.allocate_slots(request, len(tokens) - hit.num_tokens, hit):
            return multiple()
        request.num_computed_tokens = hit.num_tokens
        self.live[request.request_id] = request
        self._compute(request)
        return request

    @rule(request=requests, token=st.integers(0, 1))
    def grow(self, request, token):
        if request.request_id not in self.live:
            return
        request.token_ids.append(token)
        if self.kv.allocate_slots(request, 1):
            self._compute(request)
        else:
            request.token_ids.pop()

    @rule(target=requests, request=requests)
    def fork(self, request):
        if request.request_id not in self.live:
            return multiple()
        self.count += 1
        child = request.fork(f"r{self.count}", seed=None)
        self.kv.fork(request.request_id, child.request_id)
        self.live[child.request_id] = child
        return child

    @rule(request=requests)
    def preempt(self, request):
        """Gives its blocks back and comes again at once, if there is room, as a request that was never here."""
        if self.live.pop(request.request_id, None) is None:
            return
        self.kv.free(request.request_id)
        request.num_computed_tokens = 0
        hit = self.kv.get_computed_blocks(request)
        if self.kv.allocate_slots(request, request.num_tokens - hit.num_tokens, hit):
            request.num_computed_tokens = hit.num_tokens
            self.live[request.request_id] = request
            self._compute(request)

    @rule(request=consumes(requests))
    def free(self, request):
        if self.live.pop(request.request_id, None):
            self.kv.free(request.request_id)

    def _compute(self, request: Request) -> None:
        """Copy blocks and write the new tokens as the runner would, then commit them."""
        for source, target in self.kv.take_block_copies():
            self.written[target] = self.written[source]
        for index, (group, ids) in enumerate(
            zip(self.layout.groups, self.kv.block_ids(request.request_id), strict=True)
        ):
            size = group.block_tokens
            for position in range(request.num_computed_tokens // size, -(-request.num_tokens // size)):
                tokens = tuple(request.token_ids[: (position + 1) * size])
                self.written[ids[position]] = (index, position, request.cache_salt, tokens)
        request.num_computed_tokens = request.num_tokens
        self.kv.commit(request)

    @invariant()
    def pool_is_whole(self):
        self.kv.check_integrity()

    @invariant()
    def live_blocks_hold_what_was_written(self):
        for request in self.live.values():
            for index, (group, ids) in enumerate(
                zip(self.layout.groups, self.kv.block_ids(request.request_id), strict=True)
            ):
                size, window = group.block_tokens, group.spec.window
                # The next query's view: what only earlier ones saw may have been given back.
                seen_from = 0 if window is None else max(0, request.num_tokens - window + 1)
                for position in range(seen_from // size, len(ids)):
                    tokens = tuple(request.token_ids[: (position + 1) * size])
                    assert self.written[ids[position]] == (index, position, request.cache_salt, tokens)

    @invariant()
    def waste_is_at_most_a_partial_block(self):
        for request in self.live.values():
            for group, ids in zip(self.layout.groups, self.kv.block_ids(request.request_id), strict=True):
                assert len(ids) == -(-request.num_tokens // group.block_tokens)

    def teardown(self):
        for name in list(self.live):
            self.kv.free(name)
        assert self.kv.pool.num_free_blocks == self.kv.pool.num_blocks


def machine(name: str, chosen: KVCacheLayout):
    case = type(name, (BlockMachine,), {"layout": chosen}).TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return case


TestOneGroup = machine("OneGroup", ONE_GROUP)
TestWindow = machine("Window", WINDOW_ALONE)
TestTwoGroups = machine("TwoGroups", TWO_GROUPS)


def admit(kv: KVCacheManager, request: Request) -> int:
    hit = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, request.num_tokens - hit.num_tokens, hit)
    request.num_computed_tokens = request.num_tokens
    kv.commit(request)
    return hit.num_tokens


def test_a_salt_keeps_prefixes_apart():
    kv = KVCacheManager(ONE_GROUP, 20)
    tokens = list(range(13))
    assert admit(kv, new_request("a", tokens)) == 0
    assert admit(kv, new_request("b", tokens)) == 12
    assert admit(kv, new_request("c", tokens, salt="other tenant")) == 0


def test_a_digest_collision_is_no_hit(monkeypatch):
    kv = KVCacheManager(ONE_GROUP, 20)
    monkeypatch.setattr("hashlib.sha256", lambda data: type("Same", (), {"digest": lambda self: b"same"})())
    admit(kv, new_request("a", [1] * 5))
    assert admit(kv, new_request("b", [2] * 5)) == 0


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head():
    kv = KVCacheManager(ONE_GROUP, 6)
    old, new = new_request("old", [1] * 12), new_request("new", [2] * 12)
    for request in (old, new):
        admit(kv, request)
        kv.free(request.request_id)
    admit(kv, new_request("other", [3] * 8))  # takes 2 of the 6 blocks
    again = kv.get_computed_blocks(new_request("old again", [1] * 13))
    assert again.num_tokens == 4
    assert kv.get_computed_blocks(new_request("new again", [2] * 13)).num_tokens == 12


def test_a_refused_allocation_changes_nothing():
    kv = KVCacheManager(ONE_GROUP, 3)
    request = new_request("a", [1] * 8)
    admit(kv, request)
    request.token_ids += [1] * 5
    before = kv.block_ids("a")
    assert not kv.allocate_slots(request, 5)
    assert kv.block_ids("a") == before
    assert kv.pool.num_free_blocks == 1
    kv.check_integrity()


def test_the_pool_notices_a_lost_reference():
    kv = KVCacheManager(ONE_GROUP, 3)
    admit(kv, new_request("a", [1] * 8))
    kv.pool.blocks[0].ref_count += 1
    with pytest.raises(AssertionError, match="block 0"):
        kv.check_integrity()


def test_window_blocks_are_given_back():
    kv = KVCacheManager(WINDOW_ALONE, 20)
    request = new_request("a", [1])
    admit(kv, request)
    most = 0
    for _ in range(60):
        request.token_ids.append(1)
        assert kv.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        kv.commit(request)
        most = max(most, kv.pool.num_blocks - kv.pool.num_free_blocks)
    assert most == WINDOW_ALONE.blocks_for(61) == 4


def test_nobody_waits_for_what_was_a_hit_and_left_the_window():
    """Blocks of a hit are not being computed: who comes when they are gone computes them itself."""
    kv = KVCacheManager(WINDOW_ALONE, 8)
    prompt = [1] * 13
    admit(kv, new_request("first", prompt))
    kv.free("first")
    second = new_request("second", prompt)
    assert admit(kv, second) == 12
    for _ in range(30):
        second.token_ids.append(2)
        assert kv.allocate_slots(second, 1)
        second.num_computed_tokens += 1
        kv.commit(second)
    filler = new_request("filler", [3] * 12)
    admit(kv, filler)
    kv.free("filler")
    kv.free("none such")
    hit = kv.get_computed_blocks(new_request("third", prompt))
    assert hit.num_tokens < 12
    assert not hit.continues_soon


def test_a_fork_shares_blocks_until_it_writes():
    kv = KVCacheManager(ONE_GROUP, 10)
    parent = new_request("parent", [1] * 6)  # one full block, one with 2 of 4
    admit(kv, parent)
    child = parent.fork("child", seed=None)
    kv.fork("parent", "child")
    assert kv.block_ids("child") == kv.block_ids("parent")
    assert kv.pool.num_free_blocks == 8
    for request in (child, parent):
        request.token_ids.append(2)
        assert kv.allocate_slots(request, 1)
    (full, own), (same, copied) = kv.block_ids("parent")[0], kv.block_ids("child")[0]
    assert full == same
    assert own != copied
    # The child wrote first, so it took the copy; the parent is alone on the original by then.
    assert kv.take_block_copies() == [(own, copied)]
    assert kv.take_block_copies() == []
    kv.check_integrity()
    kv.free("parent")
    kv.check_integrity()
    kv.free("child")
    assert kv.pool.num_free_blocks == 10


def test_a_fork_that_cannot_have_its_copy_waits():
    kv = KVCacheManager(ONE_GROUP, 2)
    parent = new_request("parent", [1] * 6)
    admit(kv, parent)
    child = parent.fork("child", seed=None)
    kv.fork("parent", "child")
    child.token_ids.append(2)
    assert not kv.allocate_slots(child, 1)
    assert kv.take_block_copies() == []
    kv.free("parent")
    assert kv.allocate_slots(child, 1)  # alone on it now: nothing to copy
    assert kv.take_block_copies() == []
