"""Engine: requests in, tokens out, one step at a time."""

import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch

from llmq.profiles.checkpoint import Checkpoint, read_checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.machine import available_memory_bytes, usable_cores
from llmq.profiles.step_cost import StepCostModel
from llmq.profiles.units import format_bytes
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes, runs_native
from llmq.runtime.executor import Executor, InProcessExecutor
from llmq.runtime.frontend.grammar import GrammarCompiler
from llmq.runtime.frontend.grammar_process import GrammarProcesses
from llmq.runtime.kernels import native
from llmq.runtime.kv_codec import TORCH_DTYPES
from llmq.runtime.kv_manager import KVCacheManager
from llmq.runtime.kv_store import KVStore
from llmq.runtime.memory import CPU_SHARE, GPU_SHARE, plan_kv_cache
from llmq.runtime.model_runner import LogitsObserver, ModelRunner
from llmq.runtime.models.loader import ModelLoader, make_loader
from llmq.runtime.pacer import Pacer
from llmq.runtime.policy import StepPolicy
from llmq.runtime.programs.base import Program
from llmq.runtime.programs.choice import make_program
from llmq.runtime.queue_clock import QueueClock
from llmq.runtime.request import EngineInfo, EngineRequest, EngineStats, RequestOutput
from llmq.runtime.sampling.grammar_mask import GrammarMask
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler import Scheduler
from llmq.runtime.scheduler_output import SchedulerOutput, StepResult
from llmq.runtime.speculative.ngram import NgramDrafter
from llmq.runtime.speculative.policy import DraftPolicy
from llmq.runtime.trial_steps import pace_of, run_trial, slo_policy_of


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
        self._pacer = pacer
        self._check_integrity = config.check_integrity
        self._seeds = random.Random(config.seed)
        self._pending: deque[tuple[SchedulerOutput, Future[StepResult]]] = deque()
        self._clock = QueueClock(clock)
        self._num_steps = self._prompt_tokens = self._generation_tokens = 0

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
        if self._pacer is not None and not self.has_unfinished_requests:
            self._pacer.rest()
        return [output for output in outputs if output is not None]

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_requests

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it brought. An empty list where there is nothing to do."""
        if not self.has_unfinished_requests:
            return []
        shed = [] if self._pacer is None else self._pacer.begin_step(self.scheduler)
        self._clock.forget(output.request_id for output in shed)
        if not self.has_unfinished_requests:
            return shed
        plan = self.scheduler.schedule()
        self._clock.schedule(new.request_id for new in plan.new_requests)
        self._pending.append((plan, self.executor.submit(plan)))
        plan, future = self._pending.popleft()
        outputs = self.scheduler.update_from_output(plan, future.result())
        if self._pacer is not None:
            self._pacer.end_step(plan, goes_on=self.has_unfinished_requests)
        self._count(plan, outputs)
        if self._check_integrity:
            self.scheduler.kv.check_integrity()
        return [*shed, *(self._clock.stamp(output) for output in outputs)]

    def observe_logits(self, observer: LogitsObserver | None) -> None:
        """Call `observer(request_id, position, logits [n, vocab_size] float32)` for the computed positions of requests
        that ask for prompt log probabilities: row i predicts position + i + 1. In this process only."""
        if not isinstance(self.executor, InProcessExecutor):
            raise InputError("logits can only be observed where the engine runs in this process")
        self.executor.runner.logits_observer = observer

    @contextmanager
    def replaced_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Compute with other numbers in some linears ([out, in], by the checkpoint's names) until the block ends.

        For linears in 16 bit, in this process, without a prefix cache: what it remembers was computed with others.
        Raises InputError for a linear that cannot be replaced.
        """
        if self.scheduler.kv.enable_prefix_caching or not isinstance(self.executor, InProcessExecutor):
            raise InputError("weights can be replaced in an engine in this process, without a prefix cache")
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

    def stats(self) -> EngineStats:
        kv = self.scheduler.kv
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
            step_spread=1.0 if self._pacer is None or self._pacer.slo is None else self._pacer.slo.spread,
            draft_tokens=self.scheduler.num_draft_tokens,
            accepted_draft_tokens=self.scheduler.num_accepted_tokens,
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
    checkpoint = read_checkpoint(Path(config.model))
    architecture = checkpoint.architecture
    device = _device(config.device)
    if config.memory_utilization is not None and device.type != "cuda":
        raise InputError("--gpu-memory-utilization: the engine runs on a CPU here; say --kv-cache-memory instead")
    if config.threads is not None:
        if config.threads > (most := 8 * usable_cores()):
            raise InputError(f"--threads {config.threads}: this process may use {usable_cores()} cores; at most {most}")
        torch.set_num_threads(config.threads)
    dtypes = Dtypes.of(architecture.dtype, checkpoint.quantization, config)
    is_native = runs_native(config.kernels, dtypes.dtype, device.type)
    if is_native:
        native.set_num_threads(config.threads or usable_cores())
    loader = make_loader(  # refuses what it cannot run, reads no weight
        checkpoint, TORCH_DTYPES[dtypes.dtype], device, config.batch_invariant, is_native
    )
    if config.kv_cache_memory_bytes is not None or device.type == "cpu":
        spare = available_memory_bytes() - checkpoint.held_bytes(dtypes.float_bytes)
        if device.type == "cpu" and (config.kv_cache_memory_bytes or 0) > spare:
            raise InputError(
                f"--kv-cache-memory {format_bytes(config.kv_cache_memory_bytes)}: beside the weights "
                f"{format_bytes(max(0, spare))} are free here"
            )
        plan = plan_kv_cache(architecture, config, dtypes, int(spare * CPU_SHARE))
    max_positions = config.max_model_len or architecture.max_position_embeddings
    static_scales = loader.kv_scales() if dtypes.has_static_kv_scales else None
    model = loader.load(max_positions)
    if config.kv_cache_memory_bytes is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = config.memory_utilization or GPU_SHARE
        plan = plan_kv_cache(architecture, config, dtypes, free - int(total * (1 - share)))

    eos = _eos_token_ids(checkpoint)
    kv = KVCacheManager(plan.layout, plan.num_blocks, config.enable_prefix_caching)
    policy = StepPolicy(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)
    store = KVStore(plan.layout, plan.num_blocks, device, static_scales)
    grammar_mask = GrammarMask(
        partial(GrammarCompiler.from_folder, config.model, architecture.vocab_size, eos),
        GrammarProcesses(config.model, architecture.vocab_size, eos),
    )
    group_size = architecture.num_attention_heads // architecture.num_kv_heads
    program = make_program(model, store, TORCH_DTYPES[dtypes.dtype], group_size, config.batch_invariant, is_native)
    speculation = config.speculation
    drafter = None if speculation is None else NgramDrafter()
    runner = ModelRunner(program, store, Sampler(eos, grammar_mask), device, drafter)
    executor = InProcessExecutor(runner)
    pacer = slo_policy = draft_policy = pace = None
    if config.slo is not None or (speculation is not None and speculation.adaptive):
        trial = run_trial(executor, plan, architecture.vocab_size, policy)
        step_costs = StepCostModel(trial.cost)
        if config.slo is not None:
            slo_policy = slo_policy_of(config.slo, policy, trial, step_costs)
            pace = pace_of(slo_policy, trial, plan.max_model_len)
        if speculation is not None:
            draft_policy = DraftPolicy(speculation.num_tokens, step_costs)
        pacer = Pacer(step_costs, policy, time.monotonic, slo=slo_policy, drafts=draft_policy)
    elif speculation is not None:
        policy = msgspec.structs.replace(policy, num_draft_tokens=speculation.num_tokens)
    info = EngineInfo(
        model=config.model,
        vocab_size=architecture.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=sorted(eos),
        num_blocks=plan.num_blocks,
        block_tokens=config.block_tokens,
        num_kv_groups=len(plan.layout.groups),
        kv_cache_bytes=plan.kv_cache_bytes,
        weight_bytes=model.num_bytes,
        device=str(device),
        fingerprint=_fingerprint(checkpoint, loader, program, dtypes, device),
        pace=pace,
    )
    scheduler = Scheduler(kv, policy, eos, plan.max_model_len)
    return Engine(scheduler, executor, info, config, pacer=pacer)


def _fingerprint(
    checkpoint: Checkpoint, loader: ModelLoader, program: Program, dtypes: Dtypes, device: torch.device
) -> dict[str, str]:
    """What decides the numbers that come out: two engines with equal fingerprints and weights compute alike."""
    tied = checkpoint.architecture.tie_word_embeddings
    return {
        "model_code": loader.implementation,
        "weights": ", ".join(f"{count} × {scheme}" for scheme, count in sorted(loader.schemes.items())),
        "program": program.name,
        "linear_kernels": ", ".join(sorted(program.model.kernels)),
        "attention_kernel": program.attention_kernel,
        "rope": ", ".join(sorted(program.model.rotations)),
        "dtype": dtypes.dtype,
        "kv_dtype": f"{dtypes.kv_dtype}{', static scales' if dtypes.has_static_kv_scales else ''}",
        "head": f"{dtypes.dtype}{', tied' if tied else ''}",
        "device": device.type,
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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here (use --device cpu)")
    return torch.device(name)
