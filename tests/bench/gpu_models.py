"""Whole models for `bench_gpu.py`: random weights made on the device, served by our engine and by transformers'.

A model is a folder of config.json and the headers of weights that lie nowhere. The engine is the one that `serve` runs
(scheduler, runner, Triton program, CUDA graphs), its loader reads and packs each linear as it would of a checkpoint in
the compressed-tensors layout; only where a tensor would be read from a file it is drawn on the device instead, by its
name, so that transformers' model has the same numbers.
"""

import gc
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_timings import Machine, NotTimedError, Peaks, Row

from llmq.profiles.checkpoint import Checkpoint
from llmq.profiles.safetensors_file import REMOTE_HEADERS
from llmq.quantize.formats.compressed_tensors import CompressedTensorsWriter
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme

NEEDED = ("msgspec", "llguidance", "tokenizers", "jinja2", "safetensors")
SCHEMES = {
    "int4": WeightScheme("int", 4, "group", 128),
    "fp8": WeightScheme("float", 8, "channel", activation=ActivationScheme("float"), layout="float-quantized"),
}
_NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ENGINE_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_NEW_TOKENS = 480  # that a decoding request may make: more than any timing takes
_PEER_S = 60.0  # after which a peer hangs
_FINITE = 0x3C  # each byte of blocks that nothing was written to: no NaN in any dtype


@dataclass(frozen=True)
class Served:
    """A workload of the engine and its peer: requests that come at once."""

    num_requests: int
    prompt: int
    new: int

    def __str__(self) -> str:
        return f"{self.num_requests} × ({self.prompt} → {self.new}) tokens"


@dataclass(frozen=True)
class ModelPlan:
    """A model's shape, and what is timed of it in each form of its weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    forms: tuple[str, ...]  # "16 bit" and of SCHEMES
    decode: tuple[tuple[int, int], ...]  # (sequences, tokens of context)
    prompt: int  # tokens of the prompt whose prefill is timed
    served: Served | None = None
    step_tokens: int = 8192

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @property
    def context(self) -> int:
        lengths = [context + _NEW_TOKENS for _, context in self.decode]
        lengths += [self.prompt + 1, *([] if self.served is None else [self.served.prompt + self.served.new])]
        return 16 * -(-max(lengths) // 16)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """[out, in] of the linears of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    @property
    def weights_of_a_token(self) -> int:
        """Numbers that one token is multiplied with."""
        return self.layers * sum(out * in_ for out, in_ in self.linears.values()) + self.vocab * self.hidden


TINY = ModelPlan(
    *("tiny", 128, 1, 4, 2, 32, 128, 128),
    forms=("16 bit", "int4", "fp8"),
    decode=((1, 20), (2, 24)),
    prompt=24,
    served=Served(2, 12, 4),
)
EIGHT = ModelPlan(
    *("8B", 4096, 32, 32, 8, 128, 14336, 128256),
    forms=("16 bit", "int4", "fp8"),
    decode=((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 32768), (16, 8192), (64, 8192)),
    prompt=8192,
    served=Served(64, 512, 128),
)
SEVENTY = ModelPlan(
    *("70B", 8192, 80, 64, 8, 128, 28672, 128256),
    forms=("int4", "fp8"),
    decode=((1, 1024), (16, 1024), (64, 1024), (1, 32768), (16, 8192)),
    prompt=2048,
)


