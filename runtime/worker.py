"""Worker: one rank of an engine, or all of it: weights, KV blocks, and the runner over them."""

from collections.abc import Mapping
from pathlib import Path

import torch

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.machine import available_memory_bytes, usable_cores
from llmq.profiles.units import format_bytes
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes, native_numerics
from llmq.runtime.kernels import native
from llmq.runtime.kv_codec import TORCH_DTYPES
from llmq.runtime.kv_store import KVStore
from llmq.runtime.memory import CPU_SHARE, GPU_SHARE, KVCachePlan, plan_kv_cache, rank_layout, weight_bytes
from llmq.runtime.model_runner import ModelRunner
from llmq.runtime.models.loader import Model, make_loader
from llmq.runtime.parallel.collectives import Collectives
from llmq.runtime.programs.choice import make_program
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.speculative.drafter import Drafter


class Worker:
    def __init__(self, config: EngineConfig, collectives: Collectives | None = None) -> None:
        """Reads config and headers, and no weight. Raises InputError for what cannot run here."""
        self.config, self.collectives = config, collectives
        self.checkpoint = read_checkpoint(Path(config.model))
        self.architecture = self.checkpoint.architecture
        self.device = _device(config.device, config.tensor_parallel, 0 if collectives is None else collectives.rank)
        if config.memory_utilization is not None and self.device.type != "cuda":
            raise InputError("--gpu-memory-utilization: the engine runs on a CPU here; say --kv-cache-memory instead")
        self.dtypes = Dtypes.of(self.architecture.dtype, self.checkpoint.quantization, config)
        self.numerics = native_numerics(self.checkpoint, config, self.dtypes, self.device.type)
        self._set_threads()
        self.loader = make_loader(
            self.checkpoint,
            TORCH_DTYPES[self.dtypes.dtype],
            self.device,
            config.batch_invariant,
            self.numerics,
            collectives,
        )
        self.model: Model | None = None
        self._static_scales: Mapping[int, tuple[float, float]] | None = None

    def plan_early(self) -> KVCachePlan | None:
        """The KV-cache of each rank, before any weight is read; None where it is what they leave free on a GPU."""
        asked, ranks = self.config.kv_cache_memory_bytes, self.config.tensor_parallel
        if asked is None and self.device.type == "cuda":
            return None
        spare = available_memory_bytes() - weight_bytes(self.checkpoint, self.dtypes, self.numerics)
        if self.device.type == "cpu" and ranks * (asked or 0) > spare:
            each = "" if ranks == 1 else f" for each of {ranks} ranks"
            raise InputError(
                f"--kv-cache-memory {format_bytes(asked)}{each}: beside the weights "
                f"{format_bytes(max(0, spare))} are free here"
            )
        return self.plan(int(spare * CPU_SHARE) // ranks)

    def plan(self, available_bytes: int) -> KVCachePlan:
        return plan_kv_cache(self.architecture, self.config, self.dtypes, available_bytes)

    def load(self) -> None:
        """Read this rank's weights."""
        max_positions = self.config.max_model_len or self.architecture.max_position_embeddings
        if self.dtypes.has_static_kv_scales:
            self._static_scales = self.loader.kv_scales()
        self.model = self.loader.load(max_positions)

    @property
    def spare_bytes(self) -> int:
        """What a GPU has left for the KV-cache once the weights are in; 0 on a CPU, where that was planned before."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return free - int(total * (1 - (self.config.memory_utilization or GPU_SHARE)))

    def make_runner(
        self, num_blocks: int, sampler: Sampler | None = None, drafter: Drafter | None = None
    ) -> ModelRunner:
        """Allocate the KV blocks. The first rank samples, and guesses."""
        layout = rank_layout(self.architecture, self.config, self.dtypes)
        store = KVStore(layout, num_blocks, self.device, self._static_scales)
        program = make_program(
            self.model,
            store,
            TORCH_DTYPES[self.dtypes.dtype],
            self.architecture.num_attention_heads // self.config.tensor_parallel // layout.groups[0].spec.num_kv_heads,
            self.config.batch_invariant,
            self.numerics is not None,
        )
        return ModelRunner(program, store, sampler, self.device, drafter, is_alone=self.collectives is None)

    def _set_threads(self) -> None:
        threads, ranks = self.config.threads, self.config.tensor_parallel
        if threads is not None and threads > (most := 8 * usable_cores()):
            raise InputError(f"--threads {threads}: this process may use {usable_cores()} cores; at most {most}")
        each = max(1, (threads or usable_cores()) // (ranks if self.device.type == "cpu" else 1))
        if threads is not None or ranks > 1:
            torch.set_num_threads(each)
        if self.numerics is not None:
            native.set_num_threads(each)


def _device(name: str, num_ranks: int, rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here (use --device cpu)")
    if num_ranks > torch.cuda.device_count():
        raise InputError(
            f"--tp {num_ranks}: torch sees {torch.cuda.device_count()} CUDA devices here, a rank needs one"
        )
    if num_ranks == 1:
        return torch.device("cuda")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)  # NCCL and Triton take the current one
    return device
