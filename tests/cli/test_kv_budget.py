import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from llmq.cli.kv_budget import app
from llmq.profiles.errors import InputError

GiB, MiB = 2**30, 2**20
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
GEMMA_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path):
    """folder(config) -> a folder that holds this config.json and nothing else."""

    def make(config: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


def budget(*args: str) -> dict:
    return json.loads(text(*args, "--json"))


def text(*args: str) -> str:
    done = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_documents_model_at_256k(folder):
    model = folder(LLAMA_70B)
    result = budget(model, "--ctx", "256000", "--tp", "8")
    assert result["total"]["bytes_per_token"] == 327_680
    assert round(result["total"]["sequence_bytes"] / GiB, 1) == 78.1
    assert result["per_rank"]["sequence_bytes"] < 10 * GiB
    assert result["total"]["sequence_bytes_without_gqa"] == 8 * result["total"]["sequence_bytes"] > 600 * GiB

    assert budget(model, "--ctx", "256k")["total"]["sequence_bytes"] == 80 * GiB
    shown = text(model, "--ctx", "256k")
    assert "KV of 262,144 tokens" in shown
    assert "256k is read as 262,144 tokens (k = 1024); 256,000 tokens take 78.1 GiB." in shown
    assert "without GQA (64 KV heads)" in shown


def test_half_a_card_of_fp8_blocks_holds_one_sequence_of_262144(folder):
    args = ("--kv-dtype", "fp8", "--memory", "80GiB", "--weights", "40GiB", "--ctx", "256k")
    result = budget(folder(LLAMA_70B), *args)
    assert result["per_rank"]["payload_bytes_per_token"] == 163_840
    assert result["memory"]["longest_sequence"] == 262_144
    assert result["memory"]["num_sequences"] == 1


def test_scales_are_counted_where_they_are_dynamic(folder):
    model = folder(LLAMA_70B)
    static, dynamic = (
        budget(model, "--kv-dtype", "fp8", "--kv-scales", how)["per_rank"] for how in ("static", "dynamic")
    )
    assert static["scale_bytes_per_token"] == 0
    assert dynamic["scale_bytes_per_token"] == 2560
    assert dynamic["payload_bytes_per_token"] == static["payload_bytes_per_token"]


def test_a_gpu_is_used_to_its_utilization_and_shared_with_the_weights(folder):
    model = folder(LLAMA_70B)
    result = budget(model, "--gpu", "h100", "--tp", "8")
    usable = int(round(79.2 * GiB) * 0.9)
    assert result["memory"]["kv_cache_bytes"] == usable - result["per_rank"]["weight_bytes"]
    more = budget(model, "--gpu", "h100", "--tp", "8", "--gpu-memory-utilization", "0.95")
    assert more["memory"]["num_blocks"] > result["memory"]["num_blocks"]


def test_weights_that_do_not_fit_are_said_to(folder):
    result = budget(folder(LLAMA_70B), "--gpu", "h100")
    assert result["memory"]["num_blocks"] == 0
    assert result["memory"]["kv_cache_bytes"] < 0
    assert "The weights alone are" in text(folder(LLAMA_70B), "--gpu", "h100")


def test_a_sequence_that_does_not_fit_is_said_to(folder):
    shown = text(folder(SMOLLM2), "--kv-cache-memory", "64MiB")
    assert "Not one sequence fits" in shown
    assert "2,912" in shown


def test_c28_windows(folder):
    result = budget(folder(GEMMA_1B), "--ctx", "32k")
    assert result["total"]["sequence_bytes"] == 139 * MiB
    assert result["per_rank"]["uniform_bytes"] == 832 * MiB
    assert 139 * MiB < result["per_rank"]["reserved_bytes"] < 160 * MiB
    shown = text(folder(GEMMA_1B))
    assert "in whole blocks, as serve holds it" in shown
    assert "if no layer had a window" in shown


@pytest.mark.parametrize("config", [SMOLLM2, GEMMA_1B])
@pytest.mark.parametrize("memory", ["64MiB", "100MB", "1GiB"])
@pytest.mark.parametrize("block_size", ["16", "32"])
def test_the_number_of_blocks_is_what_the_runtime_allocates(folder, config, memory, block_size):
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.profiles.units import parse_bytes
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import Dtypes
    from llmq.runtime.memory import plan_kv_cache

    printed = budget(folder(config), "--kv-cache-memory", memory, "--block-size", block_size)
    engine = EngineConfig(model="", kv_cache_memory_bytes=parse_bytes(memory), block_tokens=int(block_size))
    dtypes = Dtypes.of(config["torch_dtype"], None, engine)
    plan = plan_kv_cache(ModelArchitecture.from_config(config), engine, dtypes, available_bytes=0)
    assert printed["memory"]["num_blocks"] == plan.num_blocks
    assert min(printed["memory"]["longest_sequence"], config["max_position_embeddings"]) == plan.max_model_len


def test_auto_on_a_machine_without_gpu_gives_what_serve_would_take(folder, monkeypatch):
    from llmq.profiles import machine

    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 10 * GiB)
    result = budget(folder(SMOLLM2), "--gpu", "auto")
    from llmq.runtime.memory import CPU_SHARE

    assert result["memory"]["kv_cache_bytes"] == int((10 * GiB - 269_030_016) * CPU_SHARE)


