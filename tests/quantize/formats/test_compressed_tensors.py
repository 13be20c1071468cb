"""Checkpoints that llm-compressor wrote, read by us; ours, read by compressed-tensors; and what is refused, by name."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_weights import make
from safetensors import safe_open

from llmq.quantize.formats.compressed_tensors import QuantizationConfig, to_tensors
from llmq.quantize.formats.quantized_weight import ActivationScheme, FormatError, WeightScheme
from llmq.quantize.formats.registry import writer_for

READABLE = [
    "llmc-gptq-w4a16",
    "llmc-sq-w8a8",
    "llmc-fp8-dynamic",
    "llmc-fp8-static",
    "llmc-fp8-kv",
    "llmc-nvfp4",
    "llmc-mxfp4",
]


class Folder:
    """A checkpoint folder: its config and its tensors."""

    def __init__(self, path):
        self.path = path
        self.config = json.loads((path / "config.json").read_text())
        self.section = self.config["quantization_config"]
        with safe_open(path / "model.safetensors", "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        self.linears = sorted({n.rsplit(".", 1)[0] for n in self.tensors if n.endswith("weight_scale")})


@pytest.fixture(params=READABLE)
def folder(request, shared):
    return Folder(shared / "interop" / request.param)


def test_weights_equal_compressed_tensors_own_decompression(folder):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = QuantizationConfig.from_config(folder.section)
    group = folder.section["config_groups"]["group_0"]
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    assert len(folder.linears) == 21
    for name in folder.linears:
        stored = {n.rsplit(".", 1)[1]: t for n, t in folder.tensors.items() if n.rsplit(".", 1)[0] == name}
        expected = compressor.decompress(stored, QuantizationScheme(**group))["weight"]
        made = config.read(name, folder.tensors.__getitem__).dequantize(torch.bfloat16)
        if folder.path.name == "llmc-nvfp4":  # theirs rounds the product of its two scales to bf16 first
            torch.testing.assert_close(made, expected, rtol=0.008, atol=0)
        else:
            assert torch.equal(made, expected)


def test_writing_gives_back_the_same_tensors(folder):
    config = QuantizationConfig.from_config(folder.section)
    for name in folder.linears:
        written = to_tensors(name, config.read(name, folder.tensors.__getitem__))
        assert set(written) == {n for n in folder.tensors if n.rsplit(".", 1)[0] == name}
        for tensor_name, tensor in written.items():
            original = folder.tensors[tensor_name]
            assert tensor.dtype == original.dtype
            assert torch.equal(tensor.flatten().view(torch.uint8), original.flatten().view(torch.uint8))


def test_config_round_trip(folder):
    config = QuantizationConfig.from_config(folder.section)
    assert QuantizationConfig.from_config(config.to_config()) == config


def test_our_config_is_accepted_by_compressed_tensors(folder):
    from compressed_tensors.quantization import QuantizationConfig as TheirConfig

    ours = TheirConfig(**QuantizationConfig.from_config(folder.section).to_config())
    theirs = TheirConfig(**folder.section)
    assert ours.config_groups["group_0"].weights.num_bits == theirs.config_groups["group_0"].weights.num_bits
    assert ours.config_groups["group_0"].input_activations == theirs.config_groups["group_0"].input_activations or (
        ours.config_groups["group_0"].input_activations.dynamic
        == theirs.config_groups["group_0"].input_activations.dynamic
    )
    assert ours.format == theirs.format
    assert ours.ignore == theirs.ignore


def test_full_model_logits_equal_the_references(shared):
    """Weight-only: the plain bf16 model on our dequantized weights gives what transformers gave on the folder."""
    from transformers import AutoModelForCausalLM

    folder = Folder(shared / "interop" / "llmc-gptq-w4a16")
    reference = torch.load(folder.path / "ref_logits.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(shared / "interop" / "tiny-src", dtype=torch.bfloat16)
    config = QuantizationConfig.from_config(folder.section)
    state = {n: tensor for n, tensor in folder.tensors.items() if n.rsplit(".", 1)[0] not in folder.linears}
    for name in folder.linears:
        state[f"{name}.weight"] = config.read(name, folder.tensors.__getitem__).dequantize(torch.bfloat16)
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(reference["input_ids"]).logits.float()
    # Exact where the CPU multiplies bf16 as the reference's did; else within a few bf16 steps of logits up to 4.
    assert (logits - reference["logits"]).abs().max() < 0.06
    assert (logits - reference["logits"]).abs().mean() < 0.01


def test_schemes_are_what_the_folders_names_say(shared):
    def scheme_of(name):
        section = json.loads((shared / "interop" / name / "config.json").read_text())["quantization_config"]
        config = QuantizationConfig.from_config(section)
        assert config.scheme_for("lm_head") is None
        return config.scheme_for("model.layers.1.mlp.down_proj")

    assert scheme_of("llmc-gptq-w4a16") == WeightScheme("int", 4, "group", 128)
    assert scheme_of("llmc-sq-w8a8") == WeightScheme(
        "int", 8, "channel", activation=ActivationScheme("int"), layout="int-quantized"
    )
    assert scheme_of("llmc-fp8-dynamic") == WeightScheme(
        "float", 8, "channel", activation=ActivationScheme("float"), layout="float-quantized"
    )
    assert scheme_of("llmc-fp8-static") == WeightScheme(
        "float", 8, "tensor", activation=ActivationScheme("float", dynamic=False), layout="float-quantized"
    )


def test_static_input_scale_is_read(shared):
    folder = Folder(shared / "interop" / "llmc-fp8-static")
    config = QuantizationConfig.from_config(folder.section)
    name = "model.layers.0.mlp.down_proj"
    weight = config.read(name, folder.tensors.__getitem__)
    assert weight.input_scale.item() == folder.tensors[f"{name}.input_scale"].item() > 0


def test_kv_cache_scheme_is_exposed(shared):
    section = json.loads((shared / "interop/llmc-fp8-kv/config.json").read_text())["quantization_config"]
    kv = QuantizationConfig.from_config(section).kv_cache_scheme
    assert (kv.kind, kv.bits, kv.strategy, kv.dynamic) == ("float", 8, "tensor", False)


W4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}


def w4(**changes):
    config = copy.deepcopy(W4)
    group = config["config_groups"]["group_0"]
    for key, value in changes.items():
        if key in ("num_bits", "type", "strategy", "dynamic", "actorder", "scale_dtype", "group_size"):
            group["weights"][key] = value
        elif key in ("input_activations", "output_activations"):
            group[key] = value
        else:
            config[key] = value
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quantization_status": "frozen"}, "'frozen'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"format": "marlin-24"}, "'marlin-24'"),
        ({"format": "mxfp8-quantized"}, "'mxfp8-quantized'"),
        ({"format": "mxfp4-pack-quantized", "num_bits": 4, "type": "float", "group_size": 16}, "groups of 32, not 16"),
        ({"num_bits": 1}, "1-bit int"),
        ({"strategy": "block"}, "weight blocks"),
        ({"strategy": "attn_head"}, "'attn_head'"),
        (
            {"input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor"}},
            "8-bit int symmetric activations",
        ),
        ({"output_activations": {"num_bits": 8}}, "output activations"),
        ({"scale_dtype": "torch.uint8"}, "scales in uint8"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme"),
        ({"config_groups": {}}, "no config_groups"),
    ],
)
def test_refusals_name_what_is_not_supported(changes, message):
    with pytest.raises(FormatError, match=message) as error:
        QuantizationConfig.from_config(w4(**changes))
    assert error.value.exit_code == 2


def test_an_exact_name_wins_over_a_pattern_and_a_pattern_over_a_class():
    config = w4()
    eight = {"num_bits": 8, "type": "int", "group_size": 32}
    config["config_groups"]["group_1"] = {"targets": ["re:.*layers\\.0\\..*"], "weights": eight}
    config["config_groups"]["group_2"] = {
        "targets": ["model.layers.0.mlp.up_proj"],
        "weights": {"num_bits": 4, "type": "int", "group_size": 64},
    }
    read = QuantizationConfig.from_config(config)
    assert read.scheme_for("model.layers.1.mlp.up_proj").group_size == 32
    assert read.scheme_for("model.layers.0.mlp.gate_proj").bits == 8
    assert read.scheme_for("model.layers.0.mlp.up_proj") == WeightScheme("int", 4, "group", 64)
    assert read.scheme_for("model.embed_tokens", "Embedding") is None


def test_a_missing_tensor_is_named():
    config = QuantizationConfig.from_config(w4())
    with pytest.raises(FormatError, match=r"a\.q_proj\.weight_packed"):
        config.read("a.q_proj", {}.__getitem__)


def test_activation_order_asks_for_the_group_index():
    config = QuantizationConfig.from_config(w4(actorder="group"))
    names = config.tensor_names("a", config.scheme_for("a"))
    assert "a.weight_g_idx" in names


def test_the_writer_names_modules_only_where_schemes_differ(folder):
    writer = writer_for("compressed-tensors")
    scheme = QuantizationConfig.from_config(folder.section).scheme_for(folder.linears[0])
    writer.check(scheme, (256, 256))
    config = writer.config(dict.fromkeys(folder.linears, scheme), ["lm_head"])
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    other = WeightScheme("int", 4, "group", 32, symmetric=False)
    mixed = writer.config({folder.linears[0]: other, **dict.fromkeys(folder.linears[1:], scheme)}, ["lm_head"])
    read = QuantizationConfig.from_config(mixed)
    assert read.scheme_for(folder.linears[0]) == other
    assert all(read.scheme_for(name) == scheme for name in folder.linears[1:])
    assert read.scheme_for("lm_head") is None


def test_a_format_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(FormatError, match="compressed-tensors"):
        writer_for("safetensors")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [
            *(
                ("int", bits, strategy, {"zero": zero})
                for bits in range(2, 9)
                for strategy in ("group", "channel")
                for zero in (None, "int")
            ),
            ("float", 8, "channel", {}),
            ("float", 8, "tensor", {}),
            ("float", 8, "block", {"block_rows": 16}),
            ("float", 4, "group", {"outer": 1}),
        ]
    ),
    st.integers(0, 2**31),
)
def test_what_we_write_means_the_same_to_compressed_tensors_and_to_us(case, seed):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    kind, bits, strategy, more = case
    weight = make(kind, bits, strategy, 48, 64, seed, **more)
    if kind == "float" and bits == 4:
        e4m3 = (torch.rand(weight.scale.shape) + 0.1).to(torch.float8_e4m3fn)
        weight = replace(weight, scale=e4m3, outer_scale=1 / torch.tensor([[1234.5]], dtype=torch.float64))
    elif kind == "int" and bits == 8 and strategy == "channel" and weight.zero_point is None:
        scheme = replace(weight.scheme, layout="int-quantized")
        weight = replace(weight, scheme=scheme, values=weight.integers().contiguous())
    writer = writer_for("compressed-tensors")
    writer.check(weight.scheme, weight.shape)
    tensors = writer.tensors("a", weight)
    config = QuantizationConfig.from_config(writer.config({"a": weight.scheme}, []))
    made = config.read("a", tensors.__getitem__)
    assert made.scheme == weight.scheme
    assert set(tensors) == set(config.tensor_names("a", weight.scheme))
    assert torch.equal(made.dequantize(), weight.dequantize())
    for again, tensor in writer.tensors("a", made).items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), tensors[again].view(-1).view(torch.uint8))
    group = config.to_config()["config_groups"]["group_0"]
    stored = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    theirs = BaseCompressor.get_value_from_registry(group["format"]).decompress(stored, QuantizationScheme(**group))
    rtol = 0.008 if bits == 4 and kind == "float" else 1e-6  # theirs makes NVFP4 dense in bf16
    torch.testing.assert_close(theirs["weight"].float(), weight.dequantize(), rtol=rtol, atol=1e-6)


def test_numbers_that_do_not_cross_words_are_read_too():
    """Ten of 3 bits in a word, as older versions of compressed-tensors packed them."""
    q = torch.randint(-4, 4, (4, 64), generator=torch.Generator().manual_seed(0))
    words = torch.zeros(4, 7, dtype=torch.int64)
    for i in range(64):
        words[:, i // 10] |= (q[:, i] + 4) << 3 * (i % 10)
    stored = {
        "a.weight_packed": words.to(torch.int32),
        "a.weight_scale": torch.ones(4, 1),
        "a.weight_shape": torch.tensor([4, 64]),
    }
    config = QuantizationConfig.from_config(w4(num_bits=3, strategy="channel"))
    assert torch.equal(config.read("a", stored.__getitem__).dequantize(), q.float())
