"""BatchInputs: a step as tensors, built from the runner's own state of each request."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.kv_store import Slots
from llmq.runtime.sampling.draws import Draws
from llmq.runtime.scheduler_output import NewRequest, ScheduledRequest
from llmq.runtime.staging import Staging

# In the place of a token that was sampled and is still on the device.
UNKNOWN = -1


class RunnerRequest:
    """What the runner keeps of a request between steps."""

    def __init__(self, new: NewRequest, num_groups: int) -> None:
        self.request_id = new.request_id
        self.token_ids = new.token_ids  # grows by what is sampled
        self.unknown: tuple[Draws, int] | None = None  # of an UNKNOWN last token: what drew it, and its row
        self.num_prompt_tokens = new.num_prompt_tokens
        self.params = new.sampling_params
        self.score_prompt = new.score_prompt
        self.cache_salt = new.cache_salt
        self.forks = new.forks  # until the first token is sampled
        self.grammar_state = None  # sampling.grammar_mask's, made when it is first needed
        # For a drafter: final hidden states [num_rows, hidden_size] of its last step, up to what its last token was
        # sampled from; rows that nobody reads may be unfinished.
        self.hidden: torch.Tensor | None = None
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]

    def sampled_as(self) -> "list[RunnerRequest]":
        """Itself, and its forks as they are at the first token: same tokens, their own seeds."""
        forks = []
        for _, seed in self.forks:
            fork = copy.copy(self)
            fork.params = msgspec.structs.replace(self.params, seed=seed)
            forks.append(fork)
        return [self, *forks]

    def await_token(self, draws: Draws, row: int) -> int:
        """A token was sampled, and nobody has read it yet. Its position is returned."""
        self.token_ids.append(UNKNOWN)
        self.unknown = draws, row
        return len(self.token_ids) - 1

    def learn_token(self, position: int, token_id: int) -> None:
        self.token_ids[position] = token_id
        if position == len(self.token_ids) - 1:
            self.unknown = None

    def with_drafts(self, draft_token_ids: Sequence[int]) -> "list[RunnerRequest]":
        """Itself, and as it is after the first draft, the first two, …: what the step's last rows are sampled for."""
        views = [self]
        for count in range(1, len(draft_token_ids) + 1):
            view = copy.copy(self)
            view.token_ids = [*self.token_ids, *draft_token_ids[:count]]
            views.append(view)
        return views

    def scored_positions(self, item: ScheduledRequest) -> range:
        """Positions of `item` whose logits score a prompt token: that of p is predicted at p - 1."""
        if not self.score_prompt:
            return range(0)
        start, end = item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
        return range(max(self.params.prompt_logprobs_start - 1, start), min(end, self.num_prompt_tokens - 1))

    def update_blocks(self, item: ScheduledRequest, block_tokens: Sequence[int]) -> list[int]:
        """Take the changes of the block tables, and return the new blocks that hold no token yet and that this step
        will not fill: at most one a group, since slots are taken for the step's tokens only."""
        computed, end = item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
        unfilled = []
        for blocks, new_ids, first, size in zip(
            self.block_ids, item.block_ids, item.first_block, block_tokens, strict=False
        ):
            blocks[first:] = new_ids
            unfilled += blocks[max(first, -(-computed // size), end // size) :]
        return unfilled


@dataclass(frozen=True)
class BatchInputs:
    """All tokens of a step in one row: sequence i owns query_start_loc[i] : query_start_loc[i + 1]."""

    token_ids: torch.Tensor  # [num_tokens], int64
    positions: torch.Tensor  # [num_tokens], int64
    query_start_loc: list[int]
    attention: tuple[AttentionMetadata, ...]  # one per KV-cache group
    group_of_layer: list[int]
    # Rows whose hidden states are read after the last layer; None: all. A forward may leave the others unfinished.
    output_rows: torch.Tensor | None = None
    features: torch.Tensor | None = None  # [num_tokens, hidden_size] beside the tokens, for EAGLE's layer
    hidden: torch.Tensor | None = None  # [num_tokens, hidden_size] in place of tokens: what the stage before made

    @classmethod
    def build(
        cls,
        items: Sequence[ScheduledRequest],
        requests: Sequence[RunnerRequest],
        layout: KVCacheLayout,
        staging: Staging,
    ) -> "BatchInputs":
        spans = []
        for item, request in zip(items, requests, strict=True):
            start, end = item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
            token_ids = request.token_ids[start:end]
            if item.draft_token_ids:
                token_ids = [*token_ids, *item.draft_token_ids]
            if len(token_ids) != item.num_scheduled_tokens:  # its last step has failed, which nobody has read
                raise ValueError(f"{request.request_id} has {len(request.token_ids)} tokens, and {end} are to be known")
            spans.append((start, token_ids))
        unknown = _unknown_tokens(spans, requests)
        others = [*itertools.chain.from_iterable(unknown.values())]
        output_rows = _output_rows(items, requests)
        if output_rows is not None:
            others.append(output_rows)
        made, sent = cls._sent(spans, [request.block_ids for request in requests], layout, staging, others)
        for draws in unknown:
            places, rows = sent.pop(0), sent.pop(0)
            made.token_ids[places] = draws.token_ids[rows]
        return replace(made, output_rows=sent.pop(0)) if sent else made

    @classmethod
    def of_spans(
        cls,
        spans: Sequence[tuple[int, Sequence[int]]],
        block_ids: Sequence[Sequence[list[int]]],
        layout: KVCacheLayout,
        staging: Staging,
    ) -> "BatchInputs":
        """For each sequence tokens from a position on, and its block table in each group."""
        return cls._sent(spans, block_ids, layout, staging, [])[0]

    @classmethod
    def _sent(
        cls,
        spans: Sequence[tuple[int, Sequence[int]]],
        block_ids: Sequence[Sequence[list[int]]],
        layout: KVCacheLayout,
        staging: Staging,
        others: Sequence[np.ndarray],
    ) -> tuple["BatchInputs", list[torch.Tensor]]:
        """`of_spans`, and what else goes to the device with it."""
        counts = [len(token_ids) for _, token_ids in spans]
        query_start_loc = list(itertools.accumulate(counts, initial=0))
        num_tokens, owners = query_start_loc[-1], np.repeat(np.arange(len(spans)), counts)
        scheduled = itertools.chain.from_iterable(token_ids for _, token_ids in spans)
        token_ids = np.fromiter(scheduled, dtype=np.int64, count=num_tokens)
        behind = np.array([start - row for (start, _), row in zip(spans, query_start_loc, strict=False)])
        positions = np.arange(num_tokens) + behind[owners]
        arrays = [token_ids, positions]
        for index, group in enumerate(layout.groups):
            table = _block_table([tables[index] for tables in block_ids])
            arrays += [table, table[owners, positions // group.block_tokens], positions % group.block_tokens]
        sent = staging.send([*arrays, *others])
        tables = zip(*(sent[first : len(arrays) : 3] for first in (2, 3, 4)), strict=True)
        made = cls(
            token_ids=sent[0],
            positions=sent[1],
            query_start_loc=query_start_loc,
            attention=tuple(
                AttentionMetadata(
                    query_start_loc=query_start_loc,
                    seq_lens=[start + count for (start, _), count in zip(spans, counts, strict=True)],
                    block_table=table,
                    slots=Slots(blocks, offsets),
                    block_tokens=group.block_tokens,
                    window=group.spec.window,
                )
                for group, (table, blocks, offsets) in zip(layout.groups, tables, strict=True)
            ),
            group_of_layer=layout.group_of_layer,
        )
        return made, sent[len(arrays) :]


def _unknown_tokens(
    spans: Sequence[tuple[int, Sequence[int]]], requests: Sequence[RunnerRequest]
) -> dict[Draws, tuple[np.ndarray, np.ndarray]]:
    """Where a step has tokens that are still on the device: by what drew them, their places in the step and rows. Each
    is the last one of its request, and the last one that the step has of it."""
    found: dict[Draws, tuple[list[int], list[int]]] = {}
    ends = itertools.accumulate(len(token_ids) for _, token_ids in spans)
    for (_, token_ids), request, end in zip(spans, requests, ends, strict=True):
        if request.unknown is not None and token_ids[-1] == UNKNOWN:
            draws, row = request.unknown
            places, rows = found.setdefault(draws, ([], []))
            places.append(end - 1)
            rows.append(row)
    return {
        draws: (np.array(places, dtype=np.int64), np.array(rows, dtype=np.int64))
        for draws, (places, rows) in found.items()
    }


def _output_rows(
    items: Sequence[ScheduledRequest],
    requests: Sequence[RunnerRequest],
) -> np.ndarray | None:
    """The rows that score a prompt token or from which a token is sampled, in order; None where that is all of them."""
    rows: list[int] = []
    end = 0
    for item, request in zip(items, requests, strict=True):
        begin, end = end, end + item.num_scheduled_tokens
        rows += [begin + position - item.num_computed_tokens for position in request.scored_positions(item)]
        if item.samples:
            rows += range(end - 1 - len(item.draft_token_ids), end)
    return None if len(rows) == end else np.array(rows, dtype=np.int64)


def _block_table(rows: list[list[int]]) -> np.ndarray:
    """[num_seqs, longest], int64, each row padded with its own last block: what is read behind a mask must be finite,
    and another request's block may not be."""
    table = np.empty((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
        table[index, len(row) :] = row[-1]
    return table
