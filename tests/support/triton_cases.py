"""Triton kernels against float64, over random shapes: in the interpreter, or on the GPU that is here.

Every case yields `Check`s. Outputs start as NaN, and so does what a kernel must not read; a check that is not finite
fails. Needs neither pytest nor the package installed, so that a bare machine with a GPU runs it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.profiles.kv_spec import KV_DTYPES, KVCacheGroup, KVCacheLayout, KVCacheSpec
from llmq.quantize.formats.quantized_weight import QuantizedWeight, pack_int32
from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme
from llmq.runtime.attention.base import AttentionMetadata
from llmq.runtime.attention.triton import plan_tiles
from llmq.runtime.kernels.triton import row_kernels
from llmq.runtime.kernels.triton.attention import paged_attention
from llmq.runtime.kernels.triton.kv_write import rotate_and_write
from llmq.runtime.kernels.triton.launch import Target
from llmq.runtime.kernels.triton.sampling import sample
from llmq.runtime.kernels.triton.weight_only import (
    ChunkedWeight,
    expert_tiles,
    grouped_rows,
    multiply,
    multiply_grouped,
)
from llmq.runtime.kv_store import KVStore, Slots
from llmq.runtime.layers.rope import apply_rope
from llmq.runtime.layers.rounded_input import round_input

# Of the norm of what is expected. 16-bit outputs, and 16-bit factors of the products, are rounded.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Check:
    what: str
    made: Tensor
    expected: Tensor
    tolerance: float  # relative, of norms; 0: equal to the last bit

    @property
    def error(self) -> float:
        made, expected = self.made.double(), self.expected.double().to(self.made.device)
        if not bool(torch.isfinite(made).all()):
            return float("inf")
        return float((made - expected).norm() / expected.norm().clamp(min=1e-30))

    @property
    def passes(self) -> bool:
        return self.made.shape == self.expected.shape and self.error <= self.tolerance


@dataclass(frozen=True)
class Place:
    """Where a case runs, and for what its launches are planned."""

    device: torch.device
    target: Target
    dtype: torch.dtype
    seed: int

    def random(self) -> random.Random:
        torch.manual_seed(self.seed)
        return random.Random(self.seed)

    def poison(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device)


def attention(place: Place) -> Iterator[Check]:
    """Ragged batches in a scattered store whose every other byte is NaN, by each format of blocks."""
    rng = place.random()
    own = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[place.dtype]
    name, scale_bytes, static = rng.choice(
        [(own, 0, None), ("int8", 2, None), ("fp8", 2, None), ("fp8", 0, (0.02, 0.03)), ("int8", 0, (0.02, 0.03))]
    )
    num_heads, num_kv_heads = rng.choice([(1, 1), (4, 2), (9, 3), (8, 1), (24, 1)])
    dim_k, dim_v = rng.choice([(16, 16), (24, 24), (64, 64), (40, 24)])
    window, softcap = rng.choice([None, None, 1, 7, 300]), rng.choice([None, None, 5.0])
    block_tokens = rng.choice([1, 4, 16])
    sequences = [(1, rng.randrange(90)), (1, 0), (rng.randrange(2, 40), rng.randrange(60))]
    if rng.random() < 0.6:
        sequences.append((1, rng.randrange(520, 1100)))
    spec = KVCacheSpec(num_kv_heads, dim_k, dim_v, replace(KV_DTYPES[name], scale_bytes=scale_bytes), window)
    scales = {0: (1.0, 1.0), 1: static} if static else None
    store, metadata = _filled_store(place, rng, spec, block_tokens, sequences, scales)
    queries = torch.randn(metadata.query_start_loc[-1], num_heads, dim_k).to(place.device, place.dtype)
    output = place.poison(len(queries), num_heads, dim_v)
    for tiles in plan_tiles(metadata, num_heads // num_kv_heads, place.target, place.device):
        launches = paged_attention(
            *(queries, *store.parts(1), name, metadata.block_table, tiles, output),
            *(0.3, softcap, window, place.target),
        )
        for launch in launches:
            launch.run()
    what = f"{name} {num_heads}/{num_kv_heads} heads of {dim_k}/{dim_v}, window {window}, softcap {softcap}"
    expected = exact_attention(queries, store, metadata, 0.3, softcap)
    yield Check(what, output, expected, 2 * TOLERANCE[place.dtype])


def _filled_store(
    place: Place,
    rng: random.Random,
    spec: KVCacheSpec,
    block_tokens: int,
    sequences: list[tuple[int, int]],
    scales: dict | None,
) -> tuple[KVStore, AttentionMetadata]:
    """K and V of the positions that are seen, in shuffled blocks; NaN everywhere else."""
    lengths = [new + before for new, before in sequences]
    widths = [-(-length // block_tokens) for length in lengths]
    layout = KVCacheLayout((KVCacheGroup(spec, (0, 1), block_tokens),))
    store = KVStore(layout, sum(widths) + 3, place.device, scales)
    store._blocks.fill_(0xFF)  # NaN in every dtype of floats, scales included
    order = list(range(store.num_blocks))
    rng.shuffle(order)
    table = torch.zeros(len(sequences), max(widths), dtype=torch.int64)
    starts = [0]
    for new, _ in sequences:
        starts.append(starts[-1] + new)
    for row, width in enumerate(widths):
        table[row, :width] = torch.tensor([order.pop() for _ in range(width)])
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table.to(place.device),
        slots=Slots.of(torch.zeros(0, dtype=torch.int64), block_tokens),
        block_tokens=block_tokens,
        window=spec.window,
    )
    for row, length in enumerate(lengths):
        seen = torch.arange(metadata.first_key(row), length)
        slots = Slots((table[row, seen // block_tokens]).to(place.device), (seen % block_tokens).to(place.device))
        keys = torch.randn(len(seen), spec.num_kv_heads, spec.head_dim_k).to(place.device, place.dtype)
        values = torch.randn(len(seen), spec.num_kv_heads, spec.head_dim_v).to(place.device, place.dtype)
        store.write(1, keys, values * 1e-3 if place.seed % 4 == 0 else values, slots)
    return store, metadata


def exact_attention(
    queries: Tensor, store: KVStore, metadata: AttentionMetadata, scale: float, softcap: float | None
) -> Tensor:
    """The definition in float64, over the numbers as they are stored."""
    outputs = []
    for row, length in enumerate(metadata.seq_lens):
        begin, end = metadata.query_start_loc[row : row + 2]
        first = metadata.first_key(row)
        position = torch.arange(first, length, device=queries.device)
        keys, values = (
            part[position // metadata.block_tokens, position % metadata.block_tokens]
            for part in store.read(1, metadata.block_table[row], torch.float64)
        )
        group = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries[begin:end].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(length - (end - begin), length, device=queries.device)[:, None]
        hidden = position > own
        if metadata.window is not None:
            hidden |= position <= own - metadata.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def kv_write(place: Place) -> Iterator[Check]:
    """Rotation and encoding, against torch's, to the last byte where no multiply-add is fused."""
    rng = place.random()
    name, scale_bytes, static = rng.choice(
        [("fp32", 0, None), ("fp16", 0, None), ("int8", 2, None), ("fp8", 2, None), ("fp8", 0, (0.02, 0.03))]
    )
    num_tokens, num_heads, num_kv_heads = rng.randrange(1, 40), rng.choice([2, 6]), rng.choice([1, 2])
    dim_k, dim_v, half = rng.choice([(16, 16, 8), (24, 40, 8), (64, 64, 32), (24, 24, 0)])
    spec = KVCacheSpec(num_kv_heads, dim_k, dim_v, replace(KV_DTYPES[name], scale_bytes=scale_bytes))
    layout = KVCacheLayout((KVCacheGroup(spec, (0, 1), 4),))
    made, expected = (
        KVStore(layout, 20, place.device, {0: (1.0, 1.0), 1: static} if static else None) for _ in range(2)
    )
    sizes = [num_heads * dim_k, num_kv_heads * dim_k, num_kv_heads * dim_v]
    q, k, v = torch.randn(num_tokens, sum(sizes)).to(place.device, place.dtype).split(sizes, dim=1)
    q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in ((q, dim_k), (k, dim_k), (v, dim_v)))
    v[0] = 0
    k[-1] *= 1e3
    positions = torch.randint(0, 100, (num_tokens,), device=place.device)
    angles = torch.randn(100, 1, half or 1, device=place.device)
    tables = (angles.cos(), angles.sin()) if half else None
    slots = Slots.of(torch.randperm(80, device=place.device)[:num_tokens], 4)
    rotated = place.poison(num_tokens, num_heads, dim_k)
    for launch in rotate_and_write(q, k, v, tables, positions, slots, made.parts(1), name, rotated):
        launch.run()
    if tables is not None:
        q, k = (apply_rope(x, *(table[positions] for table in tables)) for x in (q, k))
    expected.write(1, k, v, slots)
    is_exact = place.device.type == "cpu"
    yield Check("rotated queries", rotated, q, 0 if is_exact else TOLERANCE[place.dtype])
    if is_exact:
        yield Check(f"{name} blocks", made._blocks, expected._blocks, 0)
    else:
        where = (slots.block, slots.offset)
        blocks = torch.arange(20, device=place.device)
        for part, one, other in zip("kv", *(s.read(1, blocks, torch.float64) for s in (made, expected)), strict=True):
            yield Check(f"{name} {part}", one[where], other[where], 2e-3 if name != "fp8" else 1e-2)


