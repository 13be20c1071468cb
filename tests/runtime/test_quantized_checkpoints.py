"""Checkpoints that llm-compressor wrote, run by our linears, against what transformers computes from them."""

import json

import pytest
import torch
from engine_driver import Reference, greedy, run_all
from hypothesis import given, settings
from hypothesis import strategies as st
from random_weights import KINDS, make

from llmq.profiles.errors import InputError
from llmq.quantize.formats.quantized_weight import (
    ActivationScheme,
    FormatError,
    QuantizedWeight,
    WeightScheme,
    pack_int32,
)
from llmq.runtime.kernels import native
from llmq.runtime.layers.linear import make_linear

# Relative error of our float32 logits against transformers' from the same file in float32. Exact activations leave
# nothing; a rounded activation may fall on the other side of a step of its grid.
AGAINST_TRANSFORMERS = {
    "llmc-gptq-w4a16": 1e-4,
    "llmc-sq-w8a8": 0.03,
    "llmc-fp8-dynamic": 0.03,
    "llmc-fp8-static": 0.04,
}
# And against the logits stored beside the file, which were computed in bf16: on these random weights transformers in
# float32 is itself 0.017, 0.056, 0.128 and 0.144 away from them.
AGAINST_STORED = {
    "llmc-gptq-w4a16": 0.03,
    "llmc-sq-w8a8": 0.07,
    "llmc-fp8-dynamic": 0.15,
    "llmc-fp8-static": 0.16,
    # Roundings to 4 bits flip: transformers' own logits move by 0.48 and 0.37 when its embeddings move by 0.2 %. The
    # roundings and the weights themselves are held against compressed-tensors one by one elsewhere.
    "llmc-mxfp4": 0.6,
    "llmc-nvfp4": 0.45,
}


def relative_error(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", AGAINST_STORED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_equal_the_writers(shared, make_engine, name, dtype):
    folder = shared / "interop" / name
    reference = torch.load(folder / "ref_logits.pt", weights_only=True)
    ids, stored = reference["input_ids"][0].tolist(), reference["logits"][0, :-1]
    engine = make_engine(folder, dtype=dtype)
    if dtype == "bf16" and "fp8" in name and native is not None:
        assert (engine.info.fingerprint["program"], engine.info.fingerprint["linear_kernels"]) == (
            "native",
            f"native fp8 × fp8, {native.isa()}",
        )
    made = torch.zeros_like(stored)

    def observe(request_id, position, logits):
        made[position : position + len(logits)] = logits

    engine.observe_logits(observe)
    run_all(engine, [ids], greedy(0, prompt_logprobs=0))
    assert relative_error(made, stored) < AGAINST_STORED[name]
    if dtype == "fp32" and name in AGAINST_TRANSFORMERS:
        expected = Reference(folder).log_probs(ids)[:-1]
        assert relative_error(made.log_softmax(-1), expected) < AGAINST_TRANSFORMERS[name]


def test_a_layout_that_is_not_run_is_refused_by_name(shared, make_engine, tmp_path):
    source = shared / "interop" / "llmc-mxfp4"
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["format"] = "mxfp8-quantized"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(FormatError, match="mxfp8"):
        make_engine(tmp_path)


def quantized(kind, bits, strategy, group_size, symmetric, activation, out, in_, seed) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    layout = {("int", 4): "pack-quantized", ("int", 8): "int-quantized", ("float", 8): "float-quantized"}[kind, bits]
    scheme = WeightScheme(kind, bits, strategy, group_size, symmetric, activation, layout)
    groups = scheme.num_groups(in_)
    scale = torch.rand(1 if strategy == "tensor" else out, groups, generator=generator) * 0.1 + 0.01
    if kind == "float":
        values = torch.randn(out, in_, generator=generator).to(torch.float8_e4m3fn)
    else:
        q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (out, in_), generator=generator, dtype=torch.int8)
        values = pack_int32(q, bits) if layout == "pack-quantized" else q
    zero_point = None
    if not symmetric:
        zero_point = torch.randint(-8, 8, scale.shape, generator=generator, dtype=torch.int8)
    input_scale = torch.tensor(0.02) if activation is not None and not activation.dynamic else None
    return QuantizedWeight(scheme, (out, in_), values, scale.bfloat16(), zero_point, input_scale)


WEIGHT_ONLY = st.sampled_from(
    [
        ("int", 4, "group", 32, True, None),
        ("int", 4, "group", 64, False, None),
        ("int", 4, "group", 16, False, None),
        ("int", 4, "channel", None, True, None),
        ("int", 8, "channel", None, True, None),
        ("float", 8, "channel", None, True, None),
        ("float", 8, "tensor", None, True, None),
    ]
)


