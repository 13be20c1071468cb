"""StepPolicy: the numbers by which the scheduler fills a step. The scheduler itself reads no clock and no load."""

import msgspec


class StepPolicy(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    # False is static batching: nothing is admitted before all that runs has ended. For comparison in benchmarks only.
    admit_while_running: bool = True
