"""The GPU's script at tiny sizes, in the interpreter: what it times and prints must not fail on the first GPU."""

import time

import bench_gpu
import gpu_timings
import pytest
import torch
from gpu_timings import Machine, NotTimedError, Peaks, Sizes, rotate, run_timings

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


def seconds_of(call, copies):
    begin = time.perf_counter()
    for copy in range(copies):
        call(copy)
    return (time.perf_counter() - begin) / copies


def machine(**changes) -> Machine:
    fields = {"seconds_of": seconds_of, "free_bytes": lambda: 1 << 30, "min_bytes": 1, **changes}
    return Machine(torch.device("cpu"), "the interpreter", dtype=torch.float16, **fields)


def test_everything_is_timed_and_printed():
    lines = []
    peaks = gpu_timings.measure_peaks(machine(), TINY)
    rows, failed = run_timings(machine(), TINY, peaks, time.monotonic() + 300, lines.append)
    assert not failed
    # weights, decode and prefill, experts, row kernels, sampling
    assert len(rows) == len(lines) == 2 * 2 + 3 * (2 + 2) + 2 + 3 * 2 + 1
    assert all(row.us > 0 and row.floor_us > 0 for row in rows)
    assert len({(row.section, row.what) for row in rows}) == len(rows)
    assert all(len(line) <= 130 for line in lines)


def test_what_there_is_no_time_for_is_said():
    lines, ticks = [], iter(range(100))
    rows, failed = run_timings(machine(clock=lambda: next(ticks)), TINY, Peaks(1e9, 1e12), 2, lines.append)
    assert (len(rows), failed) == (3, [])
    assert lines[-1] == "22 timings left out: no time"


def test_what_does_not_fit_or_fails_costs_no_other_row():
    lines = []
    small = machine(free_bytes=lambda: 3000)
    rows, failed = run_timings(small, TINY, Peaks(1e9, 1e12), time.monotonic() + 300, lines.append)
    assert rows
    assert not failed
    assert any(line.startswith("not timed: ") for line in lines)
    with pytest.raises(NotTimedError, match="GiB of data"):
        rotate(small, 2000, list)

    def broken(call, copies):
        raise RuntimeError("illegal memory access")

    rows, failed = run_timings(machine(seconds_of=broken), TINY, Peaks(1e9, 1e12), time.monotonic() + 300, lines.append)
    assert not rows
    assert failed[0] == "RuntimeError: illegal memory access"


def test_small_data_is_copied_until_no_cache_holds_it():
    assert len(rotate(machine(min_bytes=1000), 300, list)) == 4
    assert len(rotate(machine(min_bytes=1000), 1, list)) == 64
    assert len(rotate(machine(min_bytes=1000), 5000, list)) == 1


def test_kernels_are_checked_in_processes_of_their_own():
    jobs = bench_gpu.check_jobs(("float16", "float32"), most=1)
    assert len(jobs) == 8
    right, wrong = bench_gpu.check_kernels(jobs[4:], 240, workers=1)
    assert (right, wrong) == (4, [])
    right, wrong = bench_gpu.check_kernels([("gate", 0, "no_dtype")], 240, workers=1)
    assert right == 0
    assert wrong[0].startswith("gate 0 no_dtype: AttributeError")
