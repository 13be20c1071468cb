"""StepPolicy: the numbers by which the scheduler fills a step. The scheduler itself reads no clock and no load."""

import msgspec


class StepPolicy(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    # Free blocks that must remain for each running request when another is admitted, so that those running can grow
    # by a block before anything is preempted.
    reserve_blocks_per_running: int = 1