def random_weight(rng: random.Random, rows: int, columns: int, dtype: torch.dtype, bits: int = 0) -> QuantizedWeight:
    """Of any kind that ChunkedWeight holds."""
    kind = rng.choice(["int4", "int4 zeros", "int4 offset", "int8 zeros", "fp8 channel", "fp8 tensor", "fp8 block"])
    if bits == 4:
        kind = rng.choice(["int4", "int4 zeros"])
    if kind.startswith("fp8"):
        strategy = kind.split()[1]
        scheme = WeightScheme(
            *("float", 8, strategy),
            group_size=64 if strategy == "block" else None,
            block_rows=32 if strategy == "block" else None,
            layout="float-quantized",
        )
        scale = torch.rand(scheme.scale_shape((rows, columns))) * 0.01 + 0.001
        values = torch.randn(rows, columns).mul_(80).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return QuantizedWeight(scheme, (rows, columns), values, scale)
    bits = int(kind[3])
    group = rng.choice([size for size in (32, 64, 128, columns) if columns % size == 0])
    scheme = WeightScheme(
        "int",
        bits,
        "channel" if group == columns else "group",
        None if group == columns else group,
        symmetric=kind == "int4",
        has_offset="offset" in kind,
    )
    limit = 1 << (bits - 1)
    values = pack_int32(torch.randint(-limit, limit, (rows, columns), dtype=torch.int8), bits)
    shape = scheme.scale_shape((rows, columns))
    scale = (torch.rand(shape) * 0.02 + 0.001).to(dtype)
    zeros = torch.randint(-limit, limit, shape, dtype=torch.int8) if "zeros" in kind else None
    offset = torch.randn(shape).mul(0.1).to(dtype) if "offset" in kind else None
    return QuantizedWeight(scheme, (rows, columns), values, scale, zero_point=zeros, offset=offset)