def write_model(folder: Path, plan: ModelPlan, form: str, dtype: torch.dtype) -> Path:
    """config.json and the headers of a checkpoint's tensors, without the tensors."""
    tensors, schemes = {}, {}
    meta = partial(torch.empty, device="meta")
    for index in range(plan.layers):
        layer = f"model.layers.{index}"
        for name, shape in plan.linears.items():
            module = f"{layer}.{name}"
            if form == "16 bit":
                tensors[f"{module}.weight"] = meta(shape, dtype=dtype)
                continue
            scheme = schemes[module] = SCHEMES[form]
            values = meta(shape, dtype=torch.float8_e4m3fn)
            if form == "int4":
                values = meta(shape[0], shape[1] // 8, dtype=torch.int32)
            weight = QuantizedWeight(scheme, shape, values, meta(scheme.scale_shape(shape), dtype=dtype))
            tensors |= CompressedTensorsWriter().tensors(module, weight)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = meta(plan.hidden, dtype=dtype)
    tensors["model.norm.weight"] = meta(plan.hidden, dtype=dtype)
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = meta(plan.vocab, plan.hidden, dtype=dtype)
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    config = {**plan.config, "dtype": str(dtype).removeprefix("torch.")}
    if schemes:
        config["quantization_config"] = CompressedTensorsWriter().config(schemes, ["lm_head"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / REMOTE_HEADERS).write_text(json.dumps({"model.safetensors": header}), encoding="utf-8")
    return folder


def random_tensor(name: str, dtype: torch.dtype, shape: Sequence[int], in_features: int, device: torch.device):
    """Numbers that keep activations of about one size through any number of layers, the same for the same name."""
    of = {"device": device, "generator": torch.Generator(device).manual_seed(zlib.crc32(name.encode()))}
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, tuple(shape), dtype=dtype, **of)
    if len(shape) == 1:
        return torch.ones(tuple(shape), dtype=dtype, device=device)
    if name.endswith("_scale"):  # of integers from -8 to 7, or of normal numbers
        deviation = 1.0 if shape[1] == 1 else math.sqrt((16**2 - 1) / 12)
        return torch.full(tuple(shape), in_features**-0.5 / deviation, dtype=dtype, device=device)
    # Drawn in the dtype itself where that is a float of 16 bits or more: at 70B there is no room for another copy.
    drawn = torch.randn(tuple(shape), dtype=torch.float16 if dtype == torch.float8_e4m3fn else dtype, **of)
    return drawn.to(dtype) if dtype == torch.float8_e4m3fn else drawn.mul_(in_features**-0.5)


class RandomTensors:
    """In place of `runtime.weights.TensorReader`: the tensors that the headers declare, drawn on the device."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._infos, self._device = checkpoint.tensors, device
        self.read: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __call__(self, name: str) -> torch.Tensor:
        info = self._infos[name]
        self.read.append(name)
        module = name.rpartition(".")[0]
        packed, plain = (self._infos.get(f"{module}.{weight}") for weight in ("weight_packed", "weight"))
        shape = (packed.shape[0], 8 * packed.shape[1]) if packed is not None else plain.shape
        if name.endswith("weight_shape"):
            return torch.tensor(shape, dtype=torch.int64)
        return random_tensor(name, _DTYPES[info.dtype], info.shape, shape[-1], self._device)

    def unread(self) -> Iterator[str]:
        read = set(self.read)
        return (name for name in self._infos if name not in read)


@contextmanager
def loaded_engine(folder: Path, plan: ModelPlan, machine: Machine) -> Iterator[Any]:
    """The engine of a folder of `write_model`. Raises NotTimedError where a package is missing, or room."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise NotTimedError(f"{plan.name} models need llmq's engine, which needs {', '.join(missing)}: not installed")
    from llmq.profiles.errors import InputError
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.engine import Engine

    config = EngineConfig(
        model=str(folder),
        dtype=_ENGINE_DTYPES[machine.dtype],
        device=machine.device.type,
        max_model_len=plan.context,
        max_num_seqs=max([batch for batch, _ in plan.decode] + [plan.served.num_requests if plan.served else 1]),
        max_num_batched_tokens=plan.step_tokens,
        kv_cache_memory_bytes=machine.kv_cache_bytes,
        enable_prefix_caching=False,
        overlap_steps=True,  # as on a GPU
    )
    try:
        reader = partial(RandomTensors, device=machine.device)
        # A CPU's packed weights are kept beside files that this model has not.
        with patch("llmq.runtime.weights.TensorReader", reader), patch("llmq.runtime.weights.native", None):
            engine = Engine.from_config(config)
    except (InputError, torch.OutOfMemoryError) as error:
        raise NotTimedError(str(error)[:200]) from None
    if "triton" not in engine.info.fingerprint["program"]:
        raise NotTimedError(f"the engine runs {engine.info.fingerprint['program']}, not the Triton program")
    try:
        # Timings on zeros are not those of numbers.
        engine.executor.runner.store._blocks.fill_(_FINITE)
        yield engine
    finally:
        engine.close()


def release() -> None:
    """What no longer has a name, back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def time_decode(
    engine: Any, plan: ModelPlan, form: str, machine: Machine, peaks: Peaks, batch: int, context: int
) -> Row:
    """Steps of `batch` sequences of `context` tokens, whose blocks hold any numbers: their prompts are scheduled as any
    and their forward left out, which at 70B would take minutes."""
    what = f"{batch} × {context} tokens"
    blocks = batch * -(-(context + _NEW_TOKENS) // engine.info.block_tokens)
    if blocks > engine.info.num_blocks:
        raise NotTimedError(f"{blocks} blocks of KV, and {engine.info.num_blocks} fit")
    names = _add(engine, plan, [context] * batch, _NEW_TOKENS, f"{batch} {context}")
    try:
        with _no_forward(engine, plan, machine) as skipped:
            started: set[str] = set()
            while len(started) < batch:
                started |= {output.request_id for output in _stepped(engine)}
        assert skipped, "prompts were computed elsewhere than in Program.forward"
        for _ in range(3):  # kernels are compiled, graphs captured
            _stepped(engine)
        begin = machine.clock()
        _stepped(engine)
        count = max(3, min(64, int(machine.decode_s / max(machine.clock() - begin, 1e-6))))
        begin = machine.clock()
        for _ in range(count):
            _stepped(engine)
        seconds = (machine.clock() - begin) / count
    finally:
        engine.abort(names)
        while engine.has_unfinished_requests:
            _stepped(engine)
    moved = _weight_bytes(engine, plan, machine) + batch * context * _token_bytes(plan, machine)
    floor = peaks.floor_us(moved, 2 * batch * plan.weights_of_a_token)
    return Row(f"{plan.name} {form}", f"decode, {what}", 1e6 * seconds, floor, f"{batch / seconds:.0f} tokens/s")


def time_prefill(engine: Any, plan: ModelPlan, form: str, machine: Machine, peaks: Peaks) -> Row:
    """A prompt alone, until its first token."""
    seconds = 0.0
    for turn in range(2):  # the first compiles
        _add(engine, plan, [plan.prompt], 1, f"prefill {turn}")
        begin = machine.clock()
        while engine.has_unfinished_requests:
            _stepped(engine)
        seconds = machine.clock() - begin
    pairs = plan.prompt * (plan.prompt + 1) // 2
    flops = 2 * plan.prompt * plan.weights_of_a_token + 4 * plan.layers * pairs * plan.heads * plan.head_dim
    floor = peaks.floor_us(_weight_bytes(engine, plan, machine), flops)
    note = f"{plan.prompt / seconds:.0f} tokens/s, {1e-12 * flops / seconds:.0f} TFLOP/s"
    return Row(f"{plan.name} {form}", f"prefill, {plan.prompt} tokens", 1e6 * seconds, floor, note)


def time_served(
    engine: Any, plan: ModelPlan, form: str, machine: Machine, peaks: Peaks, peers: "Sequence[Peer]"
) -> Row:
    """Requests that come at once, until the last token of all, beside what a peer took for them."""
    served, tokens = plan.served, {}
    for turn in range(2):  # the first compiles, captures
        names = _add(engine, plan, [served.prompt] * served.num_requests, served.new, f"served {turn}")
        tokens = {name: [] for name in names}
        begin = machine.clock()
        while engine.has_unfinished_requests:
            for output in _stepped(engine):
                tokens[output.request_id] += output.new_token_ids
        seconds = machine.clock() - begin
    made = list(tokens.values())
    assert all(len(one) == served.new for one in made), "a request ended early"
    note = _rate(served, seconds)
    for peer in peers:
        note += f", {peer.seconds / seconds:.2f}× transformers"
        if form == "16 bit":
            pairs = zip(itertools.chain(*made), itertools.chain(*peer.tokens), strict=True)
            same = sum(own == other for own, other in pairs)
            note += f" ({100 * same / served.num_requests / served.new:.0f} % of its tokens)"
    floor = _served_floor(plan, machine, peaks, _weight_bytes(engine, plan, machine))
    return Row(f"{plan.name} {form}", f"served, {served}", 1e6 * seconds, floor, note)


@contextmanager
def _no_forward(engine: Any, plan: ModelPlan, machine: Machine) -> Iterator[list[int]]:
    """Steps compute no hidden states within; yields the tokens of each such step."""
    program, skipped = engine.executor.runner.program, []

    def forward(inputs: Any) -> torch.Tensor:
        skipped.append(len(inputs.token_ids))
        return torch.zeros(skipped[-1], plan.hidden, dtype=machine.dtype, device=machine.device)

    with patch.object(program, "forward", forward):
        yield skipped


def _prompt(plan: ModelPlan, length: int, name: str) -> list[int]:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(3, plan.vocab, (length,), generator=generator).tolist()


def _add(engine: Any, plan: ModelPlan, lengths: Sequence[int], new: int, name: str) -> list[str]:
    """Queue greedy requests that end at `new` tokens; their names."""
    from llmq.runtime.request import EngineRequest
    from llmq.runtime.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    names = [f"{name} {index}" for index in range(len(lengths))]
    for one, length in zip(names, lengths, strict=True):
        prompt = _prompt(plan, length, one)
        engine.add_request(EngineRequest(request_id=one, prompt_token_ids=prompt, sampling_params=params))
    return names


def _stepped(engine: Any) -> list[Any]:
    outputs = engine.step()
    if errors := [output.error for output in outputs if output.error is not None]:
        raise RuntimeError(f"a request failed: {errors[0]}")
    return outputs


def _rate(served: Served, seconds: float) -> str:
    return f"{served.num_requests * served.new / seconds:.0f} tokens/s"


def _weight_bytes(engine: Any, plan: ModelPlan, machine: Machine) -> int:
    """That a step reads: of the embedding only its tokens' rows."""
    return engine.info.weight_bytes - plan.vocab * plan.hidden * machine.dtype.itemsize


def _token_bytes(plan: ModelPlan, machine: Machine) -> int:
    """Of K and V of one token."""
    return 2 * plan.layers * plan.kv_heads * plan.head_dim * machine.dtype.itemsize


def _served_floor(plan: ModelPlan, machine: Machine, peaks: Peaks, weight_bytes: int) -> float:
    """All prompts at the products' peak, then one step for each new token but the first."""
    served, batch = plan.served, plan.served.num_requests
    flops = 2 * batch * served.prompt * plan.weights_of_a_token
    kv_bytes = batch * (served.prompt + served.new / 2) * _token_bytes(plan, machine)
    step = peaks.floor_us(weight_bytes + kv_bytes, 2 * batch * plan.weights_of_a_token)
    return peaks.floor_us(0, flops) + (served.new - 1) * step


@dataclass(frozen=True)
class Peer:
    """What transformers' continuous batching made of a plan's `served`."""

    seconds: float
    tokens: list[list[int]]
    note: str


def time_peer(plan: ModelPlan, machine: Machine, peaks: Peaks, peers: list[Peer]) -> Row:
    """`run_peer`, which also goes into `peers`."""
    peer = run_peer(plan, machine)
    peers.append(peer)
    floor = _served_floor(plan, machine, peaks, plan.weights_of_a_token * machine.dtype.itemsize)
    note = f"{_rate(plan.served, peer.seconds)}, {peer.note}"
    return Row(f"{plan.name} peer", f"served, {plan.served}", 1e6 * peer.seconds, floor, note)


def run_peer(plan: ModelPlan, machine: Machine) -> Peer:
    """transformers' continuous batching on the same model in 16 bit, with the same prompts. Raises NotTimedError where
    it is not there, or ends without all tokens."""
    if find_spec("transformers") is None:
        raise NotTimedError("no peer: transformers is not installed here")
    import transformers

    if not hasattr(transformers.PreTrainedModel, "continuous_batching_context_manager") and not hasattr(
        transformers.GenerationMixin, "continuous_batching_context_manager"
    ):
        raise NotTimedError(f"no peer: transformers {transformers.__version__} has no continuous batching (5.3 up has)")
    model = _peer_model(plan, machine)
    served, tokens = plan.served, []
    generation = transformers.GenerationConfig(
        max_new_tokens=served.new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    settings: dict[str, Any] = {"allow_block_sharing": False, "max_requests_per_batch": served.num_requests}
    if machine.device.type == "cpu":  # where it would take most of the memory
        settings |= {"num_blocks": 4 * served.num_requests, "block_size": 32, "max_batch_tokens": 256}
    batching = transformers.ContinuousBatchingConfig(**settings)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=5
    ) as manager:
        for turn in range(2):  # as ours
            prompts = [_prompt(plan, served.prompt, f"served {turn} {index}") for index in range(served.num_requests)]
            begin = machine.clock()
            names = manager.add_requests(inputs=prompts, max_new_tokens=served.new)
            done: dict[str, list[int]] = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and (not manager.is_running() or machine.clock() - begin > _PEER_S):
                    raise NotTimedError(f"no peer: transformers {transformers.__version__} failed, or hangs")
            seconds = machine.clock() - begin
        tokens = [done[name] for name in names]
        attention = model.config._attn_implementation
    if any(len(one) != served.new for one in tokens):
        raise NotTimedError(f"no peer: transformers {transformers.__version__} made fewer tokens than it was asked for")
    return Peer(seconds, tokens, f"transformers {transformers.__version__}, {attention}")


def _peer_model(plan: ModelPlan, machine: Machine) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in plan.config.items() if name not in ("model_type", "architectures")}
    config = AutoConfig.for_model("llama", **settings)
    with machine.device:
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = parameter.shape
            parameter.copy_(random_tensor(name, parameter.dtype, shape, shape[-1], machine.device))
    return model.eval()