def test_auto_shares_a_machine_out_to_its_ranks_as_serve_does(tiny_llama, monkeypatch):
    from llmq.profiles import machine
    from llmq.runtime import worker
    from llmq.runtime.config import EngineConfig

    model = str(tiny_llama(num_hidden_layers=4))
    monkeypatch.setattr(machine, "gpus", list)
    for module in (machine, worker):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: 8 * MiB)
    printed = [budget(model, "--gpu", "auto", "--tp", str(ranks))["memory"]["num_blocks"] for ranks in (1, 2)]
    config = EngineConfig(model=model, device="cpu", threads=1)
    two = worker.Worker(msgspec.structs.replace(config, tensor_parallel=2))
    assert printed == [worker.Worker(config).plan_early().num_blocks, two.plan_early().num_blocks]


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"num_key_value_heads": 1, "head_dim": 32}], ids=repr)
def test_a_drafter_takes_the_blocks_and_the_memory_that_serve_gives_it(tiny_llama, monkeypatch, changes):
    from llmq.profiles import machine
    from llmq.runtime import worker
    from llmq.runtime.config import EngineConfig, Speculation

    model, drafter = str(tiny_llama(num_hidden_layers=4)), str(tiny_llama(**changes))
    monkeypatch.setattr(machine, "gpus", list)
    for module in (machine, worker):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: 8 * MiB)
    speculation = Speculation(method="draft", draft_model=drafter)
    config = EngineConfig(model=model, device="cpu", threads=1, speculation=speculation)
    planned, alone = worker.Worker(config).plan_early(), worker.Worker(EngineConfig(model=model)).plan_early()
    printed, without = budget(model, "--gpu", "auto", "--draft-model", drafter), budget(model, "--gpu", "auto")
    assert printed["memory"]["num_blocks"] == planned.num_blocks
    assert without["memory"]["num_blocks"] == alone.num_blocks
    assert printed["memory"]["kv_cache_bytes"] < without["memory"]["kv_cache_bytes"]
    layers = changes.get("num_hidden_layers", 2)
    heads, width = changes.get("num_key_value_heads", 2), changes.get("head_dim", 16)
    assert printed["drafter"] == {"layers": layers, "bytes_per_token": layers * 2 * heads * width * 4}
    said = budget(model, "--kv-cache-memory", "1MiB", "--draft-model", drafter)
    exact = msgspec.structs.replace(config, kv_cache_memory_bytes=MiB)
    assert said["memory"]["num_blocks"] == worker.Worker(exact).plan_early().num_blocks
    assert "of which the drafter's" in text(model, "--draft-model", drafter)