def weight_only(place: Place) -> Iterator[Check]:
    """Every format and offset, tails of rows and outputs, split and whole."""
    rng = place.random()
    rows, columns = rng.choice([48, 64, 200]), rng.choice([64, 96, 256, 1088])
    num_rows = rng.choice([1, 3, 16, 17, 70, 150])
    weight = random_weight(rng, rows, columns, place.dtype)
    x = torch.randn(num_rows, columns + 8).to(place.device, place.dtype)[:, :columns]
    bias = torch.randn(rows).to(place.device, place.dtype) if rng.random() < 0.5 else None
    y = place.poison(num_rows, rows)
    weight = weight.to(place.device)
    for launch in multiply(x, ChunkedWeight.of(weight), bias, y, place.target):
        launch.run()
    expected = x.double() @ weight.dequantize(torch.float64).double().T
    expected = expected if bias is None else expected + bias.double()
    yield Check(f"{weight.scheme.name}, {num_rows} × {columns} → {rows}", y, expected, TOLERANCE[place.dtype])


def grouped(place: Place) -> Iterator[Check]:
    """Rows sorted by expert, of which some have none."""
    rng = place.random()
    num_experts, rows, columns = rng.choice([3, 8]), rng.choice([64, 80]), rng.choice([64, 128])
    seed = rng.random()
    weights = [
        random_weight(random.Random(seed), rows, columns, place.dtype, 4).to(place.device) for _ in range(num_experts)
    ]
    stacked = ChunkedWeight.stack([ChunkedWeight.of(weight) for weight in weights])
    counts = torch.randint(0, rng.choice([4, 60]), (num_experts,), device=place.device)
    counts[rng.randrange(num_experts)] = 0
    num_rows = int(counts.sum())
    x = torch.randn(num_rows, columns).to(place.device, place.dtype)
    y = place.poison(num_rows, rows)
    tile_rows = grouped_rows(num_rows, num_experts)
    tiles = expert_tiles(counts, num_rows, tile_rows)
    multiply_grouped(x, stacked, tiles, tile_rows, y, place.target).run()
    parts = x.double().split(counts.tolist())
    expected = [part @ weight.dequantize(torch.float64).double().T for part, weight in zip(parts, weights, strict=True)]
    yield Check(f"{counts.tolist()} rows of {num_experts} experts", y, torch.cat(expected), TOLERANCE[place.dtype])


