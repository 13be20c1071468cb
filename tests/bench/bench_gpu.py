"""Every Triton kernel on the GPU of this machine: first against float64, then against its memory and its cores.

    python tests/bench/bench_gpu.py [--seconds 330] [--json FILE]

One command for a machine that has torch (2.11 or later), triton (3.6 or later) and nothing else of ours: it builds
nothing, downloads nothing, and ends in time. Exit code 0: every kernel is right; 1: one is not; 2: no GPU here.
"""

import argparse
import json
import multiprocessing
import sys
import time
import types
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def find_llmq() -> None:
    """Make `llmq` of this checkout where it is not installed, and the tests' support modules, importable."""
    sys.path[:0] = [str(REPOSITORY / "tests/support"), str(REPOSITORY / "tests/bench")]
    if "llmq" not in sys.modules:
        package = types.ModuleType("llmq")
        package.__path__ = [str(REPOSITORY)]
        sys.modules["llmq"] = package


if __name__ in ("__main__", "__mp_main__"):
    find_llmq()

import torch  # noqa: E402

CHECK_WORKERS = 8


def check_one(job: tuple[str, int, str]) -> list[str]:
    """What is wrong with a kernel at one seed in one dtype; in a process of its own, for compiling takes a while."""
    name, seed, dtype = job
    from triton_cases import CASES, Place

    from llmq.runtime.kernels.triton.launch import Target

    case = next(case for case in CASES if case.__name__ == name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        checks = list(case(Place(device, Target.of(device), getattr(torch, dtype), seed)))
    except Exception as error:
        return [f"{name} {seed} {dtype}: {type(error).__name__}: {str(error)[:500]}"]
    wrong = [c for c in checks if not c.passes]
    return [f"{name} {seed} {dtype}: {c.what}: {c.error:.2e} > {c.tolerance:.0e}" for c in wrong]


def check_kernels(jobs: list[tuple[str, int, str]], seconds: float, workers: int = CHECK_WORKERS) -> tuple[int, list]:
    """(how many cases were right, what is wrong with the others, those that there was no time for among them)."""
    right, wrong, deadline = 0, [], time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = [(job, pool.apply_async(check_one, (job,))) for job in jobs]
        for job, result in results:
            try:
                found = result.get(max(0.1, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                found = [f"{job[0]} {job[1]} {job[2]}: not done in {seconds:.0f} s"]
            right += not found
            wrong += found
    return right, wrong


def check_jobs(dtypes: tuple[str, ...], most: int | None = None) -> list[tuple[str, int, str]]:
    from triton_cases import CASES

    return [
        (case.__name__, seed, dtypes[seed % len(dtypes)])
        for case, count in CASES.items()
        for seed in range(count if most is None else min(count, most))
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=330.0, help="ends by then [330]")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device here", file=sys.stderr)
        return 2
    begin = time.monotonic()
    import triton
    from gpu_timings import FULL, HEADER, cuda_machine, measure_peaks, run_timings

    machine = cuda_machine()
    print(f"{machine.name}, torch {torch.__version__}, triton {triton.__version__}")
    jobs = check_jobs(("bfloat16", "float16"))
    right, wrong = check_kernels(jobs, 0.45 * options.seconds)
    print(f"{right} of {len(jobs)} cases equal float64 ({time.monotonic() - begin:.0f} s)", *wrong, sep="\n  ")
    peaks = measure_peaks(machine, FULL)
    print(f"memory {peaks.bytes_per_s / 1e12:.2f} TB/s (a copy), products {peaks.flops / 1e12:.0f} TFLOP/s")
    print(HEADER)
    rows, failed = run_timings(machine, FULL, peaks, begin + options.seconds - 20)
    if options.json:
        found = {
            "device": machine.name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "right": right,
            "wrong": wrong,
            "failed": failed,
            "peaks": asdict(peaks),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