@settings(max_examples=50, deadline=None)
@given(
    scheme=WEIGHT_ONLY,
    out=st.sampled_from([16, 48, 40]),
    in_=st.sampled_from([64, 192]),
    rows=st.sampled_from([1, 5, 64, 65, 200]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_weight_only_linears_equal_the_dense_product(scheme, out, in_, rows, dtype, seed):
    weights = [quantized(*scheme, out, in_, seed), quantized(*scheme, 2 * out, in_, seed + 1)]
    generator = torch.Generator().manual_seed(seed)
    biases = [torch.randn(w.out_features, generator=generator) for w in weights]
    x = torch.randn(rows, in_, generator=generator).to(dtype)
    expected = torch.cat(
        [x.double() @ w.dequantize(torch.float32).double().T + b for w, b in zip(weights, biases, strict=True)], dim=1
    )
    made = make_linear(weights, biases, dtype)(x)
    assert made.dtype == dtype
    assert (made.double() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 1e-2)


@settings(max_examples=60, deadline=None)
@given(
    case=KINDS,
    order=st.booleans(),
    out=st.sampled_from([16, 80, 128]),
    rows=st.sampled_from([1, 65, 70]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_every_kind_of_weight_equals_the_dense_product(case, order, out, rows, dtype, seed):
    kind, bits, strategy, more = case
    more = {**more, "order": order and strategy == "group", "group_size": 32 if strategy == "group" else 16}
    weights = [make(kind, bits, strategy, n, 128, seed, **more) for n in (out, 16)]
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = torch.cat([x.double() @ weight.dequantize().double().T for weight in weights], dim=1)
    made = make_linear(weights, [None, None], dtype)(x)
    assert (made.double() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_an_int4_weight_is_held_once():
    """In torch's layout, whose scale and zero are two bf16 a group; these machines' layouts are known."""
    weight = make("int", 4, "group", 128, 256, 0, group_size=64)
    linear = make_linear([weight], [None], torch.bfloat16)
    assert linear.kernel == "torch int4pack"
    if torch.cpu._is_avx512_supported():
        assert linear.num_bytes == 128 * 256 // 2 + 128 * 4 * 2 * 2


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["int", "float"]),
    dynamic=st.booleans(),
    strategy=st.sampled_from(["channel", "tensor"]),
    rows=st.sampled_from([1, 3, 40]),
    seed=st.integers(0, 99),
)
def test_rounded_activations_follow_the_definition(kind, dynamic, strategy, rows, seed):
    if kind == "int" and not dynamic:
        return  # no format stores it
    weight = quantized(kind, 8, strategy, None, True, ActivationScheme(kind, 8, dynamic), 32, 64, seed)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = 300.0  # an outlier saturates the static scale (0.02 × 448 = 8.96) and must not become NaN
    scale = x.abs().amax(1, keepdim=True) / (127.5 if kind == "int" else 448.0) if dynamic else torch.tensor(0.02)
    if kind == "int":
        rounded = (x / scale).round().clamp(-128, 127)
    else:
        rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    expected = (rounded * scale).double() @ weight.dequantize(torch.float32).double().T
    made = make_linear([weight], [None], torch.float32)(x)
    assert torch.isfinite(made).all()
    assert (made.double() - expected).norm() / expected.norm() < 1e-5


def test_siblings_that_differ_run_apart():
    alike = ("int", 4, "group", 32, True, None)
    other = ("int", 8, "channel", None, True, None)
    weights = [quantized(*alike, 16, 64, 0), torch.randn(16, 64), quantized(*other, 16, 64, 1)]
    x = torch.randn(3, 64)
    dense = [w if isinstance(w, torch.Tensor) else w.dequantize() for w in weights]
    made = make_linear(weights, [None] * 3, torch.float32)(x)
    torch.testing.assert_close(made, torch.cat([x @ w.T for w in dense], dim=1), rtol=1e-5, atol=1e-5)


def test_a_tensor_that_would_not_be_used_is_an_error(tiny_llama, make_engine, tmp_path):
    """A qwen2-like bias in a checkpoint whose config says there is none."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama(attention_bias=True), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(InputError, match=r"q_proj\.bias"):
        make_engine(folder)


def test_a_missing_tensor_is_named(tiny_llama, make_engine, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(InputError, match=r"model\.layers\.2"):
        make_engine(folder)


def test_the_original_too(shared, make_engine):
    folder = shared / "interop" / "tiny-src"
    prompt = list(range(5, 60))
    made = run_all(make_engine(folder), [prompt], greedy(20))[0]
    assert made.token_ids == Reference(folder).greedy(prompt, 20)
