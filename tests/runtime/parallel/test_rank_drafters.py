"""Drafters over ranks: their layers are shared as the model's are, and guess what they guess on one rank."""

import pytest
from drafters import SAMPLED, everything, guided, prompts
from engine_driver import force_preemption, greedy, run_all
from random_heads import random_heads, save_head, save_heads

from llmq.profiles.errors import InputError
from llmq.runtime.config import Speculation

DRAFTERS = ("another model", "its first layers", "EAGLE", "Medusa")


@pytest.fixture
def speculation(tiny_llama, tmp_path):
    """speculation(name) of one of DRAFTERS for `tiny_llama()`."""

    def make(name: str) -> Speculation:
        if name == "another model":
            drafter = tiny_llama(num_key_value_heads=4, num_hidden_layers=3, initializer_range=0.05)
            return Speculation(method="draft", draft_model=str(drafter))
        if name == "its first layers":
            return Speculation(method="draft", draft_layers=1)
        if name == "EAGLE":
            return Speculation(method="eagle", draft_model=str(save_head(tmp_path / "eagle", tiny_llama(), bias=True)))
        save_heads(tmp_path / "medusa", random_heads())
        return Speculation(method="medusa", draft_model=str(tmp_path / "medusa"))

    return make


def counts(engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.num_steps, stats.draft_tokens, stats.accepted_draft_tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_and_guesses_are_those_of_one_rank(tiny_llama, make_engine, speculation, name):
    folder, given, chosen = tiny_llama(), prompts(8, 60), speculation(name)
    changes = {"max_num_batched_tokens": 48, "max_num_seqs": 6}
    plain, alone = make_engine(folder, **changes), make_engine(folder, speculation=chosen, **changes)
    together = make_engine(folder, speculation=chosen, tensor_parallel=2, **changes)
    try:
        for params in (greedy(24), SAMPLED):
            expected = everything(run_all(plain, given, params))
            assert everything(run_all(alone, given, params)) == expected
            assert everything(run_all(together, given, params)) == expected
            assert counts(together) == counts(alone)
        assert alone.stats().draft_tokens > 0
        assert together.executor.runner.drafter.name == alone.executor.runner.drafter.name
        assert together.info.weight_bytes >= alone.info.weight_bytes
    finally:
        together.close()


def test_a_pool_that_runs_dry_on_two_ranks(tiny_llama, make_engine):
    folder, given = tiny_llama(), prompts(8)
    plain = run_all(make_engine(folder), given, greedy(60))
    pool = {"kv_cache_memory_bytes": 100 * 1024, "max_model_len": 96}
    engine = guided(make_engine, folder, folder, 8, adaptive=True, tensor_parallel=2, **pool)
    try:
        force_preemption(engine)
        assert everything(run_all(engine, given, greedy(60))) == everything(plain)
        assert engine.stats().num_preemptions > 0
    finally:
        engine.close()


def test_a_drafter_that_cannot_be_split_is_refused_by_its_name(tiny_llama, make_engine):
    odd = tiny_llama(intermediate_size=127)
    words = f"--draft-model {odd}: --tp 2 does not split 4 heads, 2 KV heads and an MLP of 127"
    with pytest.raises(InputError, match=words):
        guided(make_engine, tiny_llama(), odd, tensor_parallel=2)
