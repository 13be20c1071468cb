"""Steps of the engine's own, timed before it serves: what a StepCostModel begins with, and what can be promised."""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from llmq.profiles.errors import InputError
from llmq.profiles.slo import Slo
from llmq.profiles.step_cost import StepCost, StepCostModel, StepShape
from llmq.runtime.executor import Executor
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.memory import KVCachePlan
from llmq.runtime.policy import SloPolicy, StepPolicy, step_shape
from llmq.runtime.request import EngineRequest, Pace
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import DraftTerms

SHORT_TOKENS = 8
CHUNKS = (16, 32, 64, 128, 128)  # of the long prompt
BATCHES = (2, 3, 4, 5, 6, 8, 12, 16)  # the long one and short ones: where kernels' tiles of rows begin and end
DECODE_STEPS = 5  # of the first alone
BATCH_STEPS = 3  # of each batch
GUESSED_BATCHES = (1, 1, 2, 4, 8, 16)  # that a drafter reads and guesses on, the first time to be set up
GUESSED_TOKENS = 2  # that it reads of each, and guesses
MOST_TOKENS = 64  # that a sequence of the trial generates: by then those that wait for its blocks have theirs
USUAL_CONTEXT = 512  # for which the number of decodes within the SLO is said


@dataclass
class Trial:
    shapes: list[StepShape] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def floor_s(self) -> float:
        """The median of the steps that were a short sequence's next token: no step has less to do."""
        return float(np.median(self.times_s[:DECODE_STEPS]))

    @property
    def cost(self) -> StepCost:
        return StepCost.fitted(self.shapes, self.times_s)

    @property
    def line(self) -> StepCost:
        return StepCost.fitted(self.shapes, self.times_s, is_line=True)


def run_trial(
    executor: Executor,
    plan: KVCachePlan,
    vocab_size: int,
    most: StepPolicy,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Time decode steps of one sequence, a prompt in chunks beside it, and decode steps of small batches, through a
    scheduler of their own over the same blocks. Where `most` has drafts a drafter guesses on some texts, and times
    itself. The executor has forgotten all of it when this returns. Raises InputError where requests may not be long
    enough for that."""
    least = SHORT_TOKENS + 2 * DECODE_STEPS
    if plan.max_model_len < least:
        raise InputError(
            f"--slo and --speculative auto time steps at the start: requests of at most {plan.max_model_len} tokens "
            f"are too short for that; allow {least}"
        )
    trial = Trial()
    scheduler = Scheduler(KVCacheManager(plan.layout, plan.num_blocks, False), most, (), plan.max_model_len)
    draw, numbers = random.Random(0), itertools.count()
    quarter = plan.num_blocks * min(group.block_tokens for group in plan.layout.groups) // 4
    longest = max(1, min(sum(CHUNKS), quarter, plan.max_model_len - BATCH_STEPS * len(BATCHES) - 1))

    def add(num_tokens: int) -> None:
        scheduler.add_request(
            EngineRequest(
                request_id=f"trial {next(numbers)}",
                prompt_token_ids=[draw.randrange(vocab_size) for _ in range(num_tokens)],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True),
            )
        )

    def step(most_tokens: int, *, is_counted: bool = True, num_drafts: int = 0) -> None:
        scheduler.policy = msgspec.structs.replace(
            most,
            max_num_batched_tokens=min(most_tokens, most.max_num_batched_tokens),
            drafts=DraftTerms(num_tokens=num_drafts),
        )
        if not scheduler.has_requests:
            return
        started_s = clock()
        planned = scheduler.schedule()
        scheduler.update_from_output(planned, executor.submit(planned).result())
        if is_counted:
            trial.shapes.append(step_shape(planned))
            trial.times_s.append(clock() - started_s)

    def abort_all() -> None:
        for request in [*scheduler.running, *scheduler.waiting]:
            scheduler.abort(request.request_id)

    add(min(SHORT_TOKENS, longest))
    step(most.max_num_batched_tokens, is_counted=False)  # it pays for what is set up once
    for _ in range(DECODE_STEPS):
        step(1)
    add(longest)
    chunks = iter(CHUNKS)
    while scheduler.waiting or any(one.num_computed_tokens < one.num_prompt_tokens for one in scheduler.running):
        step(len(scheduler.running) + next(chunks, most.max_num_batched_tokens))
    for batch in BATCHES:
        for _ in range(min(batch, most.max_num_seqs) - len(scheduler.running)):
            add(min(SHORT_TOKENS, longest))
        for _ in range(BATCH_STEPS):
            step(most.max_num_batched_tokens)
    for batch in GUESSED_BATCHES if most.drafts.num_tokens else ():
        abort_all()
        for _ in range(min(batch, most.max_num_seqs)):
            add(min(GUESSED_TOKENS, longest))
        step(most.max_num_batched_tokens, is_counted=False, num_drafts=min(GUESSED_TOKENS, most.drafts.num_tokens))
    abort_all()
    executor.submit(scheduler.schedule()).result()  # nothing but the names to forget
    return trial


def check_promise(slo: Slo, floor_s: float) -> None:
    """Raises InputError for a promise below what the machine takes for a single token."""
    for name, what in (("tpot", "a token"), ("ttft", "the first token of the shortest prompt")):
        if (limit_s := slo.limits_s.get(name)) is not None and limit_s < floor_s:
            raise InputError(
                f"--slo {name}={_ms(limit_s)}: {what} takes {_ms(floor_s)} on this machine with one request alone "
                f"(median of {DECODE_STEPS} measured steps): no batch keeps that. "
                f"Promise {name}={_ms(1.5 * floor_s)} or more"
            )


def pace_of(policy: SloPolicy, trial: Trial, max_model_len: int) -> Pace:
    context = min(USUAL_CONTEXT, max_model_len)
    return Pace(floor_s=trial.floor_s, most_decodes=policy.most_decodes(context), context=context)


def slo_policy_of(slo: Slo, most: StepPolicy, trial: Trial, model: StepCostModel | None = None) -> SloPolicy:
    """The policy that keeps `slo`, by `model` or one that begins with the trial. Raises InputError where a sequence
    alone cannot keep it."""
    check_promise(slo, trial.floor_s)
    return SloPolicy(slo, most, model or StepCostModel(trial.line, is_line=True))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}ms"
