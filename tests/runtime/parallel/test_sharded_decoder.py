"""A decoder's parts on several ranks compute what it computes whole: in float32, for every family and layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_cases import CASES
from native_decoder import make_step
from random_weights import make, quantize_folder
from thread_ranks import Meeting, ThreadRank, on_ranks
from tiny_model import save_tiny_model

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.quantize.formats.scheme import ActivationScheme
from llmq.runtime.attention.sdpa import SdpaAttention
from llmq.runtime.kv_store import KVStore
from llmq.runtime.layers.linear import make_linear
from llmq.runtime.models.loader import make_loader

PROMPTS = [[(7 * row + 11 * place) % 480 + 3 for place in range(9 + 14 * row)] for row in range(3)]
STEPS = [[(0, 9), (0, 20), (0, 30)], [(8, 9), (20, 23), (30, 37)]]  # prompts in chunks, one token again


def logits_of(folder: Path, rank: ThreadRank | None = None, dtype: torch.dtype = torch.float32) -> tuple:
    """Logits of every token of two steps, the decoder, and how many bytes of KV-cache a block has."""
    checkpoint = read_checkpoint(folder)
    decoder = make_loader(checkpoint, dtype, torch.device("cpu"), collectives=rank).load(256)
    ranks = 1 if rank is None else rank.num_ranks
    layout = KVCacheLayout.of(checkpoint.architecture, "fp32", tensor_parallel=ranks)
    store = KVStore(layout, 64, torch.device("cpu"))
    made = []
    for spans in STEPS:
        inputs = replace(make_step(store, PROMPTS, spans), output_rows=None)
        hidden = decoder.forward(inputs, store, SdpaAttention())
        made.append(decoder.logits(hidden))
    return (None if made[0] is None else torch.cat(made)), decoder, layout.block_bytes


def check(folder: Path, num_ranks: int, bound: float = 2e-5) -> tuple[list, list[ThreadRank]]:
    """Compare, and return the decoders and the ranks."""
    with torch.inference_mode():
        whole, _, _ = logits_of(folder)
    ranks: list[ThreadRank] = [None] * num_ranks

    def work(rank: ThreadRank):
        ranks[rank.rank] = rank
        return logits_of(folder, rank)

    made = on_ranks(num_ranks, work)
    assert [logits is None for logits, _, _ in made] == [False] + [True] * (num_ranks - 1)
    assert float((made[0][0] - whole).norm() / whole.norm()) < bound
    assert torch.equal(made[0][0].argmax(-1), whole.argmax(-1)) or bound > 1e-3
    return [decoder for _, decoder, _ in made], ranks


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=repr)
def test_every_family_on_two_ranks(tmp_path, model_type, changes):
    folder = save_tiny_model(tmp_path, model_type, **changes)
    layers = read_checkpoint(folder).architecture.num_layers
    decoders, ranks = check(folder, 2)
    norms = 2 if model_type == "olmo2" else 0  # whose norms of q and of k are over all heads
    for rank in ranks:
        # A step: one for the embedding, one after attention, one after the MLP or the mixture.
        assert rank.counts == {"all_reduce": len(STEPS) * (1 + (2 + norms) * layers), "gather": len(STEPS)}
    assert decoders[0].num_bytes < 0.75 * logits_of(folder)[1].num_bytes


@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 511},
        {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 8},
    ],
    ids=["one KV head on all ranks, words that do not divide", "a KV head each"],
)
def test_more_ranks(tmp_path, num_ranks, changes):
    folder = save_tiny_model(tmp_path, "qwen2", intermediate_size=144, **changes)
    decoders, _ = check(folder, num_ranks)
    assert [decoder.blocks[0].part.settings.shape.num_kv_heads for decoder in decoders] == (
        [1] * num_ranks if changes["num_key_value_heads"] == 1 else [12 // num_ranks] * num_ranks
    )


def test_a_head_of_its_own_is_split_too(tmp_path):
    decoders, _ = check(save_tiny_model(tmp_path, "llama", tie_word_embeddings=False), 2)
    assert [tuple(decoder.head.linear.weight.shape) for decoder in decoders] == [(256, 64)] * 2


def test_the_bias_behind_a_sum_is_added_once(tmp_path):
    decoders, _ = check(save_tiny_model(tmp_path, "llama", attention_bias=True, mlp_bias=True), 2)
    assert [decoder.blocks[0].part.o.bias is None for decoder in decoders] == [False, True]
    assert [decoder.blocks[1].part.out.bias is None for decoder in decoders] == [False, True]
    assert all(decoder.blocks[0].part.qkv.bias is not None for decoder in decoders)


def integers(bits: int, group_size: int = 16, **changes):
    return lambda out, in_, seed: make("int", bits, "group", out, in_, seed, group_size=group_size, **changes)


def rounded_inputs(kind: str, strategy: str, **changes):
    """8-bit weights whose inputs are rounded too."""

    def weight(out: int, in_: int, seed: int):
        made = make(kind, 8, strategy, out, in_, seed, **changes)
        size = 16 if strategy == "block" else None
        layout = {"int": "int-quantized", "float": "float-quantized"}[kind]
        scheme = replace(made.scheme, activation=ActivationScheme(kind, group_size=size), layout=layout)
        values = made.integers() if kind == "int" else made.values
        return replace(made, scheme=scheme, values=values)

    return weight


EXACT = [
    ("compressed-tensors", integers(4)),
    ("compressed-tensors", integers(4, zero="int")),
    ("compressed-tensors", integers(8, order=True)),
    ("gptq", integers(4)),
    ("gptq", integers(4, order=True)),
    ("gptq_v2", integers(4, order=True, zero="int")),
    ("gptq_v2", integers(3, group_size=32, zero="int")),
    ("awq", integers(4, zero="int")),
]


@pytest.mark.parametrize("model_type", ["qwen2", "phi3"])
@pytest.mark.parametrize(("format_name", "weight"), EXACT)
def test_integer_weights(tmp_path, model_type, format_name, weight):
    source = save_tiny_model(tmp_path / "source", model_type)
    decoders, _ = check(quantize_folder(source, tmp_path / "made", format_name, weight), 2)
    # No kernel is the slow one that runs any weight: a rank's columns in activation order are ordinary groups.
    assert all(decoder.kernels == {"dequantize planes"} for decoder in decoders)


@pytest.mark.parametrize("zero", [None, "int"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_columns_in_activation_order_run_by_the_packed_kernels(zero, num_ranks):
    """In bf16 on a CPU: a part's linear is one of a whole weight's kind, and the parts' sum is its product."""
    weight = make("int", 4, "group", 64, 384, 0, zero=zero, group_size=128, order=True)
    weight = replace(weight, scale=weight.scale.bfloat16())
    x = torch.randn(5, 384).bfloat16()
    exact = x.double() @ weight.dequantize().double().T
    for native in (False, True):
        whole = make_linear([weight], [None], torch.bfloat16, native)
        width, total = 384 // num_ranks, 0
        for rank in range(num_ranks):
            columns = slice(rank * width, (rank + 1) * width)
            part = weight.slice_columns(columns.start, columns.stop)
            linear = make_linear([part], [None], torch.bfloat16, native)
            assert linear.kernel == whole.kernel
            total = total + linear(x[:, columns]).double()
        assert float((total - exact).norm() / exact.norm()) < 6e-3


