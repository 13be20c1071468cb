"""What `bench_gpu.py` times: each function makes its data on the device, and one Row of it."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.attention.triton import plan_tiles
from llmq.runtime.kernels.triton import row_kernels
from llmq.runtime.kernels.triton.attention import paged_attention
from llmq.runtime.kernels.triton.launch import Launch, Target
from llmq.runtime.kernels.triton.sampling import sample
from llmq.runtime.kernels.triton.weight_only import (
    FP8,
    INT4,
    ChunkedWeight,
    expert_tiles,
    grouped_rows,
    multiply,
    multiply_grouped,
)
from llmq.runtime.kv_store import KVStore, Slots

GROUP_SIZE = 128
MIN_BYTES = 256 << 20  # of copies that a timing goes round: more than any L2 cache holds
MOST_BYTES = 24 << 30  # of one timing's data


HEADER = f"{'kernel':14} {'what':44} {'time':>13} {'floor':>10} {'share':>7}"


class NotTimedError(Exception):
    """Says what does not fit."""


@dataclass(frozen=True)
class Sizes:
    """What is timed."""

    decode: list[tuple[int, int]]  # (sequences, tokens of context)
    prefill: list[tuple[int, int]]  # (tokens of a chunk, tokens before it)
    weights: list[tuple[int, int]]  # (out features, in features)
    rows: list[int]
    heads: tuple[int, int, int]  # heads, KV heads, head_dim
    vocab_size: int
    experts: tuple[int, int, int]  # how many, their intermediate and hidden size
    matmul: int  # side of the square product that stands for the cores' peak
    sampled_rows: int
    copy_bytes: int  # of the copy that stands for the memory's


FULL = Sizes(
    decode=[(b, c) for c in (1024, 8192, 32768, 131072) for b in (1, 8, 32, 64, 128, 256)],
    prefill=[(512, 0), (2048, 0), (8192, 0), (2048, 30720), (512, 130560)],
    weights=[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (57344, 8192)],
    rows=[1, 8, 16, 64, 256, 2048],
    heads=(32, 8, 128),
    vocab_size=128256,
    experts=(8, 14336, 4096),
    matmul=8192,
    sampled_rows=64,
    copy_bytes=4 << 30,
)


TINY = Sizes(
    decode=[(1, 40), (3, 17)],
    prefill=[(20, 0), (5, 30)],
    weights=[(64, 256)],
    rows=[1, 20],
    heads=(4, 2, 16),
    vocab_size=300,
    experts=(3, 64, 128),
    matmul=16,
    sampled_rows=2,
    copy_bytes=1 << 10,
)


@dataclass(frozen=True)
class Machine:
    """Where it runs, and how time is taken there."""

    device: torch.device
    name: str
    seconds_of: Callable[[Callable[[int], None], int], float]  # (call of a copy's number, copies) -> of one call
    free_bytes: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    dtype: torch.dtype = torch.bfloat16
    min_bytes: int = MIN_BYTES
    decode_s: float = 1.0  # that the steps of one row of a whole model take
    kv_cache_bytes: int | None = None  # of a whole model; None: what is left


@dataclass(frozen=True)
class Row:
    """One timing. `floor_us`: what the bytes take at the copy's speed, or the operations at the matmul's."""

    section: str
    what: str
    us: float
    floor_us: float
    note: str = ""

    def __str__(self) -> str:
        share = 100 * self.floor_us / self.us if self.us else 0.0
        return f"{self.section:14} {self.what:44} {self.us:10.1f} µs {self.floor_us:10.1f} {share:5.0f} %  {self.note}"


@dataclass(frozen=True)
class Peaks:
    bytes_per_s: float
    flops: float

    def floor_us(self, num_bytes: float, flops: float = 0.0) -> float:
        return 1e6 * max(num_bytes / self.bytes_per_s, flops / self.flops)


def cuda_machine() -> Machine:
    device = torch.device("cuda")

    def seconds_of(call: Callable[[int], None], copies: int) -> float:
        for copy in range(min(2, copies)):
            call(copy)
        torch.cuda.synchronize()
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        call(0)
        middle.record()
        torch.cuda.synchronize()
        # About 30 ms, at least 5 and at most 200 calls.
        count = max(5, min(200, int(30 / max(1e-3, begin.elapsed_time(middle)))))
        begin.record()
        for index in range(count):
            call(index % copies)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    return Machine(device, torch.cuda.get_device_name(), seconds_of, lambda: torch.cuda.mem_get_info()[0])


def interpreting_machine(**changes: Any) -> Machine:
    """A CPU on which Triton interprets its kernels: everything runs, and no time means anything."""

    def seconds_of(call: Callable[[int], None], copies: int) -> float:
        begin = time.perf_counter()
        for copy in range(copies):
            call(copy)
        return (time.perf_counter() - begin) / copies

    fields = {"free_bytes": lambda: 1 << 30, "dtype": torch.float32, "min_bytes": 1}
    fields |= {"decode_s": 0.0, "kv_cache_bytes": 8 << 20, **changes}
    return Machine(torch.device("cpu"), "a CPU, interpreting", seconds_of, **fields)


def measure_peaks(machine: Machine, sizes: Sizes) -> Peaks:
    bytes_of = torch.empty(2, sizes.copy_bytes, dtype=torch.uint8, device=machine.device)
    copy_s = machine.seconds_of(lambda _: bytes_of[0].copy_(bytes_of[1]), 1)
    a, b = (torch.randn(sizes.matmul, sizes.matmul, device=machine.device).to(machine.dtype) for _ in range(2))
    product_s = machine.seconds_of(lambda _: torch.mm(a, b), 1)
    return Peaks(2 * sizes.copy_bytes / copy_s, 2 * sizes.matmul**3 / product_s)


def timings(machine: Machine, sizes: Sizes, peaks: Peaks) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(section, what makes one row of it). The first of each section compiles."""
    for form in ("int4", "fp8"):
        for shape in sizes.weights:
            for rows in sizes.rows:
                yield f"{form} weight", partial(time_weights, machine, peaks, form, shape, rows)
    for name in (_own_format(machine), "fp8", "int8"):
        for batch, context in sizes.decode:
            yield f"decode {name}", partial(time_attention, machine, sizes, peaks, name, batch, 1, context)
        for queries, before in sizes.prefill:
            of = (name, 1, queries, queries + before)
            yield f"prefill {name}", partial(time_attention, machine, sizes, peaks, *of)
    for rows in sizes.rows:
        yield "int4 experts", partial(time_experts, machine, sizes, peaks, rows)
    for rows in sizes.rows:
        for kind in ("rms_norm", "gate", "round"):
            yield kind, partial(time_rows, machine, sizes, peaks, kind, rows)
    yield "sampling", partial(time_sampling, machine, sizes, peaks, sizes.sampled_rows)


