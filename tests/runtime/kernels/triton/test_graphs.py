"""Decoding in graphs, with a capture that only pretends, and refuses what no graph could replay."""

import itertools
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import fake_flashinfer
import pytest
import torch
from engine_driver import greedy, run_all
from family_cases import MOE
from random_weights import make, quantize_folder
from tiny_model import save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from llmq.profiles.errors import InputError
from llmq.runtime.attention.flashinfer import FlashInferAttention
from llmq.runtime.kernels.triton.launch import Launch
from llmq.runtime.programs.graphs import GraphedProgram, buckets
from llmq.runtime.programs.triton import TritonProgram
from llmq.runtime.sampling_params import SamplingParams

PROMPTS = [[(7 * position + 31 * row) % 500 + 3 for position in range(3 + 2 * row)] for row in range(3)]
# What waits for the device, depends on its numbers, or brings numbers of the host into a graph, where they stay.
FORBIDDEN = {"_local_scalar_dense", "nonzero", "lift_fresh", "bincount", "masked_select", "unique", "_unique2"}


class NoHost(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._schema.name.removeprefix("aten::")
        if name in FORBIDDEN or any(
            isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in _indices(name, arguments)
        ):
            raise AssertionError(f"{name}: no CUDA graph can hold this")
        return function(*arguments, **(keywords or {}))


def _indices(name, arguments):
    """Those of an indexing: a boolean one makes as many rows as it has Trues."""
    return (arguments[1] or []) if name in ("index.Tensor", "index", "index_put", "index_put_") else []


@contextmanager
def recorded(persistent):
    """The launches within, as a graph would hold them: sizes and numbers, and the addresses of what outlives a step."""
    launches, run = [], Launch.run

    def record(launch):
        held = {}
        for name, value in launch.arguments.items():
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage().data_ptr()
                address = value.data_ptr() if storage in persistent else None
                value = (address, tuple(value.shape), value.stride(), value.dtype)
            held[name] = value
        launches.append((launch.kernel, launch.grid, dict(launch.constants), held))
        run(launch)

    with patch.object(Launch, "run", record), NoHost():
        yield launches


class PretendedCapture:
    """Runs a step again in place of a replay, and asserts that it launches what was captured."""

    def __init__(self, persistent):
        self.persistent, self.num_captured, self.num_replayed = persistent, 0, 0

    def __call__(self, make_result):
        self.num_captured += 1
        with recorded(self.persistent) as captured:
            result = make_result()
        assert captured

        def replay():
            self.num_replayed += 1
            with recorded(self.persistent) as launches:
                again = make_result()
            assert launches == captured
            result.copy_(again)

        return replay, result


def graphed(engine, max_num_seqs):
    """Put a step's decoding into graphs. The weights and blocks outlive a step; so do a graph's buffers, by address."""
    runner = engine.executor.runner
    assert isinstance(runner.program, TritonProgram)
    tensors = [runner.store._blocks, *runner.program.model.dense_weights.values(), runner.program.model.embedding]
    capture = PretendedCapture({tensor.untyped_storage().data_ptr() for tensor in tensors})
    runner.program = GraphedProgram(runner.program, max_num_seqs, 128, capture)
    return capture


@pytest.mark.parametrize(
    ("model_type", "changes", "bits"),
    [("llama", {}, None), ("mistral", {"sliding_window": 6}, None), ("mixtral", {**MOE, "intermediate_size": 64}, 4)],
)
def test_tokens_equal_torchs(tmp_path, make_engine, model_type, changes, bits):
    folder = save_tiny_model(tmp_path / "source", model_type, **changes)
    if bits is not None:
        folder = quantize_folder(
            *(folder, tmp_path / "quantized", "compressed-tensors"),
            lambda out, in_, seed: make("int", bits, "group", out, in_, seed, zero="int", group_size=32),
        )
    engines = [make_engine(folder, kernels=kernels) for kernels in ("torch", "triton")]
    capture = graphed(engines[1], 3)
    # Of unequal lengths, so that sequences leave one after the other.
    params = [greedy(tokens) for tokens in (3, 5, 8)]
    expected, made = (run_all(engine, PROMPTS, params) for engine in engines)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    assert capture.num_captured == 3  # of 3, 2 and 1 sequences
    assert capture.num_replayed == 7


def test_anothers_attention_outside_of_graphs(tmp_path, make_engine):
    """Prompts by FlashInfer (a stand-in that computes), decoding by the kernels of our own in graphs."""
    folder, plans = save_tiny_model(tmp_path, "llama"), Counter()
    engines = [make_engine(folder, kernels=kernels) for kernels in ("torch", "triton")]
    runner = engines[1].executor.runner
    attention = FlashInferAttention(fake_flashinfer, torch.device("cpu"))
    plan = attention._plan
    attention._plan = lambda shape, step: plans.update(["decode" if shape.is_decode else "prompt"]) or plan(shape, step)
    runner.program = TritonProgram(runner.program.model, runner.store, attention)
    capture = graphed(engines[1], 3)
    assert runner.program.attention_kernel == "flashinfer, triton in CUDA graphs"
    expected, made = (run_all(engine, PROMPTS, greedy(3)) for engine in engines)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    assert plans == {"prompt": 1}  # of two layers
    assert capture.num_replayed == 2
    runner.program = runner.program.eager  # as with --enforce-eager
    assert [one.token_ids for one in run_all(engines[1], PROMPTS[:1], greedy(3))] == [expected[0].token_ids]
    assert plans["decode"] == 2


class NoWaiting:
    """Within, whatever brings a tensor's numbers to Python fails, for on a GPU it waits; kernels, which are interpreted
    here, aside."""

    WAYS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, monkeypatch):
        self.is_on, self.num_steps, run = False, 0, Launch.run
        for way in self.WAYS:
            monkeypatch.setattr(torch.Tensor, way, self._guarded(way, getattr(torch.Tensor, way)))

        def unguarded(launch):
            was, self.is_on = self.is_on, False
            run(launch)
            self.is_on = was

        monkeypatch.setattr(Launch, "run", unguarded)

    def _guarded(self, way, function):
        def call(tensor, *arguments, **keywords):
            assert not self.is_on, f"a step is launched, and {way}() waits for the device"
            return function(tensor, *arguments, **keywords)

        return call

    def __enter__(self):
        self.is_on, self.num_steps = True, self.num_steps + 1

    def __exit__(self, *_):
        self.is_on = False


