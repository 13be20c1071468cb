"""The native program: its operations against float64, and whole steps against the decoder's own forward."""

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from family_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from native_decoder import load_native, make_step, make_store
from tiny_model import save_tiny_model

from llmq.runtime.kernels import native, why_absent
from llmq.runtime.layers.mlp import ACTIVATIONS

if native is None:
    pytest.skip(why_absent, allow_module_level=True)

from llmq.runtime.attention.native import NativeAttention
from llmq.runtime.attention.sdpa import SdpaAttention
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.programs.eager import EagerProgram
from llmq.runtime.programs.lowering import NotLoweredError
from llmq.runtime.programs.native import NativeProgram

ISAS = native.isas()
HALF_STEP = 2**-8  # of a bfloat16, relative: rounded once
PROMPTS = [[(7 * position + 31 * row) % 500 + 3 for position in range(80)] for row in range(3)]


@pytest.fixture(autouse=True)
def own_instruction_set():
    threads = native.num_threads()
    yield
    native.force_isa(native.native_isa())
    native.set_num_threads(threads)


def run_rows(rows: torch.Tensor, out_width: int, add) -> torch.Tensor:
    """What operations make of bfloat16 rows: add(program, source) appends them and returns their buffer."""
    program = native.Program()
    source = program.add_buffer(rows.shape[1])
    program.add_embed(rows.data_ptr(), rows.shape[1], 1.0, source)
    result = add(program, source)
    out = torch.full((len(rows), out_width), torch.nan, dtype=torch.bfloat16)
    numbers = torch.arange(len(rows))
    program.run(len(rows), numbers.data_ptr(), numbers.data_ptr(), [], result, out.data_ptr())
    return out


def assert_near(made: torch.Tensor, expected: torch.Tensor, roundings: int = 1, floor: float = 1e-6) -> None:
    allowed = roundings * HALF_STEP * expected.abs() + floor
    assert ((made.double() - expected).abs() <= allowed).all()


