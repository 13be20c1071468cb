"""Layers streamed one at a time against transformers' own forward of the whole model, for every family."""

import pytest
import torch
from safetensors.torch import save_file
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.families import FAMILIES
from llmq.quantize.experts import UnfusedExperts
from llmq.quantize.layer_stream import LayerStream, TensorReader, experts_of, served_dtype
from llmq.quantize.mappings import mappings_of

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES = [
    ("llama", {"attention_bias": True}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma2", {"head_dim": 16, "sliding_window": 8}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}),
    ("phi3", {}),
    ("olmo2", {}),
    ("smollm3", {"num_hidden_layers": 4}),
    ("granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3}),
    ("starcoder2", {}),
    ("mixtral", MOE),
    ("qwen3_moe", {**MOE, "moe_intermediate_size": 32, "mlp_only_layers": [0]}),
]
DTYPES = ("bfloat16", "float16")
SAMPLES = [list(range(5, 25)), [7, 300, 9], list(range(100, 120))]


def last_hidden(stream):
    """The residual stream behind the last layer, for each batch."""
    made = []
    for hidden in list(stream.embed(SAMPLES)):
        for index in range(stream.num_layers):
            with stream.layer(index) as layer:
                hidden = stream.run(index, layer, hidden)
        made.append(hidden)
    return made


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_the_stream_computes_what_the_whole_model_does(tmp_path, model_type, changes):
    folder = save_tiny_model(tmp_path, model_type, **changes)
    stream = LayerStream(read_checkpoint(folder), torch.device("cpu"))
    long, short = last_hidden(stream)
    assert long.shape[:2] == (2, 20)  # samples of one length go together
    assert short.shape[:2] == (1, 3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ours, ids in ((long[0], SAMPLES[0]), (long[1], SAMPLES[2]), (short[0], SAMPLES[1])):
        theirs = model.model(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(model.model.norm(ours), theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_a_layer_as_served_is_the_layer_but_for_the_rounding_of_its_products(tmp_path, model_type, changes):
    folder = save_tiny_model(tmp_path, model_type, dtype="bfloat16", **changes)
    stream = LayerStream(read_checkpoint(folder), torch.device("cpu"))
    stream.served_dtype = torch.bfloat16  # on machines without such products too
    hidden = torch.randn(2, 12, stream.checkpoint.architecture.hidden_size)
    with stream.layer(0) as layer:
        seen = []
        linear = next(module for module in layer.modules() if isinstance(module, torch.nn.Linear))
        linear.register_forward_hook(lambda *args: seen.append(args[2].dtype))
        exact, served = stream.run(0, layer, hidden), stream.run_as_served(0, layer, hidden)
        assert seen == [torch.float32, torch.bfloat16]
        assert served.dtype == torch.float32
        # Of the median token: a router's near tie may send one to another expert.
        assert 0 < float(((served - exact).norm(dim=-1) / (exact - hidden).norm(dim=-1)).median()) < 0.02


def test_only_a_bf16_checkpoint_is_calibrated_in_bf16(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("llmq.quantize.layer_stream.cpu_flags", lambda: frozenset({"avx512_bf16"}))
    bf16, fp16 = (read_checkpoint(save_tiny_model(tmp_path / dtype, "llama", dtype=dtype)) for dtype in DTYPES)
    assert (served_dtype(bf16, cpu), served_dtype(fp16, cpu)) == (torch.bfloat16, torch.float32)
    monkeypatch.setattr("llmq.quantize.layer_stream.cpu_flags", lambda: frozenset({"avx2"}))
    assert served_dtype(bf16, cpu) == torch.float32


def test_every_family_is_streamed():
    assert {model_type for model_type, _ in CASES} == set(FAMILIES)


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_a_mapping_without_an_obstacle_is_an_identity(tmp_path, model_type, changes):
    """Scales moved from columns into what feeds them, for all mappings of a layer, change no output."""
    checkpoint = read_checkpoint(save_tiny_model(tmp_path, model_type, **changes))
    stream = LayerStream(checkpoint, torch.device("cpu"))
    index = stream.num_layers - 1
    torch.manual_seed(0)
    hidden = torch.randn(2, 12, checkpoint.architecture.hidden_size)
    with stream.layer(index) as layer:
        before = stream.run(index, layer, hidden)
        moved = [mapping for mapping in mappings_of(checkpoint, index) if mapping.obstacle is None]
        for mapping in moved:
            _fold(layer, mapping, checkpoint.architecture.head_dim)
        torch.testing.assert_close(stream.run(index, layer, hidden), before, rtol=1e-4, atol=1e-4)
    assert all(mapping.obstacle for mapping in mappings_of(checkpoint, index) if mapping not in moved)
    assert moved


def _fold(layer, mapping, head_dim):
    source = layer.get_submodule(mapping.source)
    linears = [layer.get_submodule(name) for name in mapping.linears]
    rows = source.weight.shape[0]
    scale = torch.rand(rows) + 0.5
    columns = scale
    if mapping.kind == "heads":
        queries = linears[0].in_features // rows
        columns = scale.view(-1, 1, head_dim).expand(-1, queries, -1).flatten()
    for linear in linears:
        linear.weight.mul_(columns)
    if mapping.kind == "norm":
        source.weight.copy_((source.weight + mapping.offset) / scale - mapping.offset)
    else:
        source.weight.div_(scale[:, None])
    if getattr(source, "bias", None) is not None:
        source.bias.div_(scale)


@torch.no_grad()
def test_experts_are_linears_under_the_names_of_the_checkpoint(tmp_path):
    checkpoint = read_checkpoint(save_tiny_model(tmp_path, "mixtral", **MOE))
    stream = LayerStream(checkpoint, torch.device("cpu"))
    with stream.layer(0) as layer:
        names = {name for name, _ in layer.named_parameters()}
    prefix = "model.layers.0."
    assert names == {name.removeprefix(prefix) for name in checkpoint.tensors if name.startswith(prefix)}
    assert "block_sparse_moe.experts.3.w2.weight" in names


@torch.no_grad()
def test_counting_and_forcing_experts_changes_no_output(tmp_path):
    checkpoint = read_checkpoint(save_tiny_model(tmp_path, "qwen3_moe", **MOE, moe_intermediate_size=32))
    stream = LayerStream(checkpoint, torch.device("cpu"))
    hidden = torch.randn(2, 12, checkpoint.architecture.hidden_size)
    with stream.layer(0) as layer:
        experts = experts_of(layer)
        assert isinstance(experts, UnfusedExperts)
        before = stream.run(0, layer, hidden)
        experts.is_counting = True
        stream.run(0, layer, hidden)
        experts.is_counting = False
        assert int(experts.routed_tokens.sum()) == 24 * 2
        seen = []
        layer.mlp.experts.get_submodule("2").gate_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        experts.forced = frozenset({2})
        torch.testing.assert_close(stream.run(0, layer, hidden), before)
        assert seen[-1].shape[0] == 24


def test_tensors_are_read_as_safetensors_reads_them(tmp_path):
    tensors = {
        "odd": torch.arange(5, dtype=torch.uint8),  # what follows lies at no multiple of its own size
        "bf16": torch.randn(3, 7).bfloat16(),
        "f8": torch.randn(2, 9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "e8m0": torch.ones(3).to(torch.float8_e8m0fnu),
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    read = TensorReader.of_file(path)
    for name, tensor in tensors.items():
        made = read(name)
        assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
        assert made.flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()
    read("bf16").zero_()
    assert torch.equal(read("bf16"), tensors["bf16"])
    with pytest.raises(KeyError):
        read("absent")
