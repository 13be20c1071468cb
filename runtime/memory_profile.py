"""What the largest step of an engine takes of a GPU: run once before KV blocks are allocated, and measured."""

import gc
import random
from collections.abc import Callable
from typing import Protocol

import torch

from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.units import format_bytes
from llmq.runtime.memory import MemoryProfile
from llmq.runtime.model_runner import ModelRunner
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import DraftTerms, NewRequest, ScheduledRequest, SchedulerOutput


class DeviceMemory(Protocol):
    """Bytes of a device, as its driver and torch's allocator count them."""

    def total(self) -> int: ...
    def free(self) -> int: ...  # of the device, whoever has the rest
    def allocated(self) -> int: ...  # in torch's tensors
    def reserved(self) -> int: ...  # by torch's allocator: tensors, and what it keeps for the next ones
    def peak_allocated(self) -> int: ...  # since `begin_peak`
    def peak_reserved(self) -> int: ...
    def trim(self) -> None:
        """Give back what no tensor uses."""
        ...

    def begin_peak(self) -> None: ...


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def trim(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def profile_memory(
    memory: DeviceMemory,
    make_runner: Callable[[], ModelRunner],
    largest: SchedulerOutput,
    share: float,
    planned_weight_bytes: int,
) -> MemoryProfile:
    """Run the largest step over a few blocks, and count what is held then.

    make_runner: with weights that are loaded, blocks that `largest` names, and graphs captured. share: of the device,
    that an engine may take. Raises InputError where the step itself does not fit.
    """
    memory.trim()
    weights, before = memory.allocated(), memory.reserved()
    try:
        runner = make_runner()
        memory.trim()
        store_bytes = runner.store.num_bytes
        graphs = max(0, memory.reserved() - before - store_bytes)
        memory.begin_peak()
        held = memory.allocated()
        runner.execute(largest)
        runner.execute(_forgetting(largest))
        peak, reserved = memory.peak_allocated(), memory.peak_reserved()
        outside = memory.total() - memory.free() - memory.reserved()
    except torch.OutOfMemoryError:
        raise InputError(
            f"the largest step ({largest.num_scheduled_tokens} tokens of {len(largest.scheduled)} requests) does not "
            f"fit beside {format_bytes(weights)} of weights on a device of {format_bytes(memory.total())}: lower "
            "--max-num-batched-tokens or --max-num-seqs"
        ) from None
    del runner
    memory.trim()
    return MemoryProfile(
        total_bytes=memory.total(),
        share=share,
        weight_bytes=weights,
        graph_bytes=graphs,
        step_bytes=peak - held,
        slack_bytes=max(0, reserved - store_bytes - weights - graphs - (peak - held)),
        outside_bytes=outside,
        planned_weight_bytes=planned_weight_bytes,
    )


def num_profile_blocks(layout: KVCacheLayout) -> int:
    """That `largest_step` names: one for each group, since their numbers have different layouts."""
    return len(layout.groups)


def largest_step(
    layout: KVCacheLayout,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    num_drafts: int = 0,
) -> SchedulerOutput:
    """The step that takes most: the token budget spent on as many sequences as may run, at the end of prompts as long
    as they may be, with everything asked for that costs memory: scores of the prompt, log probabilities, top-p over all
    rows, and `num_drafts` guesses of each sequence that decodes.

    A sequence has the same block over and over, as many times as its length wants: what is computed means nothing.
    """
    draw = random.Random(0)
    longest = min(max_model_len, max_num_batched_tokens)
    num_long = min(max_num_seqs, -(-max_num_batched_tokens // longest))
    num_short = min(max_num_seqs - num_long, (max_num_batched_tokens - num_long) // (1 + num_drafts))
    share, more = divmod(max_num_batched_tokens - num_short * (1 + num_drafts), num_long)
    requests: list[NewRequest] = []
    items: list[ScheduledRequest] = []

    def add(num_tokens: int, num_scheduled: int, num_guessed: int) -> None:
        name, computed = f"largest step {len(items)}", num_tokens + num_guessed - num_scheduled
        scored = num_scheduled - num_guessed > 1
        params = SamplingParams(top_p=0.9, seed=len(items), logprobs=1, prompt_logprobs=1 if scored else None)
        requests.append(
            NewRequest(
                request_id=name,
                token_ids=[draw.randrange(vocab_size) for _ in range(num_tokens)],
                num_prompt_tokens=num_tokens,
                sampling_params=params,
                score_prompt=scored,
            )
        )
        slots = num_tokens + 2 * num_drafts  # those to come too
        items.append(
            ScheduledRequest(
                request_id=name,
                num_computed_tokens=computed,
                num_scheduled_tokens=num_scheduled,
                samples=True,
                first_block=(0,) * len(layout.groups),
                block_ids=tuple([block] * -(-slots // group.block_tokens) for block, group in enumerate(layout.groups)),
                draft_token_ids=[draw.randrange(vocab_size) for _ in range(num_guessed)],
                max_draft_tokens=num_guessed,
            )
        )

    for index in range(num_long):
        add(max_model_len, min(longest, share + (index < more)), 0)
    for _ in range(num_short):
        add(1, 1 + num_drafts, num_drafts)
    num_tokens = sum(item.num_scheduled_tokens for item in items)
    return _step(0, requests, items, [], num_tokens, DraftTerms(num_tokens=num_drafts))


def _forgetting(plan: SchedulerOutput) -> SchedulerOutput:
    return _step(plan.step + 1, [], [], [new.request_id for new in plan.new_requests], 0, DraftTerms())


def _step(
    number: int,
    requests: list[NewRequest],
    items: list[ScheduledRequest],
    forgotten: list[str],
    num_tokens: int,
    drafts: DraftTerms,
) -> SchedulerOutput:
    return SchedulerOutput(
        step=number,
        new_requests=requests,
        scheduled=items,
        forgotten_request_ids=forgotten,
        block_copies=[],
        num_scheduled_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        drafts=drafts,
    )
