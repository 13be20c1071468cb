"""Engine: requests in, tokens out, one step at a time."""

import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import torch

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.step_cost import StepCostModel
from llmq.runtime.config import EngineConfig
from llmq.runtime.executor import Executor, InProcessExecutor, PendingStep
from llmq.runtime.frontend.grammar import GrammarCompiler
from llmq.runtime.frontend.grammar_process import GrammarProcesses
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.memory import MemoryProfile
from llmq.runtime.model_runner import LogitsObserver
from llmq.runtime.pacer import Pacer
from llmq.runtime.parallel.executor import RankExecutor
from llmq.runtime.parallel.messages import Loaded
from llmq.runtime.parallel.rank import Rank
from llmq.runtime.policy import StepPolicy
from llmq.runtime.programs.base import Program
from llmq.runtime.queue_clock import QueueClock
from llmq.runtime.request import EngineInfo, EngineRequest, EngineStats, RequestOutput
from llmq.runtime.sampling.grammar_mask import GrammarMask
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import DraftTerms, SchedulerOutput, StepResult
from llmq.runtime.speculative.policy import DraftPolicy
from llmq.runtime.trial_steps import pace_of, run_trial, slo_policy_of
from llmq.runtime.worker import Worker


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        config: EngineConfig,
        *,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pacer` sets the scheduler's numbers before each step. `clock`: that of requests' `arrival_time_s`."""
        self.scheduler = scheduler
        self.executor = executor
        self.info = info
        self.pacer = pacer
        self._check_integrity = config.check_integrity
        self._seeds = random.Random(config.seed)
        self._pending: deque[tuple[SchedulerOutput, PendingStep]] = deque()  # in flight, the oldest first
        self._clock = QueueClock(clock)
        self._num_steps = self._prompt_tokens = self._generation_tokens = 0
        self._draft_s = 0.0

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """Load the model and allocate the KV-cache. Raises InputError, before any weight is read where possible."""
        return _build(config)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request whose fields the frontend has checked. Raises ValueError where it cannot run here."""
        num_prompt_tokens, params = len(request.prompt_token_ids), request.sampling_params
        if not num_prompt_tokens:
            raise ValueError("the prompt has no token")
        if num_prompt_tokens + min(params.max_tokens, 1) > self.info.max_model_len:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and a new one exceed the {self.info.max_model_len} of this engine"
            )
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self.info.vocab_size:
            raise ValueError(f"a prompt token id is outside 0 … {self.info.vocab_size - 1}")
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise ValueError("max_tokens 0 without prompt_logprobs asks for nothing")
        if request.forks and params.max_tokens == 0:
            raise ValueError("forks of a request that generates nothing")
        if params.seed is None:
            # Drawn once, here: sampling is then a function of (seed, position), also after a preemption.
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, sampling_params=params)
        if request.beams is not None:
            request = msgspec.structs.replace(request, sampling_params=_beam_params(request))
        elif request.forks:
            forks = [(name, self._seeds.getrandbits(63) if seed is None else seed) for name, seed in request.forks]
            request = msgspec.structs.replace(request, forks=forks)
        self.scheduler.add_request(request)
        self._clock.arrive(request)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now, their blocks freed at once. Unknown ids are passed over: they may just have finished."""
        request_ids = list(request_ids)
        self._clock.forget(request_ids)
        outputs = [self.scheduler.abort(request_id) for request_id in request_ids]
        if self.pacer is not None and not self.has_unfinished_requests:
            self.pacer.rest()
        return [output for output in outputs if output is not None]

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_requests

    def step(self) -> list[RequestOutput]:
        """Start as many steps as may be in flight, wait for the oldest and return what it brought. An empty list where
        there is nothing to do."""
        if not self.has_unfinished_requests:
            return []
        shed = [] if self.pacer is None else self.pacer.begin_step(self.scheduler)
        self._clock.forget(output.request_id for output in shed)
        if not self.has_unfinished_requests:
            return shed
        while len(self._pending) < self.scheduler.depth and (plan := self.scheduler.schedule()) is not None:
            self._clock.schedule(new.request_id for new in plan.new_requests)
            self._pending.append((plan, self.executor.submit(plan)))
        plan, result, outputs = self._end_step()
        self._draft_s += result.draft_s
        if self.pacer is not None:
            self.pacer.end_step(plan, result.draft_s, goes_on=self.has_unfinished_requests)
        self._count(plan, outputs)
        while self._pending and not self.has_unfinished_requests:
            self._end_step()  # of tokens behind the last ones
        if self._check_integrity:
            self.scheduler.kv.check_integrity()
        return [*shed, *(self._clock.stamp(output) for output in outputs)]

    def _end_step(self) -> tuple[SchedulerOutput, StepResult, list[RequestOutput]]:
        """Wait for the oldest step in flight."""
        plan, pending = self._pending.popleft()
        result = pending.result()
        return plan, result, self.scheduler.update_from_output(plan, result)

    def observe_logits(self, observer: LogitsObserver | None) -> None:
        """Call `observer(request_id, position, logits [n, vocab_size] float32)` for the computed positions of requests
        that ask for prompt log probabilities: row i predicts position + i + 1."""
        self.executor.runner.logits_observer = observer

    @contextmanager
    def replaced_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Compute with other numbers in some linears ([out, in], by the checkpoint's names) until the block ends.

        For linears in 16 bit, on one rank, without a prefix cache: what it remembers was computed with others.
        Raises InputError for a linear that cannot be replaced.
        """
        if self.scheduler.kv.enable_prefix_caching or not isinstance(self.executor, InProcessExecutor):
            raise InputError("weights can be replaced in an engine of one rank, without a prefix cache")
        dense = self.executor.runner.program.model.dense_weights
        if missing := [name for name in weights if name not in dense]:
            raise InputError(f"{missing[0]} is no linear in 16 bit that llmq's own decoder runs: it cannot be replaced")
        originals = {name: dense[name].clone() for name in weights}
        try:
            for name, weight in weights.items():
                dense[name].copy_(weight)
            yield
        finally:
            for name, original in originals.items():
                dense[name].copy_(original)

    def check(self) -> None:
        """Raises the reason why this engine can go on no more, if there is one."""
        self.executor.check()

    def close(self) -> None:
        """End the processes that it has started."""
        self.executor.close()

    def stats(self) -> EngineStats:
        kv, drafter = self.scheduler.kv, self.executor.runner.drafter
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=kv.pool.num_blocks,
            num_free_blocks=kv.pool.num_free_blocks,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=kv.prefix_cache_queries,
            prefix_cache_hits=kv.prefix_cache_hits,
            num_preemptions=self.scheduler.num_preemptions,
            preempted_tokens=self.scheduler.preempted_tokens,
            num_deferrals=self.scheduler.admission.num_deferrals,
            step_max_tokens=self.scheduler.policy.max_num_batched_tokens,
            step_max_seqs=self.scheduler.policy.max_num_seqs,
            step_spread=1.0 if self.pacer is None or self.pacer.slo is None else self.pacer.slo.spread,
            draft_tokens=self.scheduler.num_draft_tokens,
            accepted_draft_tokens=self.scheduler.num_accepted_tokens,
            draft_s=self._draft_s,
            pooled_draft_tokens=0 if drafter is None else drafter.num_pooled,
        )

    def _count(self, plan: SchedulerOutput, outputs: list[RequestOutput]) -> None:
        self._num_steps += 1
        generated = sum(len(output.new_token_ids) for output in outputs)
        self._generation_tokens += generated
        self._prompt_tokens += plan.num_prompt_tokens


def _beam_params(request: EngineRequest) -> SamplingParams:
    """What each beam asks of a step: its likeliest tokens. Raises ValueError for what a search cannot honour."""
    params, width = request.sampling_params, request.beams.width
    if 1 + len(request.forks) > width:
        raise ValueError(f"{1 + len(request.forks)} hypotheses are asked of {width} beams")
    kept = ("max_tokens", "stop_token_ids", "ignore_eos", "seed")
    plain = SamplingParams(**{name: getattr(params, name) for name in kept})
    changed = [
        name
        for name in params.__struct_fields__
        if name not in ("temperature", "logprobs") and getattr(params, name) != getattr(plain, name)
    ]
    if changed:
        raise ValueError(f"beam search does not go with {', '.join(changed)}")
    return msgspec.structs.replace(plain, temperature=0.0, logprobs=2 * width)


def _build(config: EngineConfig) -> Engine:
    rank = Rank.of(config, 0)
    worker = Worker(config, rank)  # refuses what it cannot run, reads no weight
    plan = worker.plan_early()
    vocab_size, eos = worker.architecture.vocab_size, _eos_token_ids(worker.checkpoint)
    grammar_mask = GrammarMask(
        partial(GrammarCompiler.from_folder, config.model, vocab_size, eos),
        GrammarProcesses(config.model, vocab_size, eos),
    )
    sampler, speculation = Sampler(eos, grammar_mask, worker.choose_tokens), config.speculation
    executor: Executor
    memory: MemoryProfile | None = None
    if config.num_ranks == 1:
        worker.load()
        if plan is None:
            memory = worker.profile()
            plan = worker.plan(memory.spare_bytes)
        runner = worker.make_runner(plan.num_blocks, sampler)
        executor, loaded = InProcessExecutor(runner, depth=2 if worker.overlaps_steps else 1), [worker.loaded]
    else:
        executor, plan, memory = RankExecutor.start(worker, rank, plan, sampler)
        loaded = executor.loaded
    adapts = speculation is not None and speculation.adaptive
    policy = StepPolicy(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        drafts=DraftTerms(num_tokens=0 if speculation is None else speculation.num_tokens),
        num_lookahead_tokens=worker.num_lookahead_tokens,
    )
    pacer = slo_policy = draft_policy = pace = None
    if config.slo is not None or adapts:
        drafter = executor.runner.drafter
        takes_time = drafter is not None and drafter.computes
        tried = policy if takes_time else msgspec.structs.replace(policy, drafts=DraftTerms())
        trial = run_trial(executor, plan, vocab_size, tried)
        if takes_time:
            drafter.end_trial()
        # A promise rests on whole steps, a guess on what single rows take.
        keeps = config.slo is not None
        step_costs = StepCostModel(trial.line, is_line=True) if keeps else StepCostModel(trial.cost)
        if config.slo is not None:
            slo_policy = slo_policy_of(config.slo, policy, trial, step_costs)
            pace = pace_of(slo_policy, trial, plan.max_model_len)
        if adapts:
            draft_policy = DraftPolicy(speculation.num_tokens, step_costs)
        pacer = Pacer(step_costs, policy, time.monotonic, slo=slo_policy, drafts=draft_policy)
    info = EngineInfo(
        model=config.model,
        vocab_size=vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=sorted(eos),
        num_blocks=plan.num_blocks,
        block_tokens=config.block_tokens,
        num_kv_groups=len(plan.layout.groups),
        num_ranks=config.num_ranks,
        num_stages=config.pipeline_parallel,
        kv_cache_bytes=plan.kv_cache_bytes,
        weight_bytes=sum(one.weight_bytes for one in loaded),
        packed_weights=worker.loader.packed_weights,
        packages=worker.packages,
        device=worker.device.type if config.num_ranks > 1 else str(worker.device),
        fingerprint=_fingerprint(worker, executor.runner.program, loaded[:: config.tensor_parallel]),
        pace=pace,
        drafter="" if executor.runner.drafter is None else executor.runner.drafter.name,
        memory=memory,
    )
    kv = KVCacheManager(plan.layout, plan.num_blocks, config.enable_prefix_caching)
    depth, unseen = executor.depth, worker.overlaps_steps
    scheduler = Scheduler(kv, policy, eos, plan.max_model_len, depth, unseen=unseen)
    return Engine(scheduler, executor, info, config, pacer=pacer)


def _fingerprint(worker: Worker, program: Program, stages: Sequence[Loaded]) -> dict[str, str]:
    """What decides the numbers that come out: two engines with equal fingerprints and weights compute alike. `stages`:
    by one rank of each. How many there are decides no number."""
    tied, dtypes, numerics = worker.architecture.tie_word_embeddings, worker.dtypes, worker.numerics
    head = dtypes.dtype
    if numerics is not None and numerics.int8_head:
        group_size = numerics.head_group_size(worker.architecture.hidden_size)
        head = "int8 per row" if group_size is None else f"int8 × int8 in groups of {group_size}"
    ranks, schemes = worker.rank.collectives, Counter[str]()
    for one in stages:
        schemes.update(one.schemes)
    several = {}
    if ranks is not None:
        several["tensor_parallel"] = str(ranks.num_ranks)
        if worker.device.type == "cuda":
            several["all_reduce"] = ranks.how
    return {
        "model_code": worker.loader.implementation,
        "weights": ", ".join(f"{count} × {scheme}" for scheme, count in sorted(schemes.items())),
        "program": program.name,
        "linear_kernels": ", ".join(sorted({kernel for one in stages for kernel in one.kernels})),
        "attention_kernel": program.attention_kernel,
        "rope": ", ".join(sorted({rotation for one in stages for rotation in one.rotations})),
        "dtype": dtypes.dtype,
        "kv_dtype": f"{dtypes.kv_dtype}{', static scales' if dtypes.has_static_kv_scales else ''}",
        "head": f"{head}{', tied' if tied else ''}",
        "device": worker.device.type,
        **several,
    }


def _eos_token_ids(checkpoint: Checkpoint) -> set[int]:
    """Every id that ends a text by config.json or generation_config.json (the frontend adds the tokenizer's own)."""
    generation = checkpoint.path / "generation_config.json"
    declared = [checkpoint.config.get("eos_token_id")]
    if generation.is_file():
        declared.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    return {
        token_id
        for value in declared
        for token_id in (value if isinstance(value, list) else [value])
        if isinstance(token_id, int)
    }