rows_of = st.sampled_from([1, 2, 3, 17, 130])
widths = st.sampled_from([1, 5, 8, 16, 17, 33, 64, 576, 1000])


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    rows=rows_of,
    width=widths,
    kind=st.sampled_from(["rms", "layer"]),
    seed=st.integers(0, 99),
)
def test_norms_equal_float64(isa, rows, width, kind, seed):
    native.force_isa(isa)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, width, generator=generator) * 3 + 1).bfloat16()
    weight, bias = torch.randn(2, width, generator=generator)

    def add(program, source):
        result = program.add_buffer(width)
        norm = native.Norm(getattr(native.NormKind, kind), width, 1e-5, weight.data_ptr(), bias.data_ptr())
        program.add_residual(width, native.Norm(), 1.0, norm, source, -1, result)
        return result

    exact = x.double()
    if kind == "rms":
        expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    else:
        expected = F.layer_norm(exact, (width,), weight.double(), bias.double(), 1e-5)
    assert_near(run_rows(x, width, add), expected, floor=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    rows=rows_of,
    width=widths,
    function=st.sampled_from(list(ACTIVATIONS)),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_activations_equal_float64(isa, rows, width, function, gated, seed):
    native.force_isa(isa)
    x = torch.randn(rows, 2 * width if gated else width, generator=torch.Generator().manual_seed(seed)) * 4
    x[0, 0] = -120.0
    x = x.bfloat16()
    names = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

    def add(program, source):
        result = program.add_buffer(width)
        kind = getattr(native.ActivationFunction, names.get(function, function))
        program.add_activate(kind, gated, width, source, result)
        return result

    expected = ACTIVATIONS[function](x[:, :width].double())
    if gated:
        expected = expected * x[:, width:].double()
    assert_near(run_rows(x, width, add), expected, roundings=2, floor=3e-5)


@settings(max_examples=30, deadline=None)
@given(
    isa=st.sampled_from(ISAS), rows=rows_of, width=widths, scale=st.sampled_from([1.0, 0.3]), seed=st.integers(0, 99)
)
def test_residuals_equal_torch(isa, rows, width, scale, seed):
    """x + scale · y to the bit, with the roundings of torch's operations."""
    native.force_isa(isa)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()

    def add(program, source):
        y = program.add_buffer(width)
        program.add_activate(native.ActivationFunction.relu, False, width, source, y)
        program.add_residual(width, native.Norm(), scale, native.Norm(), source, y, -1)
        return source

    y = F.relu(x)
    assert torch.equal(run_rows(x, width, add), x + (y if scale == 1.0 else y * scale))


@settings(max_examples=40, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    rows=rows_of,
    hidden=st.sampled_from([8, 40, 64]),
    size=st.sampled_from([1, 24, 33]),
    experts=st.sampled_from([1, 3, 8]),
    per_token=st.integers(1, 3),
    renormalize=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mixtures_equal_float64(isa, rows, hidden, size, experts, per_token, renormalize, gated, seed):
    native.force_isa(isa)
    per_token = min(per_token, experts)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator).bfloat16()
    router = torch.randn(experts, hidden, generator=generator).bfloat16()
    wides = torch.randn(experts, 2 * size if gated else size, hidden, generator=generator).bfloat16()
    outs = torch.randn(experts, hidden, size, generator=generator).bfloat16()
    linears = [[NativeLinear(weight, None) for weight in weights] for weights in ([router], wides, outs)]

    def add(program, source):
        logits, result = program.add_buffer(experts), program.add_buffer(hidden)
        program.add_linear(linears[0][0].packed, native.Activations.exact, 0.0, source, logits)
        of_experts = ([(one.packed, one.activations, 0.0) for one in group] for group in linears[1:])
        function = native.ActivationFunction.silu
        program.add_experts(*of_experts, per_token, renormalize, function, gated, size, source, logits, result)
        return result

    made = run_rows(x, hidden, add)
    probabilities = (x.double() @ router.double().T).bfloat16().double().softmax(dim=-1)
    weights, chosen = probabilities.topk(per_token)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    expected = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            wide = (wides[expert].double() @ x[row].double()).bfloat16().double()
            active = F.silu(wide[:size]).bfloat16().double() * wide[size:] if gated else F.silu(wide)
            expected[row] += weight * (outs[expert].double() @ active.bfloat16().double())
    error = (made.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-3)
    # The last bit of a logit may turn a choice round.
    is_clear = torch.ones(rows, dtype=torch.bool)
    if experts > per_token:
        kept, left = probabilities.topk(per_token + 1).values[:, -2:].unbind(-1)
        is_clear = kept - left > 0.1 * kept
        assert rows < 17 or is_clear.sum() > rows // 2
    assert (error[is_clear] < 2e-2).all()
    assert made.isfinite().all()


def test_only_who_reads_unwritten_slots_has_them_cleared(tmp_path):
    folder = save_tiny_model(tmp_path, "llama", dtype="bfloat16")
    for attention, clears in ((SdpaAttention(), True), (NativeAttention(), False)):
        store = make_store(folder, "bf16")
        EagerProgram(load_native(folder), store, attention)
        assert store.clears_unwritten == clears


def both_programs(folder, kv_dtype):
    decoder = load_native(folder)
    stores = [make_store(folder, kv_dtype, in_tiles=in_tiles) for in_tiles in (False, True)]
    return stores, [EagerProgram(decoder, stores[0], NativeAttention()), NativeProgram(decoder, stores[1])]


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_a_step_equals_the_decoders_own_forward(tmp_path, model_type, changes):
    """Same linears and same attention: what differs is how rows are normed, rotated, activated and stored."""
    folder = save_tiny_model(tmp_path, model_type, dtype="bfloat16", **changes)
    stores, programs = both_programs(folder, "bf16")
    for spans in ([(0, 33), (0, 1), (0, 70)], [(33, 34), (1, 80), (70, 71)]):
        made = [
            program.forward(replace(make_step(store, PROMPTS, spans), output_rows=None)).float()
            for store, program in zip(stores, programs, strict=True)
        ]
        errors = (made[1] - made[0]).norm(dim=1) / made[0].norm(dim=1)
        # Most are 0; others are one bit of one bf16, and what later layers make of it. It can turn a router's choice
        # round, which later tokens then read: of mixtures only most tokens are the same.
        assert float(errors.median()) < 4e-3
        assert "num_local_experts" in changes or float(errors.max()) < 1.2e-2
    assert all(program.attention_kernel == f"native {native.isa()}" for program in programs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
def test_a_token_does_not_depend_on_how_it_is_scheduled(tmp_path, kv_dtype, isa):
    """In one chunk, in small ones beside others, one by one, by more threads: equal to the last bit."""
    native.force_isa(isa)
    folder = save_tiny_model(tmp_path, "gemma3_text", dtype="bfloat16", head_dim=16, sliding_window=24)
    decoder = load_native(folder)
    whole = run_spans(decoder, make_store(folder, kv_dtype), [[(0, 80)]], PROMPTS[:1])
    chunks = [[(i, i + 16), (2 * i, 2 * i + 2), (i, i + 5)] for i in range(0, 80, 16) if 2 * i < 78]
    assert torch.equal(run_spans(decoder, make_store(folder, kv_dtype), chunks, PROMPTS)[:48], whole[:48])
    native.set_num_threads(3)
    single = [[(i, i + 1)] for i in range(80)]
    assert torch.equal(run_spans(decoder, make_store(folder, kv_dtype), single, PROMPTS[:1]), whole)


def run_spans(decoder, store, steps, prompts):
    """Hidden states of the first prompt over several steps."""
    program = NativeProgram(decoder, store)
    made = []
    for spans in steps:
        hidden = program.forward(make_step(store, prompts, spans))
        made.append(hidden[: spans[0][1] - spans[0][0]])
    return torch.cat(made)


def test_operations_are_timed_from_when_it_is_asked(tmp_path):
    folder = save_tiny_model(tmp_path, "llama", dtype="bfloat16")
    store = make_store(folder)
    program = NativeProgram(load_native(folder), store)
    program.forward(make_step(store, PROMPTS, [(0, 9), (0, 1), (0, 1)]))
    assert program.operation_times() == []
    program.start_timing()
    start = time.perf_counter()
    program.forward(make_step(store, PROMPTS, [(9, 40), (1, 2), (1, 2)]))
    most = time.perf_counter() - start
    times = program.operation_times()
    names = [name for name, _ in times]
    assert names[:5] == [
        "embed",
        "residual, norm",
        "linear 128x64",
        "norm, rotate, write K and V",
        "attention",
    ]
    assert names.count("attention") == 2
    assert names.count("linear 256x64") == 2
    assert all(seconds > 0 for _, seconds in times)
    assert sum(seconds for _, seconds in times) < most
    program.forward(make_step(store, PROMPTS, [(40, 41), (2, 3), (2, 3)]))
    assert all(now <= before for (_, now), (_, before) in zip(program.operation_times(), times, strict=True))


def test_what_does_not_lower_says_why(tmp_path):
    folder = save_tiny_model(tmp_path, "llama")
    decoder = load_native(folder)
    decoder.blocks[1].part.out = lambda x: x
    decoder.blocks[1].part.out.kernel = "hand"
    with pytest.raises(NotLoweredError, match="linears by hand"):
        NativeProgram(decoder, make_store(folder))
