"""n > 1: one prompt computed once, its blocks shared and copied where the texts part."""

import pytest
import torch
from engine_driver import Collected, force_preemption, run_all

from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

PROMPT = [(11 * position) % 500 + 3 for position in range(37)]


def params(seed: int | None, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 30, "ignore_eos": True, **changes})


def run_forked(engine, forks, request_id="parent", **changes) -> dict[str, Collected]:
    engine.add_request(
        EngineRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling_params=params(1, **changes), forks=forks)
    )
    made: dict[str, Collected] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            made.setdefault(output.request_id, Collected()).add(output)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return made


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}, {"max_num_seqs": 2}, {"kv_dtype": "int8"}],
    ids=repr,
)
def test_each_fork_answers_as_a_request_of_its_own(tiny_llama, make_engine, changes):
    folder = tiny_llama()
    expected = [
        run_all(make_engine(folder, kv_dtype=changes.get("kv_dtype", "auto")), [PROMPT], params(seed, logprobs=1))[0]
        for seed in range(1, 6)
    ]
    made = run_forked(make_engine(folder, **changes), [(f"fork {seed}", seed) for seed in range(2, 6)], logprobs=1)
    for alone, forked in zip(expected, made.values(), strict=True):
        assert forked.token_ids == alone.token_ids
        assert [e.logprob for e in forked.logprobs] == pytest.approx([e.logprob for e in alone.logprobs], abs=1e-4)
    assert len({tuple(collected.token_ids) for collected in made.values()}) == 5


def test_the_prompt_is_computed_and_stored_once(tiny_llama, make_engine):
    engine = make_engine(tiny_llama(), enable_prefix_caching=False)
    engine.add_request(
        EngineRequest(
            request_id="parent",
            prompt_token_ids=PROMPT,
            sampling_params=params(1),
            forks=[(str(index), index) for index in range(7)],
        )
    )
    outputs = engine.step()
    assert {len(output.new_token_ids) for output in outputs} == {1}
    assert len(outputs) == 8
    stats = engine.stats()
    assert stats.num_blocks - stats.num_free_blocks == 3  # 37 tokens, not 8 × 37
    assert stats.prompt_tokens == 37
    engine.step()
    stats = engine.stats()
    assert stats.num_blocks - stats.num_free_blocks == 2 + 8  # the partly filled block, once for each


def test_forks_survive_preemption(tiny_llama, make_engine):
    folder = tiny_llama()
    forks = [(str(index), index) for index in range(2, 8)]
    roomy = make_engine(folder)
    expected = {name: made.token_ids for name, made in run_forked(roomy, forks, max_tokens=60).items()}
    block_bytes = roomy.info.kv_cache_bytes // roomy.info.num_blocks
    tight = make_engine(folder, kv_cache_memory_bytes=15 * block_bytes, max_model_len=112)
    force_preemption(tight)
    made = {name: collected.token_ids for name, collected in run_forked(tight, forks, max_tokens=60).items()}
    assert made == expected
    assert tight.stats().num_preemptions > 0


def test_forks_end_with_a_parent_that_ends_before_them_and_alone_after(tiny_llama, make_engine):
    engine = make_engine(tiny_llama(), max_num_batched_tokens=16, max_num_seqs=4)
    request = EngineRequest(
        request_id="parent", prompt_token_ids=PROMPT, sampling_params=params(1), forks=[("a", 2), ("b", 3)]
    )
    engine.add_request(request)
    engine.step()
    assert [output.request_id for output in engine.abort(["a", "unknown"])] == ["a"]
    engine.abort(["parent"])
    assert not engine.has_unfinished_requests
    engine.add_request(request)  # the names are free again
    while len(outputs := engine.step()) < 3:
        pass
    assert {output.request_id for output in outputs} == {"parent", "a", "b"}
    engine.abort(["parent"])
    assert {output.request_id for output in engine.step()} == {"a", "b"}
    engine.abort(["a", "b"])
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_fork_that_is_aborted_early_leaves_the_others_their_seeds(tiny_llama, make_engine):
    folder = tiny_llama()
    expected = run_all(make_engine(folder), [PROMPT], params(3))[0].token_ids
    engine = make_engine(folder, max_num_batched_tokens=16, max_num_seqs=4)
    engine.add_request(
        EngineRequest(
            request_id="parent", prompt_token_ids=PROMPT, sampling_params=params(1), forks=[("a", 2), ("b", 3)]
        )
    )
    engine.step()  # the runner has been told of both
    engine.abort(["a"])
    made: dict[str, Collected] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            made.setdefault(output.request_id, Collected()).add(output)
    assert made.keys() == {"parent", "b"}
    assert made["b"].token_ids == expected


def test_names_must_be_free(tiny_llama, make_engine):
    engine = make_engine(tiny_llama())
    for forks in ([("parent", 1)], [("x", 1), ("x", 2)]):
        with pytest.raises(ValueError, match="in use"):
            engine.add_request(
                EngineRequest(request_id="parent", prompt_token_ids=PROMPT, sampling_params=params(1), forks=forks)
            )


def test_block_copies_move_everything_a_block_holds(tiny_llama, make_engine):
    store = make_engine(tiny_llama(), kv_dtype="int8").executor.runner.store
    store._blocks[3] = torch.arange(store.layout.block_bytes) % 251
    store.copy_blocks([(3, 5), (4, 3)])  # 3 is read before it is overwritten
    assert torch.equal(store._blocks[5], (torch.arange(store.layout.block_bytes) % 251).to(torch.uint8))
    assert not store._blocks[3].any()