def _own_format(machine: Machine) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[machine.dtype]


class Table:
    """Rows of a run. Each is printed, and all are written, as soon as it is there: a run that is cut off keeps them."""

    def __init__(self, path: Path | None = None, out: Callable[[str], Any] = partial(print, flush=True)) -> None:
        self._path, self._out = path, out
        self.facts: dict[str, Any] = {}  # of the machine and the kernels' tests
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.not_timed: list[str] = []
        self.no_time: list[str] = []

    def say(self, line: str) -> None:
        self._out(line)
        if self._path is not None:
            found = {**self.facts, "rows": [asdict(row) for row in self.rows]}
            found |= {name: getattr(self, name) for name in ("failed", "not_timed", "no_time")}
            self._path.write_text(json.dumps(found, indent=1), encoding="utf-8")

    def fill(
        self, timings: Iterable[tuple[str, Callable[[], Row]]], deadline: float, clock: Callable[[], float]
    ) -> None:
        """A row of each timing, until the deadline. One that fails, or does not fit, is said and costs no other."""
        late: dict[str, int] = {}
        for section, timing in timings:
            if clock() > deadline:
                late[section] = late.get(section, 0) + 1
                continue
            try:
                row = timing()
            except NotTimedError as reason:
                self.not_timed.append(f"{section}: {reason}")
                self.say(f"not timed: {self.not_timed[-1]}")
            except Exception as error:
                self.failed.append(f"{section}: {type(error).__name__}: {str(error)[:300]}")
                self.say(f"failed: {self.failed[-1]}")
            else:
                self.rows.append(row)
                self.say(str(row))
        if late:
            names = [section if count == 1 else f"{count} of {section}" for section, count in late.items()]
            self.no_time += names
            self.say(f"no time for: {', '.join(names)}")


