"""Every Triton kernel on the GPU of this machine, and whole models on our engine: against float64, then against time.

    python tests/bench/bench_gpu.py [--seconds 340] [--json FILE] [--dry-run]

One command for a machine that has torch (2.11 or later) and triton (3.6 or later): it builds nothing, downloads nothing
and reads no model. Models of 8B and 70B have random weights made on the device; they need our engine's few packages
(`gpu_models.NEEDED`; where they are not installed, `pip install --target FOLDER` and PYTHONPATH), and their peer needs
transformers. What is not there is said, and costs no other row.

Each row is printed, and FILE written, as it comes. When time runs out rows are left out from the end of this order,
and named: kernels against float64 (0.3 of the time at most); whole models (up to 0.75 of it): 8B beside transformers'
continuous batching, in 16 bits, int4 and FP8, then 70B in int4 and FP8; single kernels: int4 and FP8 weights, decode
and prefill in 16 bits, FP8 and INT8 blocks, experts, row kernels, sampling.

--dry-run does all of it at tiny sizes, on any CPU, in Triton's interpreter: the first GPU should find no mistake here.
Exit code 0: every kernel is right, and no row failed; 1: one is not, or did; 2: no GPU here, or no triton.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import types
from dataclasses import asdict
from importlib.util import find_spec
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
    parser.add_argument("--seconds", type=float, default=340.0, help="ends by then [340]")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    elif not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device here (--dry-run tries everything on a CPU)", file=sys.stderr)
        return 2
    if find_spec("triton") is None:
        print("no kernels: triton is not installed here", file=sys.stderr)
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"
    begin = time.monotonic()
    import triton
    from gpu_models import EIGHT, SEVENTY, model_timings
    from gpu_models import TINY as TINY_MODEL
    from gpu_timings import FULL, HEADER, TINY, Table, cuda_machine, interpreting_machine, measure_peaks, timings

    machine, sizes, plans = cuda_machine, FULL, [EIGHT, SEVENTY]
    dtypes, most, workers = ("bfloat16", "float16"), None, CHECK_WORKERS
    if options.dry_run:
        machine, sizes, plans = interpreting_machine, TINY, [TINY_MODEL]
        dtypes, most, workers = ("float32",), 1, 1
    machine, table = machine(), Table(options.json)
    table.facts = {"device": machine.name, "torch": torch.__version__, "triton": triton.__version__}
    table.say(", ".join(f"{name} {value}" for name, value in table.facts.items()))
    jobs = check_jobs(dtypes, most)
    right, wrong = check_kernels(jobs, 0.3 * options.seconds, workers)
    table.facts |= {"right": right, "cases": len(jobs), "wrong": wrong}
    table.say("\n  ".join([f"{right} of {len(jobs)} cases equal float64 ({time.monotonic() - begin:.0f} s)", *wrong]))
    peaks = measure_peaks(machine, sizes)
    table.facts["peaks"] = asdict(peaks)
    table.say(f"memory {peaks.bytes_per_s / 1e12:.2f} TB/s (a copy), products {peaks.flops / 1e12:.0f} TFLOP/s")
    table.say(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        models = model_timings(plans, Path(folder), machine, peaks)
        table.fill(models, begin + 0.75 * options.seconds, machine.clock)
    table.fill(timings(machine, sizes, peaks), begin + options.seconds - 20, machine.clock)
    table.say(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong or table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
