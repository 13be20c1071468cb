"""Whole engines on the Triton program, against torch's, token by token."""

from dataclasses import replace

import pytest
import torch
from engine_driver import greedy, run_all
from family_cases import CASES, MOE
from random_weights import make, quantize_folder
from tiny_model import save_tiny_model

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme
from llmq.runtime.layers.linear import QuantizedActivationLinear, make_linear
from llmq.runtime.layers.triton_linear import TritonRoundedLinear
from llmq.runtime.sampling_params import SamplingParams

PROMPTS = [
    [(7 * position + 31 * row) % 500 + 3 for position in range(length)] for row, length in enumerate((3, 19, 37))
]
WINDOWED = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 20}
# One of each kind of part: windows, caps, norms of projections and of heads, partial rotation, experts, LayerNorm.
FAMILIES = [CASES[index] for index in (0, 1, 3, 5, 10, 13, 17, 18, 21)]
if torch.cuda.is_available():
    pytest.skip("engines in float32 run on torch on a GPU", allow_module_level=True)


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES, ids=str)
def test_tokens_equal_torchs(tmp_path, make_engine, model_type, changes):
    """Prompts in chunks beside running requests: the program of every family that has one."""
    folder = save_tiny_model(tmp_path, model_type, **changes)
    engines = [make_engine(folder, kernels=kernels, **WINDOWED) for kernels in ("torch", "triton")]
    assert engines[1].info.fingerprint["program"] == engines[1].info.fingerprint["attention_kernel"] == "triton"
    expected, made = (run_all(engine, PROMPTS, greedy(4)) for engine in engines)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "fp16"])
def test_tokens_equal_torchs_in_each_kv_dtype(tiny_llama, make_engine, kv_dtype):
    engines = [make_engine(tiny_llama(), kernels=kernels, kv_dtype=kv_dtype) for kernels in ("torch", "triton")]
    expected, made = (run_all(engine, PROMPTS, greedy(5)) for engine in engines)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]


def test_blocks_that_no_kernel_reads_are_torchs_and_the_fingerprint_says_so(tiny_llama, make_engine):
    engine = make_engine(tiny_llama(), kernels="triton", kv_dtype="int4")
    assert "no Triton attention in torch.float32 over blocks of int4" in engine.info.fingerprint["program"]
    assert engine.info.fingerprint["attention_kernel"] == "sdpa"
    assert run_all(engine, PROMPTS[:1], greedy(2))[0].error is None


def test_batch_invariance_keeps_its_own_attention(tiny_llama, make_engine):
    engine = make_engine(tiny_llama(), kernels="triton", batch_invariant=True)
    assert engine.info.fingerprint["attention_kernel"] == "tiled, batch-invariant"


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_sampled_tokens_equal_torchs(tmp_path, make_engine, model_type):
    folder = save_tiny_model(tmp_path, model_type, **(MOE if model_type == "mixtral" else {}))
    params = [
        SamplingParams(temperature=1.0, max_tokens=6, seed=3, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=6, seed=2**63 - 1, ignore_eos=True),
        SamplingParams(temperature=1.3, min_p=0.05, max_tokens=6, seed=-5, ignore_eos=True, logit_bias={7: -100.0}),
    ]
    engines = [make_engine(folder, kernels=kernels) for kernels in ("torch", "triton")]
    expected, made = (run_all(engine, PROMPTS, params) for engine in engines)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]


def int4_weight(out, in_, seed):
    return make("int", 4, "group", out, in_, seed, zero="int", group_size=32)


def in_activation_order(out, in_, seed):
    return make("int", 4, "group", out, in_, seed, zero="int", group_size=32, order=True)


def int8_weight(out, in_, seed):
    generator = torch.Generator().manual_seed(seed)
    scheme = WeightScheme("int", 8, "channel", activation=ActivationScheme("int"), layout="int-quantized")
    values = torch.randint(-127, 128, (out, in_), generator=generator, dtype=torch.int8)
    return QuantizedWeight(scheme, (out, in_), values, torch.rand(out, 1, generator=generator) + 0.5)


