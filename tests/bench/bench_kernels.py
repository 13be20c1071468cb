"""Linears of our own kernels beside torch's: bytes of weight a second at one row, operations a second at more.

Kernels take turns, so that what else the machine does falls on all; of each the fastest of many calls is shown, in CPU
time with one thread. Between calls the kernel goes through copies of its weight that do not fit the caches together,
as a model's layers do not.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import bench_report
import torch
from bench_report import Report
from random_weights import make
from torch import Tensor

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.runtime.kernels import native
from llmq.runtime.layers.dense_product import dense_product
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.layers.packed_int4 import PackedInt4Linear

SHAPES = "960x576,576x576,3072x576,576x1536,17920x1536,1536x8960"  # out x in: SmolLM2-135M's and Qwen2.5-1.5B's
ROWS = (1, 4, 16, 64, 512)
GROUP_SIZE = 64
_COLD_BYTES = 128 << 20

Kernel = Callable[[Tensor], Tensor]


def kernels(out: int, in_: int, few: bool) -> Iterator[tuple[str, int, list[Kernel]]]:
    """(name, bytes of a weight, the kernel on several copies of it). few: one copy, for many rows."""

    def copies(num_bytes: int) -> int:
        return 1 if few else max(1, _COLD_BYTES // num_bytes)

    dense = torch.randn(out, in_).bfloat16()
    weights = [dense.clone() for _ in range(copies(dense.nbytes))]
    yield "torch bf16", dense.nbytes, [lambda x, w=weight: dense_product(x, w) for weight in weights]
    yield "native bf16", dense.nbytes, [NativeLinear(weight, None) for weight in weights]
    int4 = make("int", 4, "group", out, in_, 0, group_size=GROUP_SIZE)
    int4 = int4._with(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)
    packed = int4.num_bytes
    yield "torch int4", packed, [PackedInt4Linear(int4, None, torch.bfloat16) for _ in range(copies(packed))]
    natives = [NativeLinear(int4, None) for _ in range(copies(packed))]
    yield "native int4", packed, natives
    yield "native int4 × int8", packed, [_as(linear, native.Activations.int8_group) for linear in natives]
    int3 = make("int", 3, "group", out, in_, 0, group_size=GROUP_SIZE)
    int3 = int3._with(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)
    natives = [NativeLinear(int3, None) for _ in range(copies(int3.num_bytes))]
    yield "native int3", int3.num_bytes, natives
    yield "native int3 × int8", int3.num_bytes, [_as(linear, native.Activations.int8_group) for linear in natives]
    int8 = make("int", 8, "channel", out, in_, 0)
    natives = [NativeLinear(int8, None) for _ in range(copies(int8.num_bytes))]
    yield "native int8", int8.num_bytes, natives
    yield "native int8 × int8", int8.num_bytes, [_as(linear, native.Activations.int8_row) for linear in natives]
    yield "torch int8 × int8", int8.num_bytes, [_int8_product(int8)] * 1


def _as(linear: NativeLinear, activations: "native.Activations") -> NativeLinear:
    other = object.__new__(NativeLinear)
    other.__dict__.update(linear.__dict__, activations=activations)
    return other


def _int8_product(weight: QuantizedWeight) -> Kernel:
    """The integer product alone, of an input that is rounded already."""
    transposed = weight.integers().contiguous().T
    return lambda x: torch._int_mm(x.view(torch.int8)[:, : weight.in_features], transposed)


def measure(arguments: argparse.Namespace) -> Report:
    if native is None:
        raise SystemExit("no native kernels here")
    torch.set_num_threads(arguments.threads)
    native.set_num_threads(arguments.threads)
    if arguments.isa:
        native.force_isa(arguments.isa)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    rows, figures = [], []
    for shape in arguments.shapes.split(","):
        out, in_ = (int(number) for number in shape.split("x"))
        for num_rows in arguments.rows:
            x = torch.randn(num_rows, in_).bfloat16()
            chosen = [
                k for k in kernels(out, in_, num_rows >= 64) if k[0] in arguments.kernels or not arguments.kernels
            ]
            best = {name: float("inf") for name, _, _ in chosen}
            for _, _, linears in chosen:  # compiled, paged in
                linears[0](x)
            for turn in range(arguments.turns):
                for name, _, linears in chosen:
                    calls = max(1, int(2e-3 / best[name])) if best[name] < 1 else 1
                    start = clock()
                    for call in range(calls):
                        linears[(turn * calls + call) % len(linears)](x)
                    best[name] = min(best[name], (clock() - start) / calls)
            for name, num_bytes, _ in chosen:
                seconds = best[name]
                gbs, gops = num_bytes / seconds / 1e9, 2 * out * in_ * num_rows / seconds / 1e9
                figures.append(
                    {"shape": shape, "rows": num_rows, "kernel": name, "s": seconds, "GB/s": gbs, "Gop/s": gops}
                )
                rows.append([shape, f"{num_rows}", name, f"{seconds * 1e6:,.1f}", f"{gbs:.1f}", f"{gops:,.0f}"])
    return Report(
        f"Linears on {arguments.threads} thread(s), {native.isa()}, int4 and int3 in groups of {GROUP_SIZE}",
        ["out x in", ">rows", "kernel", ">µs", ">GB/s of weight", ">Gop/s"],
        rows,
        figures,
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    options.add_argument("--shapes", default=SHAPES)
    options.add_argument("--rows", type=_numbers, default=list(ROWS))
    options.add_argument("--kernels", type=_names, default=[], help="Some, by name; default: all.")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--isa", help="A lesser instruction set than this CPU's.")
    return bench_report.run(options.parse_args(argv), measure)


if __name__ == "__main__":
    main()
