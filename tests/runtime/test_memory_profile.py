"""The largest step, and what is made of the bytes that a device and torch's allocator report in it: of a real engine on
the CPU, with a device that only pretends."""

import pytest
import torch
from tiny_model import save_tiny_model

from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig, Speculation
from llmq.runtime.memory import MemoryProfile
from llmq.runtime.memory_profile import largest_step, num_profile_blocks, profile_memory
from llmq.runtime.worker import Worker

MiB = 2**20
TOTAL, CONTEXT, WEIGHTS, GRAPHS, STEP, SLACK = (n * MiB for n in (4096, 300, 1000, 50, 400, 70))


class PretendedMemory:
    """A device on which a model takes WEIGHTS, its graphs GRAPHS, and a step STEP and SLACK beside it."""

    def __init__(self, runner_bytes=0):
        self.allocated_bytes = self.reserved_bytes = WEIGHTS
        self.peaks = (0, 0)
        self.runner_bytes = runner_bytes

    def total(self):
        return TOTAL

    def free(self):
        return TOTAL - CONTEXT - self.reserved_bytes

    def allocated(self):
        return self.allocated_bytes

    def reserved(self):
        return self.reserved_bytes

    def peak_allocated(self):
        return self.peaks[0]

    def peak_reserved(self):
        return self.peaks[1]

    def trim(self):
        self.reserved_bytes = self.allocated_bytes

    def begin_peak(self):
        self.peaks = (self.allocated_bytes, self.reserved_bytes)

    def make(self, worker, num_blocks, sampler):
        """A runner whose blocks and graphs lie on this device, and whose first step takes STEP."""
        runner = worker.make_runner(num_blocks, sampler, is_alone=False)
        self.allocated_bytes += runner.store.num_bytes + GRAPHS
        self.reserved_bytes = self.allocated_bytes + 500 * MiB  # what capturing left behind
        execute = runner.execute

        def counted(plan):
            if plan.scheduled:
                self.peaks = (self.allocated_bytes + STEP, self.allocated_bytes + STEP + SLACK)
                self.reserved_bytes = self.peaks[1]
            return execute(plan)

        runner.execute = counted
        return runner


def worker_of(folder, **changes):
    fields = {"dtype": "fp32", "device": "cpu", "threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    worker = Worker(EngineConfig(model=str(folder), **(fields | changes)))
    worker.load()
    return worker


def steps_of(worker):
    """What its runner computes while it is profiled, and the profile."""
    from unittest.mock import patch

    from llmq.runtime import worker as module

    memory, seen = PretendedMemory(), []

    def profile(memory, make_runner, largest, share, planned):
        def make():
            runner = memory.make(worker, *make_runner.args)
            execute = runner.execute
            runner.execute = lambda plan: seen.append((plan, execute(plan))) or seen[-1][1]
            return runner

        return profile_memory(memory, make, largest, share, planned)

    with patch.object(module, "profile_memory", profile):
        return worker.profile(memory), seen


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("gemma3_text", {"sliding_window": 8})])
def test_a_worker_runs_its_largest_step_and_counts(tmp_path, model_type, changes):
    worker = worker_of(save_tiny_model(tmp_path, model_type, **changes))
    made, ((largest, result), (forgetting, _)) = steps_of(worker)
    assert largest.num_scheduled_tokens == 32
    assert len(largest.scheduled) == 4
    assert largest.scheduled[0].num_computed_tokens + 29 == worker.max_positions
    assert all(one.error is None and len(one.token_ids) == 1 for one in result.results.values())
    assert len(result.results["largest step 0"].prompt_logprobs) == 28  # 29 of its tokens, less the last
    assert forgetting.forgotten_request_ids == [new.request_id for new in largest.new_requests]
    assert (made.weight_bytes, made.graph_bytes, made.step_bytes) == (WEIGHTS, GRAPHS, STEP)
    assert (made.slack_bytes, made.outside_bytes) == (SLACK, CONTEXT)
    assert made.spare_bytes == int(0.9 * TOTAL) - WEIGHTS - GRAPHS - STEP - SLACK - CONTEXT
    assert made.planned_weight_bytes == pytest.approx(worker.weight_bytes, rel=0.01)
    assert made.planned_bytes == int(0.9 * TOTAL) - made.planned_weight_bytes


def test_drafts_are_verified_in_the_largest_step_and_guessed_behind_it(tiny_llama):
    speculation = Speculation(method="draft", draft_model=str(tiny_llama()), num_tokens=3)
    worker = worker_of(tiny_llama(), speculation=speculation)
    _, ((largest, result), _) = steps_of(worker)
    assert [len(item.draft_token_ids) for item in largest.scheduled] == [0, 3, 3, 3]
    assert largest.num_scheduled_tokens == 32
    assert {len(made.draft_token_ids) for made in result.results.values()} - {0}, "nothing was guessed"


@pytest.mark.parametrize(
    ("length", "seqs", "tokens", "drafts", "expected"),
    [
        (100, 4, 32, 0, [29, 1, 1, 1]),
        (100, 1, 32, 0, [32]),
        (100, 64, 8, 0, [1] * 8),
        (10, 8, 64, 0, [9, 9, 9, 9, 9, 9, 9, 1]),  # long ones of at most 10
        (10, 2, 64, 0, [10, 10]),  # less than the budget: no step can have more
        (100, 4, 12, 4, [2, 5, 5]),
        (100, 8, 6, 4, [1, 5]),
    ],
)
def test_the_largest_step_spends_the_budget(length, seqs, tokens, drafts, expected, tmp_path):
    layout = worker_layout(tmp_path)
    plan = largest_step(
        layout,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        vocab_size=50,
        num_drafts=drafts,
    )
    assert sorted(item.num_scheduled_tokens for item in plan.scheduled) == sorted(expected)
    for item, new in zip(plan.scheduled, plan.new_requests, strict=True):
        end = item.num_computed_tokens + item.num_scheduled_tokens
        assert item.num_computed_tokens >= 0
        assert end == len(new.token_ids) + len(item.draft_token_ids)
        for index, (group, blocks) in enumerate(zip(layout.groups, item.block_ids, strict=True)):
            assert set(blocks) == {index}
            assert index < num_profile_blocks(layout)
            assert len(blocks) * group.block_tokens >= end


def worker_layout(tmp_path):
    worker = Worker(EngineConfig(model=str(save_tiny_model(tmp_path, "llama")), dtype="fp32", device="cpu", threads=1))
    return worker.plan(2**30).layout


def test_a_step_that_does_not_fit_is_refused_with_what_would(tmp_path):
    memory, layout = PretendedMemory(), worker_layout(tmp_path)
    plan = largest_step(layout, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, vocab_size=50)

    def make():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InputError, match=r"32 tokens of 4 requests\) does not fit beside .* --max-num-batched-tokens"):
        profile_memory(memory, make, plan, 0.9, 0)


def test_what_was_measured_is_said():
    profile = MemoryProfile(
        total_bytes=TOTAL,
        share=0.5,
        weight_bytes=WEIGHTS,
        graph_bytes=0,
        step_bytes=STEP,
        slack_bytes=SLACK,
        outside_bytes=CONTEXT,
        planned_weight_bytes=WEIGHTS - MiB,
    )
    assert str(profile) == (
        "measured of 0.5 × 4.0 GiB: weights 1,000.0 MiB, the largest step 400.0 MiB, allocator slack 70.0 MiB, "
        "outside of torch 300.0 MiB; 278.0 MiB are left for the KV-cache (kv-budget: 1.0 GiB)"
    )
