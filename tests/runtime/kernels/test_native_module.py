"""The compiled module: how weights are packed, its threads, and what a process may do with it."""

import os

import pytest
import torch

from llmq.runtime.kernels import native, why_absent

pytestmark = pytest.mark.skipif(native is None, reason=f"no native kernels here: {why_absent}")

BYTE_OF_INPUT = (0, 2, 1, 3)


def test_int4_numbers_lie_where_the_header_says():
    out, in_ = 21, 19
    u = torch.randint(0, 16, (out, in_), dtype=torch.uint8)
    packed = torch.full((native.packed_bytes(native.Numbers.int4, out, in_),), 0xAA, dtype=torch.uint8)
    native.pack_numbers(native.Numbers.int4, u.data_ptr(), out, in_, packed.data_ptr())
    lines = packed.view(2, 3, 16, 4)
    seen = torch.zeros(32, 24, dtype=torch.uint8)
    for row in range(32):
        for column in range(24):
            byte = lines[row // 16, column // 8, row % 16, BYTE_OF_INPUT[column % 4]]
            seen[row, column] = byte >> 4 if column % 8 >= 4 else byte & 15
    assert torch.equal(seen[:out, :in_], u)
    assert not seen[out:].any()
    assert not seen[:, in_:].any()


@pytest.mark.parametrize(("numbers", "per_line"), [("int8", 4), ("bf16", 2)])
def test_wider_numbers_lie_where_the_header_says(numbers, per_line):
    out, in_ = 35, 30
    kind = getattr(native.Numbers, numbers)
    dtype = torch.uint8 if numbers == "int8" else torch.int16
    u = torch.randint(0, 256, (out, in_)).to(dtype)
    packed = torch.full((native.packed_bytes(kind, out, in_),), 0xAA, dtype=torch.uint8)
    native.pack_numbers(kind, u.data_ptr(), out, in_, packed.data_ptr())
    lines = packed.view(dtype).view(3, 32 // per_line, 16, per_line)
    order = BYTE_OF_INPUT if numbers == "int8" else (0, 1)
    seen = lines[..., list(order)].permute(0, 2, 1, 3).reshape(48, 32)
    assert torch.equal(seen[:out, :in_], u)
    assert not seen[out:].any()
    assert not seen[:, in_:].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_groups_lie_by_blocks_of_outputs(dtype):
    rows = torch.randint(1, 100, (37, 5)).to(dtype)
    packed = torch.empty(3, 5, 16, dtype=dtype)
    native.pack_groups(dtype.itemsize, rows.data_ptr(), 37, 5, packed.data_ptr())
    assert torch.equal(packed.transpose(1, 2).reshape(48, 5)[:37], rows)
    assert not packed[2, :, 5:].any()


@pytest.fixture
def two_threads():
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


def pack_something() -> torch.Tensor:
    u = torch.arange(16, dtype=torch.uint8).repeat(512, 4)
    packed = torch.empty(native.packed_bytes(native.Numbers.int4, *u.shape), dtype=torch.uint8)
    native.pack_numbers(native.Numbers.int4, u.data_ptr(), *u.shape, packed.data_ptr())
    return packed


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    made = pack_something()
    child = os.fork()
    if child == 0:
        os._exit(0 if native.num_threads() == 2 and torch.equal(pack_something(), made) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(pack_something(), made)


def test_a_lesser_instruction_set_is_run_only_where_it_is_named():
    best = native.native_isa()
    native.force_isa("avx2")
    assert native.isa() == "avx2"
    native.force_isa(best)
    with pytest.raises(ValueError, match=f"mmx: this CPU runs up to {best}"):
        native.force_isa("mmx")
