"""Worker: one rank of an engine, or all of it: weights, KV blocks, and the runner over them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.families import FAMILIES
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.machine import available_memory_bytes, usable_cores
from llmq.profiles.units import format_bytes
from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.attention.flashinfer import choose_flashinfer
from llmq.runtime.attention.native import NativeAttention
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes, native_numerics
from llmq.runtime.kernels import native, triton_runs
from llmq.runtime.kernels.optional import FLASHINFER
from llmq.runtime.kv_codec import TORCH_DTYPES
from llmq.runtime.kv_store import KVStore
from llmq.runtime.memory import (
    CPU_SHARE,
    GPU_SHARE,
    KVCachePlan,
    MemoryProfile,
    plan_kv_cache,
    rank_layout,
    weight_bytes,
    with_drafter_layers,
)
from llmq.runtime.memory_profile import CudaMemory, DeviceMemory, largest_step, num_profile_blocks, profile_memory
from llmq.runtime.model_runner import ModelRunner
from llmq.runtime.models.decoder import Decoder
from llmq.runtime.models.loader import Model, make_loader
from llmq.runtime.parallel.messages import Loaded
from llmq.runtime.parallel.rank import Rank
from llmq.runtime.parallel.shard_plan import check_ranks
from llmq.runtime.parallel.stage_plan import PipelineBytes, check_pipeline, stages_of
from llmq.runtime.programs.base import Program
from llmq.runtime.programs.choice import make_program
from llmq.runtime.programs.stage import StageProgram
from llmq.runtime.sampling.on_cpu import draw_on_cpu
from llmq.runtime.sampling.sampler import Choose, Sampler
from llmq.runtime.scheduler_output import DraftPass
from llmq.runtime.speculative.draft_pass import DraftPasses
from llmq.runtime.speculative.drafter import Drafter
from llmq.runtime.speculative.eagle import EagleLoader, EagleModel
from llmq.runtime.speculative.eagle_drafter import EagleDrafter
from llmq.runtime.speculative.guesses import Guesser
from llmq.runtime.speculative.medusa import MedusaDrafter, MedusaHead, load_heads
from llmq.runtime.speculative.model_drafter import FirstLayersDrafter, ModelDrafter
from llmq.runtime.speculative.ngram import LONGEST, SHORTEST, NgramDrafter
from llmq.runtime.speculative.text_pool import TextPool
from llmq.runtime.speculative.vocabulary import check_vocabulary


class Worker:
    def __init__(self, config: EngineConfig, rank: Rank | None = None) -> None:
        """Reads config and headers, and no weight. Raises InputError for what cannot run here."""
        check_pipeline(config)
        self.config, self.rank = config, rank or Rank.of(config, 0)
        self.checkpoint = read_checkpoint(Path(config.model))
        self.architecture = self.checkpoint.architecture
        self.stages = stages_of(self.checkpoint, config.pipeline_parallel)
        self.stage = self.stages[0 if self.rank.link is None else self.rank.link.stage]
        self.device = _device(config, self.rank.number)
        if config.overlap_steps and config.why_no_overlap is not None:
            raise InputError(f"--overlap-steps: {config.why_no_overlap}; leave one of them out")
        if config.memory_utilization is not None and self.device.type != "cuda":
            raise InputError("--gpu-memory-utilization: the engine runs on a CPU here; say --kv-cache-memory instead")
        if config.enforce_eager and self.device.type != "cuda":
            raise InputError(
                "--enforce-eager: the engine runs on a CPU here, where there are no CUDA graphs to leave out"
            )
        self.dtypes = Dtypes.of(self.architecture.dtype, self.checkpoint.quantization, config)
        self.numerics = native_numerics(self.checkpoint, config, self.dtypes, self.device.type)
        self._set_threads()
        self.loader = make_loader(
            self.checkpoint,
            TORCH_DTYPES[self.dtypes.dtype],
            self.device,
            config.batch_invariant,
            self.numerics,
            self.rank.collectives,
            stage=self.stage,
        )
        self.drafter = DraftWorker.of(self)
        self._check_draft_layers()
        self.cached = with_drafter_layers(self.architecture, self.drafter and self.drafter.architecture)
        self.model: Model | None = None
        self.packages: list[str] = []  # of others' kernels, which were picked and why not: for people
        self._medusa_heads: list[MedusaHead] = []
        self._static_scales: Mapping[int, tuple[float, float]] | None = None

    @property
    def overlaps_steps(self) -> bool:
        """The next step is scheduled while one is computed: of use where a device computes beside the host."""
        if self.config.overlap_steps is None:
            return self.device.type == "cuda" and self.config.why_no_overlap is None
        return self.config.overlap_steps

    def plan_early(self) -> KVCachePlan | None:
        """The KV-cache of each rank, before any weight is read; None where it is what they leave free on a GPU."""
        asked, ranks = self.config.kv_cache_memory_bytes, self.config.num_ranks
        if asked is None and self.device.type == "cuda":
            return None
        spare = available_memory_bytes() - self._planned_weight_bytes
        if self.device.type == "cpu" and ranks * (asked or 0) > spare:
            each = "" if ranks == 1 else f" for each of {ranks} ranks"
            raise InputError(
                f"--kv-cache-memory {format_bytes(asked)}{each}: beside the weights "
                f"{format_bytes(max(0, spare))} are free here"
            )
        return self.plan(int(spare * CPU_SHARE) // ranks)

    @property
    def _planned_weight_bytes(self) -> int:
        """Of all ranks, before any weight is read."""
        of_drafter = 0
        if self.drafter is not None:
            of_drafter = weight_bytes(self.drafter.checkpoint, self.dtypes, self.drafter.numerics)
        return weight_bytes(self.checkpoint, self.dtypes, self.numerics) + of_drafter

    @property
    def _planned_rank_bytes(self) -> int:
        """Of them on this rank, as `kv-budget` has it."""
        total = self._planned_weight_bytes
        if self.stage.num_stages > 1:
            total = PipelineBytes.of(self.checkpoint, self.dtypes.float_bytes).of_stage(self.stage)
        return -(-total // self.config.tensor_parallel)

    @property
    def _is_first(self) -> bool:
        return self.rank.number == 0

    def plan(self, available_bytes: int) -> KVCachePlan:
        return plan_kv_cache(self.cached, self.config, self.dtypes, available_bytes, self.stages)

    def plan_by(self, profiles: Sequence[MemoryProfile]) -> tuple[KVCachePlan, MemoryProfile]:
        """By what each rank has left, in order: whose blocks are the fewest decides, and is returned."""
        layouts = [rank_layout(self.cached, self.config, self.dtypes, stage) for stage in reversed(self.stages)]
        held = [
            layouts[rank // self.config.tensor_parallel].num_blocks(profile.spare_bytes)
            for rank, profile in enumerate(profiles)
        ]
        plan = self.plan(min(held) * max(layout.block_bytes for layout in layouts))
        return plan, profiles[held.index(min(held))]

    def load(self) -> None:
        """Read this rank's weights."""
        if self.dtypes.has_static_kv_scales:
            self._static_scales = self.loader.kv_scales()
        self.model = self.loader.load(self.max_positions)
        self._use_packages()
        if self.drafter is not None:
            self.drafter.load(self.model, self.max_positions)
        if self._is_first and (speculation := self.config.speculation) is not None and speculation.method == "medusa":
            sizes = self.architecture.hidden_size, self.architecture.vocab_size
            dtype = TORCH_DTYPES[self.dtypes.dtype]
            self._medusa_heads = load_heads(Path(speculation.draft_model), *sizes, dtype, self.device)

    def _use_packages(self) -> None:
        """Others' kernels for the loaded linears, on a GPU where nothing else is asked for."""
        if self.device.type != "cuda" or self.config.kernels != "auto" or self.config.batch_invariant:
            return
        if not isinstance(self.model, Decoder) or not triton_runs(self.device.type):
            return
        from llmq.runtime.layers.humming_linear import use_humming  # here: triton is not on every machine

        capability = torch.cuda.get_device_capability(self.device)
        self.packages.append(use_humming(self.model, TORCH_DTYPES[self.dtypes.dtype], capability=capability))

    @property
    def max_positions(self) -> int:
        return self.config.max_model_len or self.architecture.max_position_embeddings

    @property
    def weight_bytes(self) -> int:
        """Of all weights in memory."""
        heads = sum(head.num_bytes for head in self._medusa_heads)
        return self.model.num_bytes + heads + (0 if self.drafter is None else self.drafter.model.num_bytes)

    @property
    def loaded(self) -> Loaded:
        """What this rank has read."""
        kernels, rotations = sorted(self.model.kernels), sorted(self.model.rotations)
        return Loaded(self.weight_bytes, self.loader.schemes, kernels, rotations)

    @property
    def choose_tokens(self) -> Choose | None:
        """What draws tokens on this device, in place of torch."""
        if self.numerics is None:
            return None
        if triton_runs(self.device.type):
            from llmq.runtime.sampling.on_device import DrawOnDevice  # here: triton is not on every machine

            return DrawOnDevice(self.device)
        return draw_on_cpu if native is not None and self.device.type == "cpu" else None

    def profile(self, memory: DeviceMemory | None = None) -> MemoryProfile:
        """What this rank's device has left for the KV-cache, by running the largest step: on all ranks at once, which
        then have met. Raises InputError where it does not fit, or no request would."""
        memory = memory or CudaMemory(self.device)
        config, share = self.config, self.config.memory_utilization or GPU_SHARE
        memory.trim()
        at_most = self.plan(int(memory.total() * share) - memory.allocated())
        layout = at_most.layout
        largest = largest_step(
            layout,
            # Ranks have unequal memory, and have to run the same step.
            max_model_len=self.max_positions if config.num_ranks > 1 else at_most.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=self.architecture.vocab_size,
            num_drafts=0 if config.speculation is None else config.speculation.num_tokens,
        )
        sampler = Sampler((), choose=self.choose_tokens) if self._is_first else None
        # Not alone: what does not fit is an error here, and nothing to try again by halves.
        make_runner = partial(self.make_runner, num_profile_blocks(layout), sampler, is_alone=False)
        return profile_memory(memory, make_runner, largest, share, self._planned_rank_bytes)

    def make_runner(
        self,
        num_blocks: int,
        sampler: Sampler | None = None,
        *,
        is_alone: bool | None = None,
        tell: Callable[[DraftPass], None] | None = None,
    ) -> ModelRunner:
        """Allocate the KV blocks. The first rank samples, and guesses: where others compute its passes too, by `tell`,
        and not without. is_alone: `ModelRunner`'s; None: one rank is."""
        layout = rank_layout(self.cached, self.config, self.dtypes, self.stage)
        store = KVStore(layout, num_blocks, self.device, self._static_scales, in_tiles=self._attends_natively(layout))
        program = self._program(self.model, self.architecture, store, self._other_attention(store))
        if self.rank.link is not None:
            dtype = TORCH_DTYPES[self.dtypes.dtype]
            program = StageProgram(program, self.rank.link, self.architecture.hidden_size, dtype)
        passes = self._draft_passes(program, store, tell)
        is_heard = passes is None or self.config.num_ranks == 1 or tell is not None
        drafter = self._make_drafter(passes, store, sampler) if sampler is not None and is_heard else None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what was only used while graphs were captured
        if is_alone is None:
            is_alone = self.config.num_ranks == 1
        return ModelRunner(program, store, sampler, self.device, drafter, passes=passes, is_alone=is_alone)

    def _program(
        self,
        model: Model,
        architecture: ModelArchitecture,
        store: KVStore,
        attention: AttentionBackend | None = None,
    ) -> Program:
        return make_program(
            model,
            store,
            TORCH_DTYPES[self.dtypes.dtype],
            self._group_size(architecture),
            self.config.batch_invariant,
            self.numerics,
            self._graphs(architecture),
            attention,
        )

    def _attends_natively(self, layout: KVCacheLayout) -> bool:
        """Whether `make_program` takes the native attention, or would: others read tiles too, only slower."""
        dtype = TORCH_DTYPES[self.dtypes.dtype]
        is_native = self.numerics is not None and (self.config.batch_invariant or not triton_runs(self.device.type))
        return is_native and NativeAttention.runs(layout, self.device, dtype)

    def _group_size(self, architecture: ModelArchitecture) -> int:
        """Query heads that share a KV head, on each rank."""
        ranks = self.config.tensor_parallel
        return architecture.num_attention_heads // ranks // max(1, architecture.num_kv_heads // ranks)

    def _other_attention(self, store: KVStore) -> AttentionBackend | None:
        """FlashInfer's, on a GPU where nothing else is asked for and it serves; `packages` says what came of it."""
        if self.device.type != "cuda" or self.config.kernels != "auto" or self.config.batch_invariant:
            return None
        dtype, group_size = TORCH_DTYPES[self.dtypes.dtype], self._group_size(self.architecture)
        attention, why = choose_flashinfer(store, dtype, group_size)
        said = f"{FLASHINFER.what_for} by {why}" if attention else f"no FlashInfer: {why}"
        if said not in self.packages:
            self.packages.append(said)
        return attention

    def _graphs(self, architecture: ModelArchitecture) -> tuple[int, int] | None:
        """(sequences, tokens of one) of steps that CUDA graphs replay; of several ranks none are captured."""
        if self.device.type != "cuda" or self.config.enforce_eager or self.config.num_ranks > 1:
            return None
        return self.config.max_num_seqs, self.config.max_model_len or architecture.max_position_embeddings

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots behind a request's tokens that its drafter writes to."""
        speculation = self.config.speculation
        writes = self.drafter is not None or (speculation is not None and speculation.draft_layers is not None)
        return speculation.num_tokens if writes else 0

    def _check_draft_layers(self) -> None:
        speculation, most = self.config.speculation, self.architecture.num_layers - 1
        if speculation is None or (count := speculation.draft_layers) is None:
            return
        if not 1 <= count <= most:
            raise InputError(f"--draft-layers {count}: 1 to {most} of this model's {most + 1} layers can guess for all")
        if self.architecture.family is None:
            raise InputError(
                f"--draft-layers: model_type {self.architecture.model_type!r} runs by transformers' own code, which "
                f"ends with its last layer ({', '.join(FAMILIES)} can end before)"
            )

    def _draft_passes(
        self, base: Program, store: KVStore, tell: Callable[[DraftPass], None] | None
    ) -> DraftPasses | None:
        """Of a drafter that has layers."""
        if (layers := self.config.speculation and self.config.speculation.draft_layers) is not None:
            body = self._program(self.model.first_layers(layers), self.architecture, store)
        elif self.drafter is not None:
            body = self._program(self.drafter.model, self.drafter.architecture, store)
        else:
            return None
        is_head = self.drafter is not None and self.drafter.is_head
        return DraftPasses(body, base if is_head else body, store, reads_hidden=is_head, tell=tell)

    def _make_drafter(self, passes: DraftPasses | None, store: KVStore, sampler: Sampler) -> Drafter | None:
        if self.config.speculation is None:
            return None
        guesser = Guesser(Sampler(sampler.eos_token_ids, choose=self.choose_tokens), self.architecture.vocab_size)
        if self.config.speculation.method == "medusa":
            return MedusaDrafter(self._medusa_heads, guesser)
        if (num_layers := self.config.speculation.draft_layers) is not None:
            return FirstLayersDrafter(passes, store.layout, guesser, num_layers)
        if self.drafter is None:
            most = self.config.speculation.pool_tokens
            return NgramDrafter(TextPool(most, shortest=SHORTEST, longest=LONGEST) if most else None)
        return (EagleDrafter if self.drafter.is_head else ModelDrafter)(passes, store.layout, guesser)

    def _set_threads(self) -> None:
        threads, ranks = self.config.threads, self.config.num_ranks
        if threads is not None and threads > (most := 8 * usable_cores()):
            raise InputError(f"--threads {threads}: this process may use {usable_cores()} cores; at most {most}")
        each = max(1, (threads or usable_cores()) // (ranks if self.device.type == "cpu" else 1))
        if threads is not None or ranks > 1:
            torch.set_num_threads(each)
        if self.numerics is not None and native is not None:
            native.set_num_threads(each)


class DraftWorker:
    """The smaller model that guesses: its checkpoint, and what is loaded of it."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        """Reads config and headers, and no weight. Raises InputError for what cannot guess for the worker's model."""
        config = worker.config
        if worker.dtypes.has_static_kv_scales:
            raise InputError(
                "--draft-model: this checkpoint's scales of the KV-cache are not the drafter's; say --kv-dtype bf16"
            )
        self.is_head, dtype = config.speculation.method == "eagle", TORCH_DTYPES[worker.dtypes.dtype]
        self.model: Model | EagleModel | None = None
        if not self.is_head:
            check_vocabulary(worker.checkpoint.path, folder)
        self.checkpoint = read_checkpoint(folder)
        self.architecture = self.checkpoint.architecture
        # `--head` and `--activations` are of the model: what its own weights are made for is best for a drafter.
        own = msgspec.structs.replace(config, head="auto", activations="auto")
        self.numerics = native_numerics(self.checkpoint, own, worker.dtypes, worker.device.type)
        if self.architecture.family is not None and config.tensor_parallel > 1:
            try:
                check_ranks(self.architecture, self.checkpoint.config, config.tensor_parallel)
            except InputError as error:
                raise InputError(f"--draft-model {folder}: {error}") from None
        if self.is_head:
            self.loader = EagleLoader(
                self.checkpoint,
                base=worker.checkpoint,
                dtype=dtype,
                device=worker.device,
                collectives=worker.rank.collectives,
            )
        else:
            self.loader = make_loader(
                self.checkpoint,
                dtype,
                worker.device,
                config.batch_invariant,
                self.numerics,
                worker.rank.collectives,
                first_layer=worker.architecture.num_layers,
            )

    def load(self, base: Model, max_positions: int) -> None:
        self.model = self.loader.load_head(base, max_positions) if self.is_head else self.loader.load(max_positions)

    @classmethod
    def of(cls, worker: Worker) -> "DraftWorker | None":
        speculation = worker.config.speculation
        if speculation is None or speculation.method not in ("draft", "eagle") or speculation.draft_model is None:
            return None
        return cls(worker, Path(speculation.draft_model))


def _device(config: EngineConfig, rank: int) -> torch.device:
    name, num_ranks = config.device, config.num_ranks
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here (use --device cpu)")
    if num_ranks > torch.cuda.device_count():
        asked = " ".join(f"{flag} {n}" for flag, n in config.ways.items() if n > 1)
        raise InputError(f"{asked}: torch sees {torch.cuda.device_count()} CUDA devices here, a rank needs one")
    if num_ranks == 1:
        return torch.device("cuda")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)  # NCCL and Triton take the current one
    return device