def rotate(machine: Machine, num_bytes: int, make: Callable[[], Any]) -> list[Any]:
    """Copies of a timing's data, so many that no cache holds them all."""
    if num_bytes > min(MOST_BYTES, machine.free_bytes() // 2):
        raise NotTimedError(f"{num_bytes / 2**30:.1f} GiB of data")
    return [make() for _ in range(max(1, min(64, -(-machine.min_bytes // max(1, num_bytes)))))]


def time_weights(machine: Machine, peaks: Peaks, form: str, shape: tuple[int, int], rows: int) -> Row:
    """A quantized weight beside torch's product with the same in 16 bits."""
    target = Target.of(machine.device)
    (out_features, in_features), item = shape, machine.dtype.itemsize
    x = torch.randn(rows, in_features, device=machine.device).to(machine.dtype)
    y = x.new_empty(rows, out_features)
    one = random_weight(machine, form, 1, *shape)
    weights = rotate(machine, one.num_bytes, lambda: random_weight(machine, form, 1, *shape))
    plans = [multiply(x, weight, None, y, target) for weight in weights]
    seconds = machine.seconds_of(lambda copy: _run(plans[copy]), len(plans))
    dense_bytes = out_features * in_features * item
    dense = rotate(machine, dense_bytes, lambda: x.new_empty(out_features, in_features).normal_())
    dense_s = machine.seconds_of(lambda copy: F.linear(x, dense[copy]), len(dense))
    moved = one.num_bytes + item * rows * (in_features + out_features)
    floor = peaks.floor_us(moved, 2 * rows * out_features * in_features)
    note = f"torch in {_short(machine.dtype)} {1e6 * dense_s:.1f} µs, {dense_s / seconds:.2f}×"
    return Row(f"{form} weight", f"{rows} × {in_features} → {out_features}", 1e6 * seconds, floor, note)


def time_attention(
    machine: Machine, sizes: Sizes, peaks: Peaks, name: str, batch: int, queries: int, context: int
) -> Row:
    """One layer: a decode step of `batch` sequences, or a chunk of one, all with `context` tokens."""
    heads, kv_heads, dim = sizes.heads
    target = Target.of(machine.device)
    scale_bytes = 2 if name in ("fp8", "int8") else 0
    spec = KVCacheSpec(kv_heads, dim, dim, replace(KV_DTYPES[name], scale_bytes=scale_bytes))
    layout = KVCacheLayout((KVCacheGroup(spec, (0,), 16),))
    width = -(-context // 16)
    num_bytes = batch * width * layout.block_bytes
    order = torch.randperm(batch * width).view(batch, width)

    def store() -> KVStore:
        made = KVStore(layout, batch * width, machine.device)
        # Any bytes that are finite numbers: 0x3C is 1 and a bit in fp16, a small number in the others.
        made._blocks.fill_(0x3C)
        return made

    stores = rotate(machine, num_bytes, store)
    table = order.to(machine.device)
    starts = [queries * sequence for sequence in range(batch + 1)]
    metadata = AttentionMetadata(starts, [context] * batch, table, Slots(table, table), 16, None)
    q = torch.randn(batch * queries, heads, dim, device=machine.device).to(machine.dtype)
    y = torch.empty_like(q)
    tiles = plan_tiles(metadata, heads // kv_heads, target, machine.device)
    plans = [
        [
            launch
            for part in tiles
            for launch in paged_attention(q, *s.parts(0), name, table, part, y, dim**-0.5, None, None, target)
        ]
        for s in stores
    ]
    seconds = machine.seconds_of(lambda copy: _run(plans[copy]), len(plans))
    seen = batch * (queries * context - queries * (queries - 1) // 2)  # pairs of a query and a key
    floor = peaks.floor_us(num_bytes + 2 * q.nbytes, 4 * seen * heads * dim)
    rate = (
        f"{num_bytes / seconds / 1e9:.0f} GB/s"
        if queries == 1
        else f"{4e-12 * seen * heads * dim / seconds:.0f} TFLOP/s"
    )
    kind = "decode" if queries == 1 else "prefill"
    what = f"{batch} × {context} tokens" if queries == 1 else f"{queries} of {context} tokens"
    return Row(f"{kind} {name}", what, 1e6 * seconds, floor, rate)


def time_experts(machine: Machine, sizes: Sizes, peaks: Peaks, rows: int) -> Row:
    """Two experts a token, int4: the wide product of a mixture."""
    target = Target.of(machine.device)
    count, out_features, in_features = sizes.experts
    one = random_weight(machine, "int4", count, out_features, in_features)
    weights = rotate(machine, one.num_bytes, lambda: random_weight(machine, "int4", count, out_features, in_features))
    num_rows = 2 * rows
    chosen = torch.randint(0, count, (num_rows,), device=machine.device)
    counts = torch.zeros(count, dtype=torch.int64, device=machine.device).scatter_add_(
        0, chosen, torch.ones_like(chosen)
    )
    tile_rows = grouped_rows(num_rows, count)
    tiles = expert_tiles(counts, num_rows, tile_rows)
    x = torch.randn(num_rows, in_features, device=machine.device).to(machine.dtype)
    y = x.new_empty(num_rows, out_features)
    plans = [[multiply_grouped(x, weight, tiles, tile_rows, y, target)] for weight in weights]
    seconds = machine.seconds_of(lambda copy: _run(plans[copy]), len(plans))
    asked = int((counts > 0).sum())
    moved = one.num_bytes * asked / count + x.nbytes + y.nbytes
    floor = peaks.floor_us(moved, 2 * num_rows * out_features * in_features)
    return Row("int4 experts", f"{rows} tokens, {asked} of {count} asked", 1e6 * seconds, floor)


def time_rows(machine: Machine, sizes: Sizes, peaks: Peaks, kind: str, rows: int) -> Row:
    width = sizes.weights[0][1]

    def plan() -> Launch:
        x = torch.randn(rows, 2 * width, device=machine.device).to(machine.dtype)
        if kind == "gate":
            return row_kernels.gate(x, "silu", x.new_empty(rows, width))
        x, delta = x[:, :width], x[:, width:]
        if kind == "rms_norm":
            total, y = x.new_empty(rows, width), x.new_empty(rows, width)
            return row_kernels.rms_norm(x, x[0].contiguous(), 1e-5, y, delta, 1.0, total)
        codes = torch.empty(rows, width, dtype=torch.int8, device=machine.device)
        return row_kernels.round_rows(x, codes, torch.empty(rows, device=machine.device))

    item = machine.dtype.itemsize
    moved = rows * width * {"gate": 3 * item, "rms_norm": 4 * item, "round": item + 1}[kind]
    plans = rotate(machine, moved, plan)
    seconds = machine.seconds_of(lambda copy: plans[copy].run(), len(plans))
    return Row(kind, f"{rows} × {width}", 1e6 * seconds, peaks.floor_us(moved))


def time_sampling(machine: Machine, sizes: Sizes, peaks: Peaks, rows: int) -> Row:
    """top-k 50, top-p 0.9 for every row: the slowest that a request can ask for."""

    def plan() -> Launch:
        logits = torch.randn(rows, sizes.vocab_size, device=machine.device)
        of = {"device": machine.device}
        return sample(
            logits,
            temperatures=torch.full((rows,), 0.8, **of),
            top_ks=torch.full((rows,), 50, dtype=torch.int32, **of),
            top_ps=torch.full((rows,), 0.9, **of),
            min_ps=torch.zeros(rows, **of),
            seeds=torch.arange(rows, **of),
            positions=torch.arange(rows, **of),
            token_ids=torch.empty(rows, dtype=torch.int64, **of),
            highest=torch.empty(rows, **of),
        )

    moved = 4 * rows * sizes.vocab_size
    plans = rotate(machine, moved, plan)
    seconds = machine.seconds_of(lambda copy: plans[copy].run(), len(plans))
    return Row("sampling", f"{rows} × {sizes.vocab_size}, top-k, top-p", 1e6 * seconds, peaks.floor_us(moved))


def random_weight(machine: Machine, form: str, experts: int, out_features: int, in_features: int) -> ChunkedWeight:
    """int4 in groups of 128 with zero points, or fp8 with a scale a row, made on the device."""
    shape, of = (experts, in_features // 64, out_features), {"device": machine.device}
    if form == "int4":
        numbers = torch.randint(-(2**31), 2**31 - 1, (*shape, 8), dtype=torch.int32, **of)
        scales = torch.rand(experts, in_features // GROUP_SIZE, out_features, **of).mul_(0.01).to(machine.dtype)
        zeros = torch.randint(-8, 8, scales.shape, dtype=torch.int8, **of)
        return ChunkedWeight(numbers, scales, zeros, (out_features, in_features), 64, GROUP_SIZE, INT4)
    numbers = torch.randint(0, 120, (*shape, 64), dtype=torch.uint8, **of)
    scales = torch.rand(experts, 1, out_features, **of).mul_(0.01)
    return ChunkedWeight(numbers, scales, None, (out_features, in_features), 64, in_features, FP8)


def _run(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
