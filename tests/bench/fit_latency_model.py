"""Fits profiles/latency_coefficients.toml to published throughputs, and says how far off whole models and whole GPUs
are that were left out. `python tests/bench/fit_latency_model.py` prints; `--write` writes the file.

The points: ../shared/planner/throughput_points.json (or --points), 185 figures of TensorRT-LLM at full load and 20 of
gpt-fast at batch 1. Left out: expert-parallel ones (`llmq plan` splits by tensors alone), speculative ones, and models
without a config.json there.
"""

import argparse
import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.devices import find_device
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.latency_model import Coefficients, LatencyModel
from llmq.profiles.roofline import DecoderWork, Machine, StepWork
from llmq.profiles.weight_size import linear_shapes, other_parameters

REPOSITORY = Path(__file__).parent.parent.parent
TARGET = REPOSITORY / "profiles" / "latency_coefficients.toml"
LLAMA = "verbatim/meta-llama--{}_config.json"
CONFIGS = {
    "Llama-3.1-8B": LLAMA.format("Meta-Llama-3.1-8B"),
    "Llama-3.1-70B": LLAMA.format("Meta-Llama-3.1-70B"),
    "Llama-3.3-70B": LLAMA.format("Meta-Llama-3.1-70B"),
    "Llama-3.1-405B": LLAMA.format("Meta-Llama-3.1-405B"),
    "Llama-4-Scout": LLAMA.format("Llama-4-Scout-17B-16E-Instruct"),
    "Llama-4-Maverick": LLAMA.format("Llama-4-Maverick-17B-128E-Instruct"),
    "Qwen3-30B-A3B": "verbatim/Qwen--Qwen3-30B-A3B_config.json",
    "Qwen3-235B-A22B": "verbatim/Qwen--Qwen3-235B-A22B_config.json",
    "GPT-OSS-20B": "verbatim/openai--gpt-oss-20b_config.json",
    "GPT-OSS-120B": "verbatim/openai--gpt-oss-120b_config.json",
    "Llama-2-7B": "extracted/mlc--llama2_7b.json",
    "Llama-2-70B": "extracted/mlc--llama2_70b.json",
}
# (bits of a weight with its scales, the rate that its products run at). Weight-only integers compute in 16 bit. K and
# V are in FP8 where the checkpoint is NVIDIA's FP8 or FP4, which bring scales for them, else in 16 bit.
FORMATS = {
    "bf16": (16, "bf16_tflops"),
    "fp8": (8, "fp8_tflops"),
    "fp4": (4.5, "fp4_tflops"),
    "mxfp4 w / fp8": (4.25, "fp8_tflops"),
    "int8": (8, "bf16_tflops"),
    "int4 g32": (5, "bf16_tflops"),
}
GPUS = {"RTX PRO 6000 SE": "RTX PRO 6000 Server", "MI250X one GCD (1638 GB/s)": "MI210"}
MOST_SEQUENCES = 2048  # that TensorRT-LLM's benchmark runs at once
KV_SHARE = 0.9

START = Coefficients(0.8, 0.5, 0.4, 0.5, 2e-3, 2e-5, 2e-6, 1e-7, 8e-6)
SPREAD = (0.2, 0.5, 0.5, 1, 1, 1, 1, 1.5, 1)  # of the logarithm of each, before any point is seen
NAMES = [one.name for one in fields(Coefficients)][: len(SPREAD)]
FIRST_FIT = {"model": 0.227, "gpu": 0.166}  # held-out errors of a first fit, on the points that it was made of


@dataclass(frozen=True)
class Point:
    row: dict
    work: DecoderWork
    machine: Machine
    memory_bytes: int
    weight_bytes: float  # of all ranks

    @property
    def is_batch_1(self) -> bool:
        return self.row["kind"] == "batch1_decode"

    @cached_property
    def batch(self) -> int:
        """As many sequences of full length as the memory beside the weights holds."""
        spare = KV_SHARE * self.memory_bytes - self.weight_bytes / self.work.ranks
        each = self.work.layout.needed_bytes(self.row["isl"] + self.row["osl"])
        return int(min(MOST_SEQUENCES, max(1, spare / each)))

    @cached_property
    def steps(self) -> tuple[StepWork, StepWork]:
        """What a decode step and a prompt compute: the same for all coefficients."""
        if self.is_batch_1:
            return self.work.decode(1, 100), self.work.prefill(1)
        context = self.row["isl"] + self.row["osl"] // 2
        return self.work.decode(self.batch, context), self.work.prefill(self.row["isl"])

    def predicted(self, coefficients: Coefficients) -> float:
        """As `LatencyModel.tokens_per_s`."""
        model, (decode, prefill) = LatencyModel(self.work, self.machine, coefficients), self.steps
        if self.is_batch_1:
            return 1 / model.step_s(decode)
        return self.batch / (model.step_s(decode) + self.batch / self.row["osl"] * model.added_s(prefill))

    def error(self, coefficients: Coefficients) -> float:
        return self.predicted(coefficients) / self.row["output_tok_s"] - 1


