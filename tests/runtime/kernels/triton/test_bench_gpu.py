"""The GPU's script in the interpreter: how it keeps time, and what it leaves of a run that is cut off."""

import json

import bench_gpu
import gpu_timings
import pytest
from gpu_timings import NotTimedError, Row, Table, interpreting_machine, rotate


def row(what="1 row"):
    return Row("section", what, 2.0, 1.0, "note")


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path):
    def cut_off():
        raise KeyboardInterrupt

    lines, path = [], tmp_path / "found.json"
    table = Table(path, lines.append)
    table.facts = {"device": "none"}
    with pytest.raises(KeyboardInterrupt):
        table.fill([("section", row), ("section", cut_off)], 1.0, lambda: 0.0)
    assert lines == [str(row())]
    found = json.loads(path.read_text())
    assert (found["device"], found["rows"][0]["us"]) == ("none", 2.0)


def test_what_there_is_no_time_for_is_named(tmp_path):
    lines, ticks = [], iter(range(100))
    table = Table(None, lines.append)
    table.fill([("first", row)] * 3 + [("second", row)] * 2 + [("third", row)], 1, lambda: next(ticks))
    assert len(table.rows) == 2
    assert lines[-1] == "no time for: first, 2 of second, third"


def test_what_does_not_fit_or_fails_costs_no_other_row():
    def no_room():
        rotate(interpreting_machine(free_bytes=lambda: 3000), 2000, list)

    def broken():
        raise RuntimeError("illegal memory access")

    lines = []
    table = Table(None, lines.append)
    table.fill([("a", no_room), ("b", broken), ("c", row)], 1.0, lambda: 0.0)
    assert table.not_timed == ["a: 0.0 GiB of data"]
    assert table.failed == ["b: RuntimeError: illegal memory access"]
    assert [line.split(":")[0] for line in lines[:2]] == ["not timed", "failed"]
    assert len(table.rows) == 1


def test_small_data_is_copied_until_no_cache_holds_it():
    machine = interpreting_machine(min_bytes=1000)
    assert len(rotate(machine, 300, list)) == 4
    assert len(rotate(machine, 1, list)) == 64
    assert len(rotate(machine, 5000, list)) == 1
    with pytest.raises(NotTimedError, match="GiB of data"):
        rotate(machine, gpu_timings.MOST_BYTES + 1, list)


def test_a_kernel_that_is_wrong_is_said():
    right, wrong = bench_gpu.check_kernels([("gate", 0, "no_dtype")], 240, workers=1)
    assert right == 0
    assert wrong[0].startswith("gate 0 no_dtype: AttributeError")
