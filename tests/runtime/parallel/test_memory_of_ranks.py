"""The 256K problem: a model of 70B parameters at 262,144 tokens on 8 ranks. What `kv-budget` says of a rank is what the
runtime allocates on it, here on the meta device, which counts bytes and holds none."""

import json
from pathlib import Path

import pytest
import torch
from published_configs import LLAMA_70B
from thread_ranks import Meeting, ThreadRank
from tiny_model import save_tiny_model
from typer.testing import CliRunner

from llmq.cli.kv_budget import app
from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.safetensors_file import REMOTE_HEADERS
from llmq.runtime.config import EngineConfig
from llmq.runtime.dtypes import Dtypes
from llmq.runtime.kv_store import KVStore
from llmq.runtime.memory import plan_kv_cache, rank_layout
from llmq.runtime.models.loader import make_loader
from llmq.runtime.parallel.stage_plan import stages_of
from llmq.runtime.weights import TensorReader

GiB = 2**30
TOKENS, RANKS = 262_144, 8
META = torch.device("meta")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """config.json and the headers of bf16 weights, as of a model that was only looked at on the hub."""
    made = tmp_path_factory.mktemp("70b")
    config = {**LLAMA_70B, "max_position_embeddings": TOKENS, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (made / "config.json").write_text(json.dumps(config))
    hidden, wide, kv = 8192, 28_672, 1024
    shapes = {name: [128_256, hidden] for name in ("model.embed_tokens", "lm_head")} | {"model.norm": [hidden]}
    for layer in (f"model.layers.{number}" for number in range(80)):
        shapes |= {f"{layer}.{name}_layernorm": [hidden] for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": [hidden if name in "qo" else kv, hidden] for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": [wide, hidden] for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = [hidden, wide]
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    (made / REMOTE_HEADERS).write_text(json.dumps({"model.safetensors": header}))
    return made


def budget(folder: Path, *flags: str) -> dict:
    return answer(folder, "--tp", str(RANKS), *flags)["per_rank"]


def answer(folder: Path, *flags: str) -> dict:
    flags = (str(folder), "--ctx", "256k", "--kv-dtype", "fp8", "--json", *flags)
    return json.loads(CliRunner().invoke(app, flags, catch_exceptions=False).stdout)


@pytest.mark.parametrize("scales", ["static", "dynamic"])
def test_the_kv_cache_of_a_rank(folder, scales):
    said = budget(folder, "--kv-scales", scales)
    assert said["payload_bytes_per_token"] * TOKENS == 5 * GiB
    assert said["scale_bytes_per_token"] == {"static": 0, "dynamic": 80 * 2 * 2}[scales]
    config = EngineConfig(
        model=str(folder), tensor_parallel=RANKS, kv_dtype="fp8", kv_cache_memory_bytes=said["reserved_bytes"]
    )
    plan = plan_kv_cache(
        read_checkpoint(folder).architecture, config, Dtypes("bf16", "fp8", has_static_kv_scales=scales == "static"), 0
    )
    assert (plan.max_model_len, plan.num_blocks) == (TOKENS, TOKENS // 16)
    given = dict.fromkeys(range(80), (1.0, 1.0)) if scales == "static" else None
    store = KVStore(plan.layout, plan.num_blocks, META, given)
    assert store.num_bytes == said["reserved_bytes"]
    parts = [part for layer in range(80) for part in store.parts(layer)]
    assert {tuple(part.payload.shape) for part in parts} == {(TOKENS // 16, 16, 1, 128)}
    assert sum(part.payload.nbytes for part in parts) == 5 * GiB
    # One block less, and the request does not fit.
    tight = EngineConfig(
        model=str(folder), tensor_parallel=RANKS, kv_dtype="fp8", kv_cache_memory_bytes=said["reserved_bytes"] - 1
    )
    plan = plan_kv_cache(
        read_checkpoint(folder).architecture, tight, Dtypes("bf16", "fp8", has_static_kv_scales=scales == "static"), 0
    )
    assert plan.max_model_len == TOKENS - 16


@pytest.fixture
def on_meta(folder, monkeypatch) -> None:
    """Tensors of the folder, without numbers."""
    shapes = {name: info.shape for name, info in read_checkpoint(folder).tensors.items()}

    def read(reader: TensorReader, name: str) -> torch.Tensor:
        reader.read.append(name)
        return torch.empty(shapes[name], dtype=torch.bfloat16, device=META)

    monkeypatch.setattr(TensorReader, "__call__", read)


def test_the_weights_of_a_rank(folder, on_meta):
    checkpoint = read_checkpoint(folder)
    decoder = make_loader(checkpoint, torch.bfloat16, META, collectives=ThreadRank(Meeting(RANKS), 0)).load(TOKENS)
    # All is an eighth but the norms, which each rank holds.
    norms = 161 * 8192 * 2
    assert decoder.num_bytes == (checkpoint.total_bytes - norms) // RANKS + norms
    said = budget(folder)["weight_bytes"]
    assert decoder.num_bytes - said == norms - norms // RANKS


def test_ranks_of_stages(folder, on_meta):
    """Two ranks in each of five stages: what `kv-budget` says of a rank of each is what it holds."""
    said = answer(folder, "--tp", "2", "--pp", "5", "--kv-scales", "static", "--gpu", "h100")
    checkpoint, dtypes = read_checkpoint(folder), Dtypes("bf16", "fp8", has_static_kv_scales=True)
    stages = stages_of(checkpoint, 5)
    assert [tuple(stage["layers"]) for stage in said["stages"]] == [stage.layers for stage in stages]
    assert said["pipeline_parallel"] == 5
    fullest = max(stage["reserved_bytes"] for stage in said["stages"])
    assert said["per_rank"]["reserved_bytes"] == fullest
    config = EngineConfig(
        model=str(folder), tensor_parallel=2, pipeline_parallel=5, kv_dtype="fp8", kv_cache_memory_bytes=fullest
    )
    plan = plan_kv_cache(checkpoint.architecture, config, dtypes, 0, stages)
    assert (plan.max_model_len, plan.num_blocks, plan.kv_cache_bytes) == (TOKENS, TOKENS // 16, fullest)
    weights = payload = 0
    for stage, of_stage in zip(stages, said["stages"], strict=True):
        layout = rank_layout(checkpoint.architecture, config, dtypes, stage)
        num_layers = stage.layers[1] - stage.layers[0]
        store = KVStore(layout, plan.num_blocks, META, dict.fromkeys(range(num_layers), (1.0, 1.0)))
        assert store.num_bytes == of_stage["reserved_bytes"]
        payload += store.num_bytes
        rank = ThreadRank(Meeting(2), 0)
        decoder = make_loader(checkpoint, torch.bfloat16, META, collectives=rank, stage=stage).load(TOKENS)
        norms = (2 * num_layers + stage.is_last) * 8192 * 2  # each rank holds them whole, the budget splits them
        assert decoder.num_bytes - of_stage["weight_bytes"] == norms // 2
        weights += of_stage["weight_bytes"]
    assert 2 * weights == checkpoint.total_bytes
    assert 2 * payload == RANKS * 5 * GiB
    assert said["total"]["bytes_per_token"] * TOKENS == RANKS * 5 * GiB
    # Every stage has room for the blocks that the tightest has room for.
    free = [int(said["memory"]["bytes"] * 0.9) - stage["weight_bytes"] for stage in said["stages"]]
    rooms = [room // stage["block_bytes"] for room, stage in zip(free, said["stages"], strict=True)]
    assert said["memory"]["num_blocks"] == min(rooms)


def test_what_cannot_be_cut_is_refused_by_the_budget(folder):
    done = CliRunner().invoke(app, (str(folder), "--pp", "81"))
    assert "--pp 81: a stage holds one layer or more, and this model has 80; valid: 1 to 80" in str(done.exception)
    done = CliRunner().invoke(app, (str(folder), "--pp", "2", "--gpu", "h100", "--engine", "vllm@0.11.0"))
    assert "--pp is about llmq's own cache" in str(done.exception)


def test_an_embedding_that_is_the_head_is_said_to_be_held_twice(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2", tie_word_embeddings=True)
    said = CliRunner().invoke(app, (str(folder), "--pp", "2"), catch_exceptions=False).stdout
    assert "The head is the embedding: the first stage holds it, and the last one again." in said
    stages = json.loads(CliRunner().invoke(app, (str(folder), "--pp", "2", "--json")).stdout)["stages"]
    checkpoint = read_checkpoint(folder)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].num_bytes
    assert sum(stage["weight_bytes"] for stage in stages) == checkpoint.total_bytes + embedding
