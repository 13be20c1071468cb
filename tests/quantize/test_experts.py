"""Mixtures of experts: the router stays, every expert is quantized and run, what cannot is refused at once."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from engine_driver import run_all
from safetensors.torch import load_file, save_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
from llmq.quantize.formats.registry import format_of
from llmq.quantize.layer_stream import TensorReader
from llmq.quantize.preflight import preflight
from llmq.quantize.recipe import Recipe
from llmq.quantize.targets import select_targets
from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def mixture(tiny_llama):
    return tiny_llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)


def test_the_router_is_left_alone(mixture):
    selection = select_targets(read_checkpoint(mixture))
    routers = {name: why for name, why in selection.left_alone.items() if name.endswith("block_sparse_moe.gate")}
    assert len(routers) == 2
    assert all("router" in why for why in routers.values())
    kinds = [target.name for target in selection.targets]
    assert sum(".experts." in name for name in kinds) == 2 * 4 * 3
    assert not any(name.endswith(".gate") for name in kinds)


@pytest.mark.parametrize("method", ["fp8", "smoothquant"])
def test_what_cannot_be_done_with_experts_is_refused_before_work(mixture, tmp_path, method):
    with pytest.raises(InputError, match="mixtral"):
        preflight(read_checkpoint(mixture), Recipe.of(method, backend="llmcompressor"), tmp_path / "out")


def test_rounded_experts_run(mixture, tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "llmq", "quantize", str(mixture), "--rtn", "--group-size", "32", "-o", str(out)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "quantization_report.json").read_text())
    assert any(".gate" in name for name in json.dumps(report).split('"'))
    engine = Engine.from_config(EngineConfig(model=str(out), dtype="fp32", threads=1, device="cpu"))
    made = run_all(engine, [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0))
    assert torch.isfinite(torch.tensor([entry.logprob for entry in made[0].logprobs])).all()
    assert "int4 g32" in engine.info.fingerprint["weights"]


@pytest.mark.parametrize(
    ("recipe", "loaders", "warned"),
    [
        ({"method": "rtn"}, ("llmq", "vllm", "transformers"), False),
        ({"method": "rtn", "symmetric": False}, ("llmq",), True),
        ({"method": "rtn", "symmetric": True}, ("llmq", "vllm", "transformers"), False),
        ({"method": "rtn", "symmetric": True, "bits": 3}, ("llmq", "transformers"), False),
        ({"method": "smoothquant"}, ("llmq", "vllm"), False),
        ({"method": "fp8"}, ("llmq", "vllm", "transformers"), False),
        ({"method": "rtn", "format": "awq", "group_size": "64"}, ("llmq", "vllm", "autoawq"), False),
        ({"method": "rtn", "ignore": ("experts",)}, ("llmq", "vllm", "transformers"), False),
    ],
    ids=str,
)
def test_who_loads_a_mixture_is_said(mixture, tmp_path, recipe, loaders, warned):
    plan = preflight(read_checkpoint(mixture), Recipe.of(**recipe), tmp_path / "out")
    assert plan.loaders == loaders
    assert any("--sym" in warning for warning in plan.warnings) == warned


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_transformers_runs_experts_without_zero_points(tiny_llama, run_quantize, tmp_path, model_type):
    """As it runs the same weights: an expert is unpacked, in the dtype of its scales, to be put into one with all."""
    from transformers import AutoModelForCausalLM

    source = tiny_llama(model_type=model_type, num_experts_per_tok=2, **MIXTURES[model_type][2])
    out, dense = tmp_path / "out", tmp_path / "dense"
    run_quantize(source, out, "rtn", group_size="32")
    checkpoint = read_checkpoint(out)
    read, stored = TensorReader(checkpoint), format_of(checkpoint.quantization, checkpoint.tensors)
    shutil.copytree(source, dense)
    tensors = {}
    for name in read_checkpoint(source).tensors:
        is_packed = name not in checkpoint.tensors
        tensors[name] = (
            stored.read(name.removesuffix(".weight"), read).dequantize() if is_packed else read(name).float()
        )
    assert sum(name not in checkpoint.tensors for name in tensors) == 2 * (4 + 3 * 8)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, dense / "model.safetensors", {"format": "pt"}
    )
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        theirs, ours = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits for folder in (out, dense)
        )
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


MIXTURES = {
    "mixtral": ("block_sparse_moe", ("w1", "w2", "w3"), {"num_local_experts": 8}),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), {"num_experts": 8, "moe_intermediate_size": 64}),
}


@pytest.fixture(scope="module")
def lonely(tiny_llama, tmp_path_factory):
    """lonely(model_type) -> a mixture whose router never chooses expert 7: of two opposite rows one is above the 0 of
    its row, thrice."""
    made = {}

    def make(model_type):
        if model_type not in made:
            block, _, changes = MIXTURES[model_type]
            source = tiny_llama(model_type=model_type, dtype="bfloat16", num_experts_per_tok=2, **changes)
            folder = made[model_type] = tmp_path_factory.mktemp("lonely") / model_type
            shutil.copytree(source, folder)
            tensors = load_file(folder / "model.safetensors")
            for name in tensors:
                if name.endswith(f"{block}.gate.weight"):
                    tensors[name][1::2] = -tensors[name][::2]
                    tensors[name][7] = 0
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return made[model_type]

    return make


@pytest.mark.parametrize(("model_type", "method"), [("mixtral", "awq"), ("mixtral", "gptq"), ("qwen3_moe", "gptq")])
def test_an_expert_that_is_never_chosen_is_calibrated_with_all_tokens_and_named(
    lonely, calibration_jsonl, run_quantize, tmp_path, model_type, method
):
    """C05."""
    source, (block, kinds, _) = lonely(model_type), MIXTURES[model_type]
    report = run_quantize(source, tmp_path / "out", method, calibration_jsonl, group_size="32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    all_tokens = report.calibration["num_tokens"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.{block}"
        experts = {e.name: e for e in report.linears if e.name.startswith(f"{prefix}.experts.")}
        assert len(experts) == 8 * 3
        assert {entry.scheme for entry in experts.values()} == {report.scheme} == {"int4 g32 symmetric"}
        assert {experts[f"{prefix}.experts.7.{w}"].routed_tokens for w in kinds} == {0}
        assert {experts[f"{prefix}.experts.7.{w}"].num_tokens for w in kinds} == {all_tokens}
        routed = [experts[f"{prefix}.experts.{index}.{kinds[0]}"].routed_tokens for index in range(8)]
        assert sum(routed) == 2 * all_tokens
        # GPTQ measures behind an attention that it has rounded: the router may choose otherwise by then.
        measured = experts[f"{prefix}.experts.0.{kinds[0]}"].num_tokens
        assert measured == routed[0] if method == "awq" else 32 < measured < all_tokens
        assert any(f"model.layers.{layer}: the router" in w and "7 (0 tokens)" in w for w in report.warnings)
        assert torch.equal(
            tensors[f"{prefix}.gate.weight"], load_file(source / "model.safetensors")[f"{prefix}.gate.weight"]
        )
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