def read_points(points: Path, configs: Path) -> list[Point]:
    rows = json.loads(points.read_text())["points"]
    wanted = ("max_throughput", "batch1_decode")
    return [
        _point(row, json.loads((configs / CONFIGS[row["model"]]).read_text()))
        for row in rows
        if row["kind"] in wanted and row["model"] in CONFIGS and row["parallel"].startswith("TP") and "spec" not in row
    ]


def _point(row: dict, config: dict) -> Point:
    config = {**config, **(config.get("text_config") or {})}
    bits, rate = FORMATS[row["weights"]]
    linears = sum(one.out_features * one.in_features * one.count for one in linear_shapes(config))
    weight_bytes = linears * bits / 8 + 2 * other_parameters(config)
    layout = KVCacheLayout.of(
        ModelArchitecture.from_config(config),
        "fp8" if row["kind"] == "max_throughput" and row["weights"] in ("fp8", "fp4") else "bf16",
        tensor_parallel=row["n_gpu"],
        dynamic_scales=False,
    )
    device = find_device(GPUS.get(row["gpu"], row["gpu"].replace("-80GB SXM", "")))
    machine = Machine(
        device.name,
        device.bandwidth_bytes_per_s,
        getattr(device, rate) * 1e12,
        "datasheet",
        device.link_gb_s and device.link_gb_s * 1e9,
        rate == "fp4_tflops",
    )
    work = DecoderWork.of(config, layout, int(weight_bytes), row["n_gpu"])
    return Point(row, work, machine, device.memory_bytes, weight_bytes)


def fit(points: list[Point]) -> Coefficients:
    """Least squares of the logarithms, robust (soft L1), held near START by SPREAD."""
    from scipy.optimize import least_squares

    start = np.log([getattr(START, name) for name in NAMES])

    def residuals(logs: np.ndarray) -> np.ndarray:
        made = Coefficients(*np.exp(logs))
        return np.array(
            [np.log1p(point.error(made)) for point in points] + list(0.3 * (logs - start) / np.array(SPREAD))
        )

    return Coefficients(*(float(one) for one in np.exp(least_squares(residuals, start, loss="soft_l1", f_scale=0.3).x)))


def held_out(points: list[Point], key: str) -> dict[str, list[float]]:
    """For each model or GPU the errors of its points, by coefficients fitted to all others."""
    names = sorted({point.row[key] for point in points})
    made = {name: fit([point for point in points if point.row[key] != name]) for name in names}
    return {name: [one.error(made[name]) for one in points if one.row[key] == name] for name in names}


def mean_error(errors: dict[str, list[float]]) -> float:
    return float(np.mean(np.abs(np.concatenate(list(errors.values())))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    shared = REPOSITORY.parent / "shared"
    parser.add_argument("--points", type=Path, default=shared / "planner" / "throughput_points.json")
    parser.add_argument("--configs", type=Path, default=shared / "data" / "configs")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    options = parser.parse_args()
    points = read_points(options.points, options.configs)
    first = [point for point in points if "roofline_fit_pred_tok_s" in point.row]
    by_model: dict[str, list[float]] = {}
    lines = []
    for name, chosen in (("all", points), ("those of the first fit", first)):
        made = fit(chosen)
        inside = np.mean([abs(point.error(made)) for point in chosen])
        lines.append(f"{len(chosen)} points, {name}: {inside:.1%} off where fitted")
        for key in ("model", "gpu"):
            errors = held_out(chosen, key)
            lines.append(f"  {mean_error(errors):.1%} off where the whole {key} was left out:")
            lines += [f"    {one} {np.mean(np.abs(found)):.0%} of {len(found)}" for one, found in errors.items()]
            if name == "all" and key == "model":
                by_model = errors
    print("\n".join(lines), f"\n(a first fit: {FIRST_FIT['model']:.1%} by models, {FIRST_FIT['gpu']:.1%} by GPUs)")
    made = fit(points)
    # A throughput off by 1 + e is a time off by 1 / (1 + e): the truth lies where the prediction is multiplied by it.
    low, high = np.quantile(1 + np.concatenate(list(by_model.values())), [0.1, 0.9])
    values = {name: getattr(made, name) for name in NAMES} | {"low": low, "high": high}
    text = _FILE.format(
        lines="\n".join(f"# {line}" for line in lines),
        values="\n".join(f"{name} = {value:.4g}" for name, value in values.items()),
    )
    print(text)
    if options.write:
        TARGET.write_text(text)


_FILE = """\
# Written by tests/bench/fit_latency_model.py, from published throughputs: TensorRT-LLM's docs/source/performance/
# perf-overview.md at 00f37686 and docs/source/developer-guide/perf-overview.md at 03e27c7d, and gpt-fast's README at
# 32971d3. What each coefficient is: latency_model.py.
#
{lines}

[coefficients]
{values}
"""

if __name__ == "__main__":
    main()
