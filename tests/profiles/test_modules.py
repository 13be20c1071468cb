import pytest

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.modules import Module, modules_of
from llmq.profiles.safetensors_file import TensorInfo, tensor_bytes


def by_kind(shared, folder: str) -> dict[str, Module]:
    checkpoint = read_checkpoint(shared / "interop" / folder)
    return {module.kind: module for module in modules_of(checkpoint.tensors.values(), checkpoint.quantization)}


@pytest.mark.parametrize(
    ("folder", "layout"),
    [
        ("tiny-src", "fp16"),
        ("llmc-gptq-w4a16", "int4 g128, packed"),
        ("llmc-fp8-dynamic", "fp8 per channel"),
        ("llmc-fp8-static", "fp8 per tensor"),
        ("llmc-sq-w8a8", "int8 per channel"),
        ("llmc-nvfp4", "fp4 g16, packed"),
        ("llmc-mxfp4", "fp4 g32, packed"),
        ("autogptq-w4g128-sym", "int4 g128, gptq packed"),
        ("autogptq-w4g128-asym-actorder", "int4 g128, gptq packed, activation order"),
        ("autoawq-w4g128-gemm", "int4 g128, awq packed"),
    ],
)
def test_layout_and_shape_come_from_the_tensors(shared, folder, layout):
    modules = by_kind(shared, folder)
    for kind, shape in {"self_attn.k_proj": (128, 256), "mlp.down_proj": (256, 512), "mlp.up_proj": (512, 256)}.items():
        assert modules[kind].layout == layout
        assert modules[kind].shape == shape
        assert modules[kind].is_quantized == (folder != "tiny-src")
    assert not modules["lm_head"].is_quantized
    assert not modules["model.embed_tokens"].is_linear


def test_every_byte_belongs_to_one_module(shared):
    for folder in (shared / "interop").iterdir():
        if folder.is_dir():
            checkpoint = read_checkpoint(folder)
            modules = modules_of(checkpoint.tensors.values(), checkpoint.quantization)
            assert sum(module.num_bytes for module in modules) == checkpoint.total_bytes


def tensor(name: str, shape: tuple[int, ...] = (2, 2), dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(name, dtype, shape, tensor_bytes(dtype, shape), "x")


def test_modules_come_in_the_order_of_computation():
    names = ["lm_head", "model.norm", "model.layers.10.mlp.down_proj", "model.layers.2.mlp.down_proj"]
    names += ["model.layers.2.self_attn.v_proj", "model.layers.2.self_attn.q_proj", "model.embed_tokens"]
    modules = modules_of([tensor(f"{name}.weight") for name in names], None)
    assert [module.name for module in modules] == [
        "model.embed_tokens",
        "model.layers.2.self_attn.q_proj",
        "model.layers.2.self_attn.v_proj",
        "model.layers.2.mlp.down_proj",
        "model.layers.10.mlp.down_proj",
        "model.norm",
        "lm_head",
    ]
    assert [module.layer for module in modules] == [None, 2, 2, 2, 10, None, None]
    assert modules[1].kind == "self_attn.q_proj"


def test_a_bias_belongs_to_its_linear_and_does_not_quantize_it():
    (module,) = modules_of([tensor("a.q_proj.weight"), tensor("a.q_proj.bias", (2,))], None)
    assert module.num_bytes == 12
    assert module.num_weights == 4
    assert not module.is_quantized


def test_packed_modules_of_several_schemes_have_their_own_shapes():
    groups = {
        f"group_{n}": {"weights": {"num_bits": n, "group_size": size}} for n, size in ((3, 64), (4, 128), (8, -1))
    }
    linears = {"a": (3, 6), "b": (4, 3), "c": (8, 1)}  # bits and scales of a row of 384
    tensors = []
    for name, (bits, num_groups) in linears.items():
        tensors.append(tensor(f"model.layers.0.mlp.{name}.weight_packed", (16, 384 * bits // 32), "I32"))
        tensors.append(tensor(f"model.layers.0.mlp.{name}.weight_scale", (16, num_groups)))
    modules = {module.kind[-1]: module for module in modules_of(tensors, {"config_groups": groups})}
    assert {module.shape for module in modules.values()} == {(16, 384)}
    layouts = [modules[name].layout for name in "abc"]
    assert layouts == ["int3 g64, packed", "int4 g128, packed", "int8 per channel, packed"]


def test_a_gguf_type_says_the_bits():
    parts = [tensor("model.layers.0.mlp.up_proj.weight_packed", (16, 512 * 6 // 32), "I32")]
    parts.append(tensor("model.layers.0.mlp.up_proj.weight_scale", (16, 32), "I8"))
    quantization = {"quant_method": "gguf", "modules": {"model.layers.0.mlp.up_proj": "Q6_K"}}
    assert modules_of(parts, quantization)[0].shape == (16, 512)
