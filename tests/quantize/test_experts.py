"""Mixtures of experts: the router stays, every expert is quantized and run, what cannot is refused at once."""

import json
import os
import subprocess
import sys

import pytest
import torch
from engine_driver import run_all

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
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


@pytest.mark.parametrize("method", ["gptq", "fp8", "smoothquant"])
def test_what_cannot_be_done_with_experts_is_refused_before_work(mixture, tmp_path, method):
    with pytest.raises(InputError, match="mixtral"):
        preflight(read_checkpoint(mixture), Recipe.of(method), tmp_path / "out")


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
