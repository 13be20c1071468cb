import json
import shutil

import pytest
from typer.testing import CliRunner

from llmq.cli.inspect import app


def inspect(*args: str) -> dict:
    done = CliRunner().invoke(app, [*map(str, args), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def text(*args: str) -> str:
    return CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False).stdout


def by_name(result: dict) -> dict[str, dict]:
    return {module["name"]: module for module in result["modules"]}


def test_a_model_in_16_bit(tiny_llama):
    folder = tiny_llama(dtype="bfloat16", tie_word_embeddings=False)
    result = inspect(folder)
    modules = by_name(result)
    assert modules["self_attn.k_proj"]["count"] == 2
    assert modules["self_attn.k_proj"]["shape"] == [32, 64]
    assert modules["self_attn.k_proj"]["stored_as"] == "bf16"
    assert result["bits_per_weight"] == 16
    assert result["valid_tensor_parallel"] == [1, 2, 4]
    assert result["total_bytes"] == 2 * result["num_weights"]
    assert result["tie_word_embeddings"] is False
    assert result["tokenizer"]["eos_token"] == {"token": "<|im_end|>", "id": 2}
    assert result["tokenizer"]["has_chat_template"]
    shown = text(folder)
    assert "The head has weights of its own." in shown
    assert "Splits over 1, 2, 4 ranks (--tp)." in shown
    assert "16.00 bits a weight" in shown


@pytest.mark.parametrize(
    ("folder", "stored_as", "activation"),
    [
        ("llmc-gptq-w4a16", "int4 g128 sym", None),
        ("llmc-sq-w8a8", "int8 per channel sym", "int8 dynamic per token"),
        ("llmc-fp8-static", "fp8 per tensor", "fp8 static per tensor"),
        ("llmc-nvfp4", "fp4 g16", "fp4 dynamic per 16 channels"),
        ("llmc-mxfp4", "fp4 g32", "fp4 dynamic per 32 channels"),
    ],
)
def test_what_the_config_declares_of_each_linear(shared, folder, stored_as, activation):
    result = inspect(shared / "interop" / folder)
    module = by_name(result)["mlp.up_proj"]
    assert module["stored_as"] == stored_as
    assert module["activation"] == activation
    assert by_name(result)["lm_head"]["stored_as"] == "bf16"
    assert result["problems"] == []


@pytest.mark.parametrize(
    ("folder", "stored_as"),
    [
        ("autogptq-w4g128-sym", "int4 g128 sym"),
        ("autogptq-w4g128-asym-actorder", "int4 g128 asym in activation order"),
        ("autoawq-w4g128-gemm", "int4 g128 asym"),
    ],
)
def test_older_layouts(shared, folder, stored_as):
    result = inspect(shared / "interop" / folder)
    assert by_name(result)["mlp.up_proj"]["stored_as"] == stored_as
    assert by_name(result)["mlp.up_proj"]["shape"] == [512, 256]
    assert by_name(result)["lm_head"]["stored_as"] == "fp32"
    assert result["problems"] == []


def test_a_format_that_is_not_run_is_shown_and_said_to_be(shared, tmp_path):
    result = changed(shared, tmp_path, lambda q: q["config_groups"]["group_0"].update(format="marlin-24"))
    assert "g" in by_name(result)["mlp.up_proj"]["stored_as"]
    assert result["problems"][0].startswith("llmq does not run this format:")


def changed(shared, tmp_path, change) -> dict:
    """The report on a copy of a W4 checkpoint whose quantization config went through `change`."""
    folder = tmp_path / "copy"
    shutil.copytree(shared / "interop" / "llmc-gptq-w4a16", folder)
    path = folder / "config.json"
    path.chmod(0o644)
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    return inspect(folder)


def test_a_layer_left_out_by_the_config_but_packed_in_the_file_is_found(shared, tmp_path):
    result = changed(shared, tmp_path, lambda q: q["ignore"].append("re:.*layers\\.0\\.mlp.*"))
    expected = "model.layers.0.mlp.gate_proj is left out by the config, and stored as int4 g128, packed"
    assert expected in result["problems"]
    assert len(result["problems"]) == 3


def test_a_layer_declared_quantized_but_stored_in_16_bit_is_found(shared, tmp_path):
    result = changed(shared, tmp_path, lambda q: q.update(ignore=[]))
    assert result["problems"] == [
        "lm_head is int4 g128 symmetric by the config, and lm_head.weight_packed is not stored"
    ]


def test_layers_that_differ_are_rows_of_their_own(tiny_llama, tmp_path):
    import safetensors.torch
    import torch

    folder = tmp_path / "mixed"
    shutil.copytree(tiny_llama(num_hidden_layers=4), folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for layer in (0, 1, 3):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.bfloat16)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shown = text(folder)
    assert "mlp.up_proj (layers 0-1, 3)" in shown
    assert "mlp.up_proj (layers 2)" in shown
    assert "mlp.down_proj (" not in shown


def test_layers_lists_every_module(tiny_llama):
    assert "model.layers.1.mlp.up_proj" in text(tiny_llama(), "--layers")
    assert len(inspect(tiny_llama(), "--layers")["modules"]) == 20
