"""A Launch compiled for a GPU that is not here, and what the compiler made of it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmq.runtime.kernels.triton.launch import Launch, Target

TARGETS = {
    "sm_80": Target("cuda", 80, 108),
    "sm_89": Target("cuda", 89, 142),
    "sm_90": Target("cuda", 90, 132),
    "sm_100": Target("cuda", 100, 148),
    "sm_120": Target("cuda", 120, 170),
    "gfx942": Target("hip", "gfx942", 304),
}
# Bytes of shared memory that one program may have: CUDA C programming guide, table of compute capabilities; CDNA 3 ISA.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10, "gfx942": 64 << 10}
_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Compiled:
    registers: int
    spill_bytes: int  # of local memory, stack frames included
    shared_bytes: int
    instructions: dict[str, int]  # of the disassembly, by mnemonic


def compile_for(launch: Launch, target: Target) -> Compiled:
    """What Triton's launcher would compile from these arguments. Pointers are taken as aligned to 16 bytes."""
    names = list(launch.kernel.arg_names)
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        if name in launch.constants:
            signature[name], constants[name] = "constexpr", launch.constants[name]
            continue
        value = launch.arguments[name]
        # As at a launch: None and 1 are constants, multiples of 16 are known to be.
        if value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = f"*{_NAMES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    gpu = GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    made = triton.compile(ASTSource(launch.kernel, signature, constants, attributes), target=gpu, options=options)
    return _read_amd(made) if target.backend == "hip" else _read_nvidia(made)


def _read_nvidia(made) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        disassembly = _run("nvdisasm", "-c", file.name)
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    counts: dict[str, int] = {}
    for mnemonic in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", disassembly, re.M):
        counts[mnemonic] = counts.get(mnemonic, 0) + 1
    if not counts or "REG" not in numbers:
        raise AssertionError(f"the disassembly could not be read: {usage[:300]}")
    return Compiled(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], made.metadata.shared, counts)


def _read_amd(made) -> Compiled:
    text = made.asm["amdgcn"]
    fields = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text))
    counts: dict[str, int] = {}
    for mnemonic in re.findall(r"^\s+([vsd][a-z0-9]*_[a-z0-9_]+)", text, re.M):
        counts[mnemonic] = counts.get(mnemonic, 0) + 1
    # Scalar registers are spilled to lanes of vector ones, which is no memory.
    spill = max(4 * int(fields["vgpr_spill_count"]), int(fields["private_segment_fixed_size"]))
    return Compiled(int(fields["vgpr_count"]), spill, made.metadata.shared, counts)


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
