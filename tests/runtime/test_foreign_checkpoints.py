"""Checkpoints that AutoGPTQ and AutoAWQ wrote, and fine-grained FP8, through the engine."""

import json
import shutil

import pytest
import torch
from engine_driver import Reference, greedy, run_all
from foreign_layouts import awq_weight, folder_tensors, gptq_weight, linears_of
from safetensors.torch import save_file

from llmq.profiles.errors import InputError
from llmq.quantize.formats.fp8 import FP8Writer, block_scheme
from llmq.quantize.formats.quantized_weight import QuantizedWeight


def logits(engine, ids):
    """float32 [len(ids) - 1, vocab_size]"""
    tiles = {}
    engine.observe_logits(lambda _, position, made: tiles.update({position: made.clone()}))
    run_all(engine, [ids], greedy(0, prompt_logprobs=0))
    return torch.cat([tiles[position] for position in sorted(tiles)])


def relative_error(made, expected):
    return float((made - expected).norm() / expected.norm())


def dense_folder(shared, name, target, dense):
    """tiny-src's config over the tensors of `name`, its linears made dense by `dense(tensors, linear)`."""
    source, folder = shared / "interop" / "tiny-src", shared / "interop" / name
    target.mkdir()
    for path in source.glob("*.json"):
        shutil.copyfile(path, target / path.name)
    tensors = folder_tensors(folder)
    linears = linears_of(tensors, ".qweight")
    kept = {n: t for n, t in tensors.items() if n.rpartition(".")[0] not in linears}
    kept |= {f"{n}.weight": torch.from_numpy(dense(tensors, n)).float().contiguous() for n in linears}
    save_file(kept, target / "model.safetensors")
    return target


def stored(shared, name):
    reference = torch.load(shared / "interop" / name / "ref_logits.pt", weights_only=True)
    return reference["input_ids"][0].tolist(), reference["logits"][0, :-1].float()


# AutoAWQ's reference multiplies by its scales in float16: its weights are off by half a unit in the 11th bit.
@pytest.mark.parametrize(("name", "limit"), [("autogptq-w4g128-sym", 1e-5), ("autoawq-w4g128-gemm", 2e-3)])
def test_logits_equal_the_writers(shared, make_engine, name, limit):
    ids, expected = stored(shared, name)
    assert relative_error(logits(make_engine(shared / "interop" / name), ids), expected) < limit
    assert relative_error(logits(make_engine(shared / "interop" / name, dtype="bf16"), ids), expected) < 0.03


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("autogptq-w4g128-asym-actorder", lambda tensors, n: gptq_weight(tensors, n, 4, zero_offset=1)),
        ("autogptq-w4g128-sym", lambda tensors, n: gptq_weight(tensors, n, 4, zero_offset=1)),
        ("autoawq-w4g128-gemm", awq_weight),
    ],
)
def test_tokens_equal_those_of_the_dense_weights(shared, make_engine, tmp_path, name, dense):
    folder = dense_folder(shared, name, tmp_path / "dense", dense)
    ids = list(range(7, 60))
    packed = make_engine(shared / "interop" / name)
    assert relative_error(logits(packed, ids), logits(make_engine(folder), ids)) < 1e-5
    assert (
        run_all(packed, [ids], greedy(16))[0].token_ids == run_all(make_engine(folder), [ids], greedy(16))[0].token_ids
    )


def test_quantize_config_beside_the_model_is_enough(shared, make_engine, tmp_path):
    """Old auto-gptq folders say nothing in config.json."""
    source, folder = shared / "interop" / "autogptq-w4g128-sym", tmp_path / "old"
    shutil.copytree(source, folder)
    folder.chmod(0o755)
    (folder / "config.json").chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    ids, expected = stored(shared, source.name)
    assert relative_error(logits(make_engine(folder), ids), expected) < 1e-5


def test_a_bias_that_is_not_zero_is_not_dropped(shared, make_engine, tmp_path):
    source, folder = shared / "interop" / "autogptq-w4g128-sym", tmp_path / "biased"
    folder.mkdir()
    for path in source.glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    tensors = folder_tensors(source)
    tensors["model.layers.1.self_attn.v_proj.bias"][7] = 0.25
    save_file(tensors, folder / "gptq_model-4bit-128g.safetensors")
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.v_proj\.bias"):
        make_engine(folder)


def test_fp8_blocks_equal_transformers(shared, make_engine, tmp_path):
    """tiny-src in blocks of 128 × 128, as transformers reads it where there is no GPU: weights made dense, inputs as
    they come, where ours rounds inputs too. Without that rounding they are equal."""
    folder = tmp_path / "fp8"
    folder.mkdir()
    source = shared / "interop" / "tiny-src"
    for path in source.glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    tensors, schemes = folder_tensors(source), {}
    for name in linears_of(tensors, "_proj.weight"):
        name = f"{name}_proj"
        weight = tensors.pop(f"{name}.weight").float()
        blocks = weight.unfold(0, 128, 128).unfold(1, 128, 128)
        scale = blocks.abs().amax(dim=(2, 3)) / 448
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        values = (weight / spread).to(torch.float8_e4m3fn)
        schemes[name] = block_scheme()
        tensors |= FP8Writer().tensors(name, QuantizedWeight(schemes[name], tuple(weight.shape), values, scale))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FP8Writer().config(schemes, ["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    ids = list(range(5, 60))
    made = logits(make_engine(folder), ids).log_softmax(-1)
    expected = Reference(folder).log_probs(ids)[:-1]
    assert 1e-3 < relative_error(made, expected) < 0.1
    del config["quantization_config"]
    for name in schemes:
        scale = tensors.pop(f"{name}.weight_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() * scale
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert relative_error(logits(make_engine(folder), ids).log_softmax(-1), expected) < 0.01