def test_quantized_experts(tmp_path):
    source = save_tiny_model(tmp_path / "source", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    check(quantize_folder(source, tmp_path / "made", "gptq", integers(4, order=True)), 2)


@pytest.mark.parametrize(
    ("format_name", "weight", "bound"),
    [
        # A scale for each token is a rank's own where the input is split: roundings differ.
        ("compressed-tensors", rounded_inputs("int", "channel"), 0.1),
        ("compressed-tensors", rounded_inputs("float", "channel"), 0.25),
        # One for each group of channels is the same: what remains is where sums are rounded next to a border.
        ("fp8", rounded_inputs("float", "block", block_rows=16), 0.1),
    ],
)
def test_rounded_inputs(tmp_path, format_name, weight, bound):
    source = save_tiny_model(tmp_path / "source", "qwen2")
    check(quantize_folder(source, tmp_path / "made", format_name, weight), 2, bound)


def test_groups_are_not_cut(tmp_path):
    source = save_tiny_model(tmp_path / "source", "qwen2", intermediate_size=192)
    folder = quantize_folder(source, tmp_path / "made", "gptq", integers(4, group_size=64))
    rank = ThreadRank(Meeting(2), 0)
    with pytest.raises(InputError) as raised:
        make_loader(read_checkpoint(folder), torch.float32, torch.device("cpu"), collectives=rank)
    assert "--tp 2: a rank would take 96 of the 192 input features of mlp.down_proj" in str(raised.value)
    assert "64 of them belong together; valid: 1" in str(raised.value)
    # In activation order each column has its group beside it.
    check(quantize_folder(source, tmp_path / "ordered", "gptq", integers(4, group_size=64, order=True)), 2)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("llmc-gptq-w4a16", 2e-5),
        ("autogptq-w4g128-sym", 2e-5),
        ("autogptq-w4g128-asym-actorder", 2e-5),
        ("autoawq-w4g128-gemm", 2e-5),
        ("llmc-sq-w8a8", 0.2),
        ("llmc-fp8-dynamic", 0.2),
        ("llmc-fp8-static", 0.2),
    ],
)
def test_what_other_libraries_wrote(shared, name, bound):
    check(shared / "interop" / name, 2, bound)