def rms_norm(place: Place) -> Iterator[Check]:
    rng = place.random()
    num_rows, num_features = rng.randrange(1, 9), rng.choice([1, 96, 300, 2048])
    x, delta = (torch.randn(num_rows, num_features + 3).to(place.device, place.dtype)[:, 3:] for _ in range(2))
    weight = torch.randn(num_features, device=place.device).to(rng.choice([place.dtype, torch.float32]))
    y, total = place.poison(num_rows, num_features), place.poison(num_rows, num_features)
    row_kernels.rms_norm(x, weight, 1e-5, y, delta, 0.5, total).run()
    summed = x + delta * 0.5
    yield Check("sum", total, summed, 0)
    expected = F.rms_norm(summed.double(), (num_features,), weight.double(), 1e-5)
    yield Check("of a sum", y, expected, TOLERANCE[place.dtype])
    y = place.poison(num_rows, num_features)
    row_kernels.rms_norm(x, weight, 1e-5, y).run()
    expected = F.rms_norm(x.double(), (num_features,), weight.double(), 1e-5)
    yield Check("alone", y, expected, TOLERANCE[place.dtype])


def gate(place: Place) -> Iterator[Check]:
    rng = place.random()
    num_rows, num_features = rng.randrange(1, 6), rng.choice([1, 77, 1024, 1500])
    wide = torch.randn(num_rows, 2 * num_features).mul(3).to(place.device, place.dtype)
    first, second = wide.double().chunk(2, dim=1)
    tanh_gelu = F.gelu(first, approximate="tanh")
    expected = {"silu": F.silu(first), "gelu": F.gelu(first), "gelu_new": tanh_gelu, "relu": F.relu(first)}
    for name, gated in expected.items():
        y = place.poison(num_rows, num_features)
        row_kernels.gate(wide, name, y).run()
        yield Check(name, y, gated * second, TOLERANCE[place.dtype])


