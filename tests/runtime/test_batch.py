"""What the runner knows of a request's blocks, and which of them it has to clear."""

import pytest

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import NewRequest, ScheduledRequest

SIZE = 4


def known(num_blocks: int) -> RunnerRequest:
    new = NewRequest(
        request_id="r",
        token_ids=list(range(40)),
        num_prompt_tokens=40,
        sampling_params=SamplingParams(),
        score_prompt=False,
    )
    request = RunnerRequest(new, num_groups=1)
    request.block_ids = [[10 + number for number in range(num_blocks)]]
    return request


@pytest.mark.parametrize(
    ("computed", "scheduled", "first", "block_ids", "unfilled"),
    [
        (0, 8, 0, [1, 2], []),  # a chunk that ends on a border fills all that it takes
        (0, 10, 0, [1, 2, 3], [3]),
        (6, 7, 2, [3, 4], [4]),
        (8, 1, 2, [3], [3]),  # a decode step that starts a block
        (6, 1, 1, [9], []),  # a copy of a shared block, written on: it holds two tokens
        (6, 3, 1, [9, 3], [3]),
        (7, 1, 2, [], []),
    ],
)
def test_new_blocks_that_a_step_leaves_partly_unwritten_are_named(computed, scheduled, first, block_ids, unfilled):
    request = known(num_blocks=-(-computed // SIZE))
    item = ScheduledRequest(
        request_id="r",
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        samples=False,
        first_block=(first,),
        block_ids=(block_ids,),
    )
    assert request.update_blocks(item, [SIZE]) == unfilled
    assert request.block_ids[0][first:] == block_ids


def test_a_step_without_news_changes_nothing():
    request = known(num_blocks=3)
    item = ScheduledRequest(request_id="r", num_computed_tokens=9, num_scheduled_tokens=1, samples=True)
    assert request.update_blocks(item, [SIZE]) == []
    assert request.block_ids == [[10, 11, 12]]