def test_a_decode_step_is_launched_without_waiting_for_the_one_before(tmp_path, make_engine, monkeypatch):
    folder = save_tiny_model(tmp_path, "llama")
    params = [greedy(4), SamplingParams(seed=3, top_p=0.9, max_tokens=6, ignore_eos=True), greedy(5)]
    expected = run_all(make_engine(folder, kernels="torch"), PROMPTS, params)
    engine = make_engine(folder, kernels="triton", overlap_steps=True)
    graphed(engine, 3)
    guard, launch = NoWaiting(monkeypatch), engine.executor.runner.launch

    def guarded(plan):
        if plan.new_requests or not plan.scheduled:
            return launch(plan)
        with guard:
            return launch(plan)

    engine.executor.runner.launch = guarded
    assert [one.token_ids for one in run_all(engine, PROMPTS, params)] == [one.token_ids for one in expected]
    assert guard.num_steps == 5
    with guard, pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(1).item()


def test_a_bucket_that_is_not_full_writes_nothing_more(tmp_path, make_engine):
    """Two sequences in a graph of four: what the others would write goes nowhere."""
    engine = make_engine(save_tiny_model(tmp_path, "llama"), kernels="triton", enable_prefix_caching=False)
    capture = graphed(engine, 4)
    store, before = engine.executor.runner.store, []
    inner = engine.executor.runner.program.forward
    engine.executor.runner.program.forward = lambda inputs: (
        before.append(store.parts(1)[0].payload.clone()),
        inner(inputs),
    )[1]
    run_all(engine, PROMPTS, greedy(4))
    assert (capture.num_captured, capture.num_replayed) == (1, 3)
    for older, newer in itertools.pairwise([*before[1:], store.parts(1)[0].payload]):
        slots = (older != newer).flatten(2).any(dim=2)  # [blocks, tokens]
        assert int(slots.sum()) == len(PROMPTS)


def test_what_no_graph_holds_is_seen():
    for refused in (
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
        lambda x: x.nonzero(),
    ):
        with pytest.raises(AssertionError, match="no CUDA graph"), NoHost():
            refused(torch.ones(3))


def test_buckets_cost_at_most_seven_sequences():
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(3) == [1, 2, 3]
    assert all(next(size for size in buckets(256) if size >= n) - n <= 7 for n in range(1, 257))


def test_leaving_graphs_out_is_refused_where_there_are_none(tmp_path, make_engine):
    with pytest.raises(InputError, match="--enforce-eager: the engine runs on a CPU here"):
        make_engine(save_tiny_model(tmp_path, "llama"), enforce_eager=True)
