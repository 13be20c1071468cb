"""A decoder from the cache of packed weights computes, counts and refuses as one that was packed just now."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from engine_driver import greedy, run_all
from random_weights import make, quantize_folder
from safetensors.torch import load_file, save_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.runtime import packed_cache
from llmq.runtime.kernels import native, why_absent
from llmq.runtime.layers.native_linear import NativeLinear

pytestmark = pytest.mark.skipif(native is None, reason=why_absent)
PROMPTS = [[5, 9, 200, 31], [7] * 40]
# Groups, zero points, an order of columns, static scales of inputs: whatever a packed weight can have.
CHECKPOINTS = [
    "tiny",
    "tiny with biases",
    "tiny in three bits",
    "autogptq-w4g128-asym-actorder",
    "autoawq-w4g128-gemm",
    "llmc-sq-w8a8",
    "llmc-fp8-dynamic",
    "llmc-fp8-static",
]


def in_three_bits(out: int, in_: int, seed: int) -> QuantizedWeight:
    return make("int", 3, "group", out, in_, seed, group_size=32)


@pytest.fixture(params=CHECKPOINTS)
def folder(request, tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr(packed_cache, "_LEAST_BYTES", 0)
    if request.param == "tiny":
        source = tiny_llama(dtype="bfloat16")
    elif request.param == "tiny with biases":
        source = tiny_llama(dtype="bfloat16", model_type="qwen2")
    elif request.param == "tiny in three bits":
        source = quantize_folder(tiny_llama(dtype="bfloat16"), tmp_path / "w3", "gptq", in_three_bits)
    else:
        source = request.getfixturevalue("shared") / "interop" / request.param
    return shutil.copytree(source, tmp_path / "model")


def packings(monkeypatch):
    """Linears that are packed from here on."""
    packed, inner = [], NativeLinear.__init__

    def count(*given, **named):
        packed.append(given)
        inner(*given, **named)

    monkeypatch.setattr(NativeLinear, "__init__", count)
    return packed


def test_the_second_load_packs_nothing_and_computes_alike(folder, make_engine, monkeypatch):
    first = make_engine(folder, dtype="bf16")
    assert "kept in" in first.info.packed_weights
    packed = packings(monkeypatch)
    second = make_engine(folder, dtype="bf16")
    assert not packed
    assert "from" in second.info.packed_weights
    assert second.info.fingerprint == first.info.fingerprint
    assert second.info.weight_bytes == first.info.weight_bytes
    params = greedy(12, logprobs=3)
    assert run_all(second, PROMPTS, params) == run_all(first, PROMPTS, params)


def test_changed_weights_are_packed_anew(folder, make_engine, monkeypatch):
    make_engine(folder, dtype="bf16")
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    tensors = {name: tensor.neg() if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    packed = packings(monkeypatch)
    make_engine(folder, dtype="bf16")
    assert packed


def test_what_is_missing_or_unused_is_refused_alike(folder, make_engine):
    make_engine(folder, dtype="bf16")
    path = next(folder.glob("*.safetensors"))
    save_file({**load_file(path), "model.layers.0.unknown": torch.ones(1)}, path)
    for _ in range(2):
        with pytest.raises(InputError, match=r"layers\.0\.unknown"):
            make_engine(folder, dtype="bf16")


def test_float32_and_torch_keep_nothing(folder, make_engine):
    assert make_engine(folder, dtype="fp32").info.packed_weights == ""
    assert make_engine(folder, dtype="bf16", kernels="torch").info.packed_weights == ""
    assert not list((folder / packed_cache.FOLDER).glob("*.bin"))


LOADED = """
import sys, torch
from llmq.profiles.checkpoint import read_checkpoint
from llmq.runtime import packed_cache, weights
from llmq.runtime.dtypes import NativeNumerics
from llmq.runtime.models.loader import make_loader
def peak_bytes():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
weights._MAPPED_BYTES = packed_cache._LEAST_BYTES = packed_cache._PIECE_BYTES = 2 << 20  # of a small model
def load(folder):
    loader = make_loader(
        read_checkpoint(folder), torch.bfloat16, torch.device("cpu"), native=NativeNumerics(False, False)
    )
    return loader, loader.load(64)
load(sys.argv[1])  # whatever a first load imports
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = peak_bytes()
loader, decoder = load(sys.argv[2])
assert "kept in" in loader.packed_weights, loader.packed_weights
print(peak_bytes() - before, decoder.num_bytes)
"""


def test_packing_needs_little_more_memory_than_the_packed_weights(tiny_llama, tmp_path):
    """Not the checkpoint, nor all that was packed beside its file: 90 MiB of bf16 in layers of 7.

    The least of some runs: pages of libraries that a system takes away while they are idle come back in the middle."""
    large = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    source = tiny_llama(dtype="bfloat16", **large)
    warm_up = shutil.copytree(tiny_llama(dtype="bfloat16"), tmp_path / "warm up")
    ratios = []
    while len(ratios) < 5 and (not ratios or min(ratios) >= 1.3):
        folder = shutil.copytree(source, tmp_path / f"model {len(ratios)}")
        command = [sys.executable, "-c", LOADED, str(warm_up), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        grown, packed = map(int, done.stdout.split())
        ratios.append(grown / packed)
    assert packed > 80 << 20
    assert sum(read_checkpoint(folder).tensor_bytes().values()) > 80 << 20
    assert min(ratios) < 1.3, ratios