def round_rows(place: Place) -> Iterator[Check]:
    """The numbers that torch's emulation rounds to, to the last bit."""
    rng = place.random()
    num_rows, num_features = rng.randrange(1, 9), rng.choice([1, 100, 576, 2048])
    x = torch.randn(num_rows, num_features).mul(10 ** rng.uniform(-3, 3)).to(place.device, place.dtype)
    x[0] = 0
    for kind, dtype in (("int", torch.int8), ("float", torch.uint8)):
        for static in (None, torch.tensor(0.013, device=place.device)):
            q = torch.full((num_rows, num_features), 77, dtype=dtype, device=place.device)
            scales = None if static is not None else place.poison(num_rows, dtype=torch.float32)
            row_kernels.round_rows(x, q, scales, static).run()
            expected, expected_scale = round_input(x.float(), ActivationScheme(kind), static)
            made = q if kind == "int" else q.view(torch.float8_e4m3fn).float()
            yield Check(f"{kind} numbers", made, expected, 0)
            if scales is not None:
                yield Check(f"{kind} scales", scales, expected_scale[:, 0], 0)


def sampling(place: Place) -> Iterator[Check]:
    """The token of a sort in float64, by the same noise."""
    from llmq.runtime.sampling.noise import exponentials  # numpy, no more

    rng = place.random()
    num_rows, vocab_size = 6, rng.choice([7, 300, 5000])
    logits = torch.randn(num_rows, vocab_size) * 3
    columns = {
        "temperatures": torch.tensor([rng.choice([0.0, 0.7, 1.0, 2.0]) for _ in range(num_rows)]),
        "top_ks": torch.tensor([rng.choice([0, 1, 5, 2000]) for _ in range(num_rows)], dtype=torch.int32),
        "top_ps": torch.tensor([rng.choice([1.0, 0.9, 0.3]) for _ in range(num_rows)]),
        "min_ps": torch.tensor([rng.choice([0.0, 0.0, 0.05]) for _ in range(num_rows)]),
        "seeds": torch.tensor([rng.getrandbits(63) for _ in range(num_rows)]),
        "positions": torch.tensor([rng.randrange(10000) for _ in range(num_rows)]),
    }
    token_ids = torch.full((num_rows,), -1, device=place.device)
    highest = place.poison(num_rows, dtype=torch.float32)
    on_device = {name: column.to(place.device) for name, column in columns.items()}
    sample(logits.to(place.device), **on_device, token_ids=token_ids, highest=highest).run()
    expected = []
    for row, (t, k, p, m, seed, position) in enumerate(zip(*columns.values(), strict=True)):
        if t == 0:
            expected.append(int(logits[row].argmax()))
            continue
        probs, ids = (logits[row] / t).double().softmax(0).sort(descending=True)
        keep = probs[: int(k) or None]
        keep = keep[: int((keep.cumsum(0) < float(p) * keep.sum()).sum()) + 1] if p < 1 else keep
        keep = keep[keep >= float(m) * keep[0]]
        noise = exponentials(int(seed), int(position), ids[: len(keep)].numpy())
        expected.append(int(ids[(keep / torch.from_numpy(noise)).argmax()]))
    yield Check(f"tokens of {vocab_size} words", token_ids, torch.tensor(expected), 0)
    yield Check("highest logits", highest, logits.max(dim=1).values, 0)


# Each with how many random shapes of it a suite tries.
CASES: dict[Callable[[Place], Iterator[Check]], int] = {
    attention: 16,
    kv_write: 10,
    weight_only: 20,
    grouped: 4,
    rms_norm: 3,
    gate: 3,
    round_rows: 4,
    sampling: 4,
}