def test_a_copy_in_fewer_bits_is_counted_before_it_is_made(tiny_llama, monkeypatch, tmp_path):
    from llmq.cli.drafter import quantized_copy

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_llama(hidden_size=128, intermediate_size=256, dtype="bfloat16")
    flags = (str(model), "--draft-quant", "w4", "--memory", "64MiB")
    before = budget(*flags)
    folder = quantized_copy(model, "w4")
    after = budget(*flags)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    alone = budget(str(model), "--memory", "64MiB")["total"]["weight_bytes"]
    for said in (before, after):
        assert said["total"]["bytes_per_token"] == 2 * budget(str(model))["total"]["bytes_per_token"]
        assert said["total"]["weight_bytes"] - alone == pytest.approx(stored, rel=0.1)


@pytest.mark.parametrize("config", [SMOLLM2, GEMMA_1B])
@pytest.mark.parametrize("gib", [3, 10, 2000])
def test_auto_finds_the_blocks_that_serve_takes(folder, monkeypatch, config, gib):
    """Also where there is room for more than every request at its full length."""
    from llmq.profiles import machine
    from llmq.profiles.architecture import ModelArchitecture
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.dtypes import Dtypes
    from llmq.runtime.memory import plan_kv_cache

    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: gib * GiB)
    printed = budget(folder(config), "--gpu", "auto")["memory"]
    engine = EngineConfig(model="")
    dtypes = Dtypes.of(config["torch_dtype"], None, engine)
    plan = plan_kv_cache(ModelArchitecture.from_config(config), engine, dtypes, printed["kv_cache_bytes"])
    assert printed["num_blocks"] == plan.num_blocks
    assert (printed["num_blocks"] < printed["kv_cache_bytes"] // plan.layout.block_bytes) == (gib == 2000)
    assert ("serve takes no more blocks" in text(folder(config), "--gpu", "auto")) == (gib == 2000)


def test_weights_count_as_they_are_held(folder):
    """A checkpoint in float32 whose config says bf16: two bytes a weight are held, four are stored."""
    from safetensors.numpy import save_file

    path = folder(SMOLLM2)
    tensors = {"w": np.zeros((8, 100), np.float32), "packed": np.zeros((5, 4), np.int32)}
    save_file(tensors, Path(path) / "model.safetensors")
    result = budget(path)
    assert result["total"]["weight_bytes"] == 2 * 800 + 4 * 20
    assert result["weights"] == "as stored, held in bf16"


def test_auto_takes_the_smallest_gpu_there_is(folder, monkeypatch):
    from llmq.profiles import machine

    found = [machine.GPU("NVIDIA H200", 140 * GiB, 140 * GiB), machine.GPU("NVIDIA L4", 22 * GiB, 22 * GiB)]
    monkeypatch.setattr(machine, "gpus", lambda: found)
    memory = budget(folder(SMOLLM2), "--gpu", "auto")["memory"]
    assert memory["name"] == "NVIDIA L4"
    assert memory["bytes"] == 22 * GiB


def test_the_model_s_own_context_is_the_default(folder):
    assert budget(folder(SMOLLM2))["num_tokens"] == 8192
    assert budget(folder(SMOLLM2))["total"]["sequence_bytes"] == 180 * MiB


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", "9"], "--tp 9 does not split 9 heads, 3 KV heads and an MLP of 1536 features evenly; valid: 1, 3"),
        (["--kv-dtype", "fp9"], "--kv-dtype fp9: one of auto, bf16, fp16"),
        (["--kv-scales", "some"], "--kv-scales some: one of auto, static, dynamic"),
        (["--gpu", "h100", "--memory", "80GiB"], "--gpu and --memory exclude each other"),
        (["--gpu", "h10"], "did you mean H100 SXM"),
        (["--memory", "80G"], "'80G' is no size"),
        (["--ctx", "2x"], "'2x' is no number of tokens"),
        (["--gpu-memory-utilization", "90", "--gpu", "h100"], "--gpu-memory-utilization 90.0: a share above 0"),
        (["--gpu-memory-utilization", "0.5", "--memory", "80GiB"], "--gpu-memory-utilization is about a GPU"),
        (["--kv-scales", "dynamic"], "--kv-scales dynamic: a KV-cache in bf16 has no scales"),
        (["--weights", "w5"], "--weights w5: give a scheme"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, args, message):
    with pytest.raises(InputError) as raised:
        CliRunner().invoke(app, [folder(SMOLLM2), *args], catch_exceptions=False)
    assert message in str(raised.value)


def test_ranks_are_those_that_serve_splits_it_into(folder):
    """Of 29,568 features of an MLP half ends with no group of 128; in activation order, and in 16 bit, it may."""
    wide = {**LLAMA_70B, "intermediate_size": 29568}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for config, flags in (({**wide, "quantization_config": gptq}, []), (wide, ["--weights", "w4g128"])):
        with pytest.raises(InputError) as raised:
            CliRunner().invoke(app, [folder(config), "--tp", "2", *flags], catch_exceptions=False)
        assert str(raised.value) == (
            "--tp 2: a rank would take 14784 of the 29568 input features of mlp.down_proj, and 128 of them belong "
            "together; valid: 1"
        )
    for config in (wide, {**wide, "quantization_config": {**gptq, "desc_act": True}}):
        assert budget(folder(config), "--tp", "2")["valid_tensor_parallel"] == [1, 2, 4, 8, 16, 32, 64]


def test_no_torch_is_imported(folder):
    import subprocess
    import sys

    script = (
        "import sys; from llmq.cli.kv_budget import app\n"
        f"app(['{folder(SMOLLM2)}', '--gpu', 'auto', '--json'], standalone_mode=False)\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["num_tokens"] == 8192
    assert done.stderr.strip() == "False"


@pytest.fixture(scope="module")
def int8_kv_model(tiny_llama, tmp_path_factory):
    """What --kv int8 adds to a checkpoint: a scheme, and a scale for K and one for V of each layer."""
    folder = tmp_path_factory.mktemp("int8-kv") / "model"
    shutil.copytree(tiny_llama(), folder)
    tensors = load_file(folder / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.full((1,), 0.02) for layer in (0, 1) for name in "kv"
    }
    save_file(tensors | scales, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return folder


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("name", ["tiny", "llmc-fp8-kv", "int8-kv"])
def test_a_checkpoint_is_budgeted_as_it_is_served(tiny_llama, int8_kv_model, request, kv_dtype, name):
    """Whole folders, not config.json alone: the same blocks as an engine allocates, scales static or dynamic."""
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.engine import Engine

    ours = {"tiny": tiny_llama, "int8-kv": lambda: int8_kv_model}
    model = ours[name]() if name in ours else request.getfixturevalue("shared") / "interop" / name
    printed = budget(str(model), "--kv-cache-memory", "3MiB", "--kv-dtype", kv_dtype)
    engine = Engine.from_config(
        EngineConfig(model=str(model), kv_cache_memory_bytes=3 << 20, kv_dtype=kv_dtype, threads=1, device="cpu")
    )
    assert printed["memory"]["num_blocks"] == engine.info.num_blocks
    assert printed["memory"]["num_blocks"] * printed["per_rank"]["block_bytes"] == engine.info.kv_cache_bytes


def test_an_unknown_architecture_is_refused_never_guessed(folder):
    with pytest.raises(InputError, match=r"model_type 'lama' is not one of .*near it: .*llama.*would be a guess"):
        text(folder({**SMOLLM2, "model_type": "lama"}), "--weights", "1GiB")


def test_what_transformers_runs_is_said_to_be_its(folder):
    model = folder({**SMOLLM2, "model_type": "bitnet"})
    assert "serve runs this model by transformers' own code, or refuses it" in text(model, "--weights", "1GiB")
    assert "own code" not in text(folder(SMOLLM2))


def test_a_known_cache_does_not_make_the_weights_known(folder):
    model = folder({**SMOLLM2, "model_type": "bitnet"})
    assert budget(model, "--weights", "1GiB")["total"]["bytes_per_token"] == 23_040
    # Without a memory nobody asks for them.
    assert budget(model)["total"] | {"bytes_per_token": 23_040, "weight_bytes": None} == budget(model)["total"]
    assert "What the weights take is not known" in text(model, "--explain", "--kv-cache-memory", "1GiB")
    for memory in (("--memory", "1GiB"), ("--gpu", "h100"), ("--weights", "fp8")):
        with pytest.raises(InputError, match=r"'bitnet' .* --weights 40GiB"):
            text(model, *memory)


MLA = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "vocab_size": 129_280,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163_840,
    "torch_dtype": "bfloat16",
}
HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151_936,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


def test_a_latent_is_whole_on_every_rank(folder):
    result = budget(folder(MLA), "--weights", "600GiB", "--tp", "8", "--ctx", "128k")
    assert result["per_rank"]["payload_bytes_per_token"] == 70_272
    assert result["total"]["bytes_per_token"] == 8 * 70_272
    assert result["total"]["sequence_bytes_without_gqa"] is None
    assert result["not_run"] == "latent attention"
    shown = text(folder(MLA), "--weights", "600GiB", "--tp", "8")
    assert "a latent of 576" in shown
    assert "Each latent is held by 8 ranks." in shown
    assert "serve does not run this model: it has latent attention" in shown


def test_a_state_is_apart_and_counted_once_a_sequence(folder):
    args = ("--weights", "1GiB", "--ctx", "4096", "--kv-cache-memory", "10GiB")
    result = budget(folder(HYBRID), *args)
    state = result["per_rank"]["state_bytes"]
    assert state == 77_266_944
    assert result["per_rank"]["sequence_bytes"] == 4096 * 24_576 + state
    memory = result["memory"]
    assert memory["num_sequences"] == 10 * GiB // result["per_rank"]["reserved_bytes"]
    held = memory["num_sequences"] * state + memory["num_blocks"] * result["per_rank"]["block_bytes"]
    assert 10 * GiB - result["per_rank"]["block_bytes"] < held <= 10 * GiB
    shown = text(folder(HYBRID), *args)
    assert "state of a sequence (36 layers, gated delta net)" in shown
    assert "KV of 4,096 tokens and the state" in shown


@pytest.mark.parametrize(
    ("kv_dtype", "advised"), [("fp32", "bf16"), ("bf16", "fp8"), ("fp8", "int4"), ("int8", "int4"), ("int4", None)]
)
def test_fewer_bits_are_advised_only_where_there_are_fewer(folder, kv_dtype, advised):
    shown = text(folder(LLAMA_70B), "--kv-cache-memory", "64MiB", "--kv-dtype", kv_dtype)
    assert "Not one sequence fits: a shorter --ctx (" in shown
    assert "or more ranks (--tp 2)" in shown
    assert (f"fewer bits (--kv-dtype {advised})" in shown) if advised else ("fewer bits" not in shown)


def test_the_256k_problem(folder):
    """A 70B-shaped model at 262,144 tokens on 8 ranks in FP8: 5 GiB of payload a rank, its scales apart."""
    args = ("--ctx", "256k", "--tp", "8", "--kv-dtype", "fp8")
    static, dynamic = (
        budget(folder(LLAMA_70B), *args, "--kv-scales", how)["per_rank"] for how in ("static", "dynamic")
    )
    assert static["payload_bytes_per_token"] * 262_144 == 5 * GiB
    assert static["sequence_bytes"] == 5 * GiB
    assert dynamic["payload_bytes_per_token"] == static["payload_bytes_per_token"]
    assert dynamic["scale_bytes_per_token"] == 2 * 2 * 80
    assert dynamic["sequence_bytes"] == 5 * GiB + 2 * 2 * 80 * 262_144


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.0000000,{500 + 100 * (second % 5)},{20 * second}\n" for second in range(1, 60)
)


def test_users_by_the_lengths_of_a_trace(folder, tmp_path):
    """Far more than in the worst case, with the blocks that they hold."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    args = ("--kv-cache-memory", "4GiB", "--lengths", str(trace))
    result = budget(folder(SMOLLM2), *args)
    users, memory = result["users"], result["memory"]
    assert users["num_requests"] == 59
    assert users["at_once"] > 4 * memory["num_sequences"] > 0
    assert users["blocks_p50"] < users["blocks_p99"] <= users["num_blocks"] == memory["num_blocks"]
    assert users["blocks_p50"] == pytest.approx(users["at_once"] * users["blocks_of_one"], rel=0.02)
    shown = text(folder(SMOLLM2), *args)
    assert "users at once, lengths of trace.csv" in shown
    assert "serve runs 64 at once unless told otherwise (--max-num-seqs)" in shown
    # --ctx is the longest request that is let in.
    assert budget(folder(SMOLLM2), *args, "--ctx", "1024")["users"]["num_too_long"] == sum(
        500 + 100 * (second % 5) + 20 * second > 1024 for second in range(1, 60)
    )


def test_states_of_users_take_of_the_same_memory(folder, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    args = ("--weights", "1GiB", "--kv-cache-memory", "10GiB", "--lengths", str(trace))
    result = budget(folder(HYBRID), *args)
    users, per_rank = result["users"], result["per_rank"]
    held = users["at_once"] * per_rank["state_bytes"] + users["num_blocks"] * per_rank["block_bytes"]
    assert 10 * GiB - per_rank["block_bytes"] < held <= 10 * GiB


def test_one_table_says_where_the_memory_goes(folder):
    result = budget(folder(LLAMA_70B), "--gpu", "h100", "--tp", "8")
    memory = result["memory"]
    assert result["per_rank"]["weight_bytes"] + memory["kv_cache_bytes"] + memory["margin_bytes"] == memory["bytes"]
    assert memory["logits_bytes"] == 64 * 128_256 * 4
    assert 0 < memory["activation_bytes"] < memory["margin_bytes"]
    shown = text(folder(LLAMA_70B), "--gpu", "h100", "--tp", "8")
    for row in ("margin, for what a step computes", "activations of 512 tokens, about", "logits of 64 sequences"):
        assert row in shown
    assert "GiB (85.0 GB)" in shown
    assert "more than the margin holds" not in shown
    assert "more than the margin holds" in text(folder(LLAMA_70B), "--memory", "200GiB")


def test_explain_prints_the_arithmetic(folder):
    shown = text(folder(LLAMA_70B), "--ctx", "256k", "--gpu", "h100", "--tp", "8", "--kv-dtype", "fp8", "--explain")
    assert "80 layers × 1 KV head (of 8, 8 ranks) × (128 K + 128 V) × 8 bit = 20,480 B a token" in shown
    assert "262,144 tokens × 20,480 B = 5.0 GiB" in shown
    assert "weights, q_proj: 80 of [8,192, 8,192]: 10,737,418,240 B" in shown
    assert "KV: 79.2 GiB of H100 SXM - 16.4 GiB weights - 7.9 GiB margin = 54.9 GiB" in shown
    shown = text(folder(GEMMA_1B), "--explain")
    assert "min(32,768, 512) tokens × 22,528 B = 11.0 MiB" in shown


def test_a_plot_is_written_and_a_picture_in_pixels_refused(folder, tmp_path):
    page = tmp_path / "out.html"
    text(folder(GEMMA_1B), "--memory", "16GiB", "--plot", str(page))
    assert "<svg" in page.read_text()
    for name, message in (("out.png", "drawing library"), ("none/out.html", "there is no folder")):
        with pytest.raises(InputError, match=message):
            text(folder(GEMMA_1B), "--plot", str(tmp_path / name))


def test_a_missing_dtype_is_said(folder):
    silent = {key: value for key, value in SMOLLM2.items() if key != "torch_dtype"}
    assert "config.json names no dtype: fp32 is assumed" in text(folder(silent))
    assert "names no dtype" not in text(folder(silent), "--kv-dtype", "bf16")
    assert "names no dtype" not in text(folder(SMOLLM2))


def test_devices_of_one_s_own(folder, tmp_path):
    own = tmp_path / "devices.toml"
    own.write_text('[[device]]\nname = "H100 SXM"\naliases = ["h100"]\nmemory_gib = 70\nsource = "measured"\n')
    memory = budget(folder(SMOLLM2), "--gpu", "h100", "--devices", str(own))["memory"]
    assert memory["bytes"] == 70 * GiB


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--explain", "--json"], "--explain is for reading"),
        (["--lengths", "x.csv"], "--lengths asks how many fit: give a memory"),
        (["--memory", "1GiB", "--devices", "x.toml"], "--devices names GPUs"),
        (["--gpu", "h100", "--devices", "x.toml"], "--devices x.toml: .*No such file"),
    ],
)
def test_options_that_need_another(folder, args, message):
    with pytest.raises(InputError, match=message):
        text(folder(SMOLLM2), *args)


def asked(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(args), catch_exceptions=False)
    return done.exit_code, done.stdout


def test_another_engines_pool_has_an_interval_a_verdict_and_an_exit_code(folder):
    model = (folder({**SMOLLM2, "max_position_embeddings": 10**6}), "--memory", "24GiB", "--engine", "vllm@0.11.0")
    codes = {ctx: asked(*model, "--ctx", ctx)[0] for ctx in ("8192", "940k", "1m")}
    assert codes == {"8192": 0, "940k": 3, "1m": 1}
    found = json.loads(asked(*model, "--ctx", "940k", "--json")[1])
    assert found["verdict"] == "UNKNOWN"
    assert found["kv_bytes"]["low"] < found["kv_bytes"]["expected"] < found["kv_bytes"]["high"]
    # What is left of 0.9 of 24 GiB, in blocks of 16 tokens.
    left = 0.9 * 24 * GiB - sum(row["expected_bytes"] for row in found["overheads"])
    assert found["kv_bytes"]["expected"] == pytest.approx(left, abs=10)
    assert found["blocks"]["expected"] == left // (16 * 23_040)
    assert {row["evidence"] for row in found["overheads"]} == {"exact", "reproduced", "prior"}
    shown = asked(*model, "--ctx", "940k")[1]
    assert "UNKNOWN: a request of 962,560 tokens takes 60,160 blocks" in shown
    assert "--calibrate vllm.log" in shown


def test_limits_of_a_step_change_what_another_engine_reserves(folder):
    def activations(*args: str) -> int:
        made = asked(folder(LLAMA_70B), "--gpu", "h200", "--engine", "vllm@0.11.0", "--weights", "fp8", "--json", *args)
        return next(one["expected_bytes"] for one in json.loads(made[1])["overheads"] if one["name"] == "activations")

    assert activations("--max-num-seqs", "8") < activations() < activations("--max-num-batched-tokens", "65536")


def test_a_start_up_log_narrows_the_interval(folder, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(
        "INFO model_runner.py: Model loading took 0.2600 GiB and 3.2 seconds\n"
        "INFO gpu_worker.py: Available KV cache memory: 19.90 GiB\n"
    )
    model = (folder(SMOLLM2), "--memory", "24GiB", "--engine", "vllm@0.11.0", "--json")
    plain = json.loads(asked(*model)[1])
    found = json.loads(asked(*model, "--calibrate", str(log))[1])
    assert found["kv_bytes"]["expected"] == pytest.approx(19.9 * GiB, abs=2)
    assert {row["evidence"] for row in found["overheads"]} == {"calibrated"}
    width, was = (one["kv_bytes"]["high"] - one["kv_bytes"]["low"] for one in (found, plain))
    assert width < was / 4
    log.write_text("nothing of it")
    with pytest.raises(InputError, match="no start-up log of vLLM"):
        asked(*model, "--calibrate", str(log))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--engine", "sglang@0.5"), "--engine sglang@0.5: llmq, or vLLM with its version, as vllm@0.11.0"),
        (("--engine", "vllm@0.11.0"), "give one, as --gpu h100"),
        (("--engine", "vllm@0.11.0", "--gpu", "h100", "--kv-dtype", "int4"), "--kv-dtype int4: vLLM's KV-cache is"),
        (("--engine", "vllm@0.11.0", "--gpu", "h100", "--lengths", "a.csv"), "--lengths is about llmq's own cache"),
        (("--calibrate", "vllm.log"), "--calibrate fits what another engine reserves"),
        (("--engine", "vllm@0.11.0", "--gpu", "h100", "--tp", "3"), "--tp 3 does not split"),
    ],
)
def test_what_another_engine_cannot_be_asked(folder, args, said):
    with pytest.raises(InputError, match=said):
        asked(folder(LLAMA_70B), *args)