def model_timings(
    plans: Sequence[ModelPlan], folder: Path, machine: Machine, peaks: Peaks
) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(what, how it is timed), the most telling first; each model is loaded when its first row is asked for, and gone
    before the next one is."""
    for plan in plans:
        peers: list[Peer] = []
        if plan.served is not None:
            yield f"{plan.name} peer", partial(time_peer, plan, machine, peaks, peers)
            release()
        for form in plan.forms:
            loader = _Loader(plan, form, folder / f"{plan.name} {form}", machine, peaks)
            try:
                if plan.served is not None:
                    yield f"{plan.name} {form} served", partial(loader.time, time_served, peers)
                for of in plan.decode:
                    name = f"{plan.name} {form} decode {of[0]} × {of[1]}"
                    yield name, partial(loader.time, time_decode, *of)
                yield f"{plan.name} {form} prefill", partial(loader.time, time_prefill)
            finally:
                loader.close()
                release()


class _Loader:
    """An engine that is made for the first row that needs it. What it cannot be made for is said once."""

    def __init__(self, plan: ModelPlan, form: str, folder: Path, machine: Machine, peaks: Peaks) -> None:
        self.plan, self.form, self.folder, self.machine, self.peaks = plan, form, folder, machine, peaks
        self._context: Any = None
        self._engine: Any = None
        self._reason: str | None = None

    def time(self, timing: Callable[..., Row], *arguments: Any) -> Row:
        if self._reason is not None:
            raise NotTimedError(self._reason)
        if self._engine is None:
            try:
                write_model(self.folder, self.plan, self.form, self.machine.dtype)
                self._context = loaded_engine(self.folder, self.plan, self.machine)
                self._engine = self._context.__enter__()
            except Exception as error:
                self._reason, self._context = f"{self.plan.name} {self.form} was not loaded", None
                raise error
        return timing(self._engine, self.plan, self.form, self.machine, self.peaks, *arguments)

    def close(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
        self._context = self._engine = None