def fp8_weight(out, in_, seed):
    plain = make("float", 8, "channel", out, in_, seed)
    return replace(plain, scheme=replace(plain.scheme, activation=ActivationScheme("float")))


@pytest.mark.parametrize(
    ("model_type", "format_name", "make_weight", "kernel"),
    [
        ("llama", "compressed-tensors", int4_weight, "triton int4 × 16 bit"),
        ("mixtral", "compressed-tensors", int4_weight, "triton int4 × 16 bit"),
        ("llama", "gptq_v2", in_activation_order, "triton int4 × 16 bit"),
        ("llama", "awq", int4_weight, "triton int4 × 16 bit"),
        ("llama", "compressed-tensors", int8_weight, "triton rounding, torch int8"),
    ],
)
def test_tokens_of_a_quantized_checkpoint_equal_torchs(
    tmp_path, make_engine, model_type, format_name, make_weight, kernel
):
    changes = {**MOE, "intermediate_size": 64} if model_type == "mixtral" else {}
    source = save_tiny_model(tmp_path / "source", model_type, **changes)
    folder = quantize_folder(source, tmp_path / "quantized", format_name, make_weight)
    engines = [make_engine(folder, kernels=kernels) for kernels in ("torch", "triton")]
    assert kernel in engines[1].info.fingerprint["linear_kernels"]
    expected, made = (run_all(engine, PROMPTS, greedy(5)) for engine in engines)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]


def test_experts_run_together_and_are_held_once(tmp_path, make_engine):
    source = save_tiny_model(tmp_path / "source", "mixtral", **MOE, intermediate_size=64)
    folder = quantize_folder(source, tmp_path / "quantized", "compressed-tensors", int4_weight)
    program = make_engine(folder, kernels="triton").executor.runner.program
    grouped = list(program._grouped.values())
    assert len(grouped) == 2
    for one in grouped:
        storage = one.wide.numbers.untyped_storage().data_ptr()
        linears = [expert.wide for expert in one.experts.experts]
        assert all(linear.weight.numbers.untyped_storage().data_ptr() == storage for linear in linears)


def test_fp8_checkpoints_keep_16_bit_activations_where_nothing_multiplies_fp8(tmp_path, make_engine):
    """The interpreter stands for a GPU of compute capability 8.0."""
    source = save_tiny_model(tmp_path / "source", "llama")
    folder = quantize_folder(source, tmp_path / "quantized", "compressed-tensors", fp8_weight)
    engine = make_engine(folder, kernels="triton")
    assert engine.info.fingerprint["linear_kernels"] == "triton fp8 × 16 bit"
    assert run_all(engine, PROMPTS[:1], greedy(2))[0].error is None


def test_a_rank_s_columns_in_activation_order_run_by_the_kernel():
    weight, x = make("int", 4, "group", 64, 256, 0, zero="int", group_size=64, order=True), torch.randn(3, 256)
    total = torch.zeros(3, 64)
    for columns in (slice(0, 128), slice(128, 256)):
        linear = make_linear([weight.slice_columns(columns.start, columns.stop)], [None], x.dtype, native=True)
        assert linear.kernel == "triton int4 × 16 bit"
        total += linear(x[:, columns])
    torch.testing.assert_close(total, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("static", [None, 0.02])
def test_fp8_products_follow_the_definition(static):
    weight = fp8_weight(48, 64, 0)
    activation = ActivationScheme("float", dynamic=static is None)
    input_scale = None if static is None else torch.tensor(static)
    weight = replace(weight, scheme=replace(weight.scheme, activation=activation), input_scale=input_scale)
    x, bias = torch.randn(5, 64), torch.randn(48)
    made, expected = (
        made(x) for made in (TritonRoundedLinear(weight, bias), QuantizedActivationLinear(weight, bias, x.dtype))
    )
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
