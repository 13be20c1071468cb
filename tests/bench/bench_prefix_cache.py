"""Prefix hits on the Mooncake traces, through KVCacheManager alone: one request after another, no model.

Blocks are of 512 tokens as in the trace; a block's token ids are made of its hash id. The bound is a cache that never
evicts. A pool of a share of the distinct blocks is compared with LRU by request, which evicts a whole request's blocks,
with LRU by block, a request's tail first, and with one that knows what will be asked (Belady 1966).
"""

import argparse
import heapq
from collections import Counter, OrderedDict

import bench_report
from bench_report import Report, percent
from bench_simulation import one_group

from llmq.profiles.load.arrivals import MOONCAKE_BLOCK_TOKENS, read_trace
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.request import EngineRequest, Request
from llmq.runtime.sampling_params import SamplingParams

TRACES = ("conversation", "synthetic")
SHARES = (1.0, 0.1, 0.01)
BLOCK = MOONCAKE_BLOCK_TOKENS


def measure(arguments: argparse.Namespace) -> Report:
    rows, figures = [], {}
    for name in TRACES:
        trace = read_trace(bench_report.trace_path(f"mooncake_{name}.jsonl"))[: arguments.requests]
        chains = [one.hash_ids for one in trace]
        num_distinct = len({block for chain in chains for block in chain})
        longest = max(map(len, chains))
        bound = never_evicting(chains)
        figures[name] = {"requests": len(chains), "distinct_blocks": num_distinct, "bound": bound, "pools": {}}
        for share in SHARES:
            # A pool must hold the longest request at least, or that could not run.
            num_blocks = max(round(num_distinct * share), longest)
            rates = {
                "ours": hit_rate(chains, num_blocks),
                "lru_by_request": lru_by_request(chains, num_blocks),
                "lru_by_block": lru_by_block(chains, num_blocks),
                "foresight": farthest_next_use(chains, num_blocks),
            }
            figures[name]["pools"][str(share)] = {"blocks": num_blocks, **rates}
            rows.append([name, percent(share), num_blocks, percent(bound), *map(percent, rates.values())])
    return Report(
        "Blocks found as prefix",
        ["Mooncake trace", ">pool", ">blocks", ">bound", ">llmq", ">LRU by request", ">LRU by block", ">foresight"],
        rows,
        figures,
        ["pool: share of the trace's distinct blocks; a prefix counts in whole blocks of 512 tokens"],
    )


def hit_rate(chains: list[tuple[int, ...]], num_blocks: int) -> float:
    """Share of all blocks that KVCacheManager finds, requests running one after another."""
    # One block more for the token after the prompt: a request always has one left to compute.
    kv = KVCacheManager(one_group(BLOCK), num_blocks + 1)
    hits = 0
    for number, chain in enumerate(chains):
        request = _request(str(number), chain)
        hit = kv.get_computed_blocks(request)
        hits += hit.num_tokens // BLOCK
        if not kv.allocate_slots(request, request.num_tokens - hit.num_tokens, hit):
            raise AssertionError("an idle pool has no room")
        request.num_computed_tokens = request.num_tokens
        kv.commit(request)
        kv.free(request.request_id)
    return hits / sum(map(len, chains))


def _request(request_id: str, chain: tuple[int, ...]) -> Request:
    token_ids = [block for block in chain for _ in range(BLOCK)]
    return Request(
        EngineRequest(
            request_id=request_id, prompt_token_ids=[*token_ids, 0], sampling_params=SamplingParams(max_tokens=1)
        )
    )


def never_evicting(chains: list[tuple[int, ...]]) -> float:
    seen: set[int] = set()
    hits = 0
    for chain in chains:
        hits += _prefix(chain, seen)
        seen.update(chain)
    return hits / sum(map(len, chains))


def lru_by_request(chains: list[tuple[int, ...]], num_blocks: int) -> float:
    """The cache holds whole requests; the one that came longest ago goes, with what no later one shares."""
    held: OrderedDict[int, tuple[int, ...]] = OrderedDict()
    users: Counter[int] = Counter()
    hits = 0
    for number, chain in enumerate(chains):
        hits += _prefix(chain, users)
        held[number] = chain
        users.update(chain)
        while len(users) > num_blocks:
            _, oldest = held.popitem(last=False)
            for block in oldest:
                users[block] -= 1
                if not users[block]:
                    del users[block]
    return hits / sum(map(len, chains))


def lru_by_block(chains: list[tuple[int, ...]], num_blocks: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        hits += _prefix(chain, held)
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        while len(held) > num_blocks:
            held.popitem(last=False)
    return hits / sum(map(len, chains))


def farthest_next_use(chains: list[tuple[int, ...]], num_blocks: int) -> float:
    """The block that is asked for last goes first, of equals the deepest; new blocks need not be kept."""
    next_use: list[list[float]] = []
    seen: dict[int, int] = {}
    for number in range(len(chains) - 1, -1, -1):
        next_use.append([seen.get(block, float("inf")) for block in chains[number]])
        seen.update(dict.fromkeys(chains[number], number))
    held: dict[int, float] = {}
    queue: list[tuple[float, int, int]] = []
    hits = 0
    for chain, uses in zip(chains, reversed(next_use), strict=True):
        hits += _prefix(chain, held)
        for position, (block, use) in enumerate(zip(chain, uses, strict=True)):
            held[block] = use
            heapq.heappush(queue, (-use, -position, block))
        while len(held) > num_blocks:
            use, _, block = heapq.heappop(queue)
            if held.get(block) == -use:
                del held[block]
    return hits / sum(map(len, chains))


def _prefix(chain: tuple[int, ...], cached) -> int:
    for position, block in enumerate(chain):
        if block not in cached:
            return position
    return len(chain)


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--requests", type=int, default=None, help="only the first so many of each trace")
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
