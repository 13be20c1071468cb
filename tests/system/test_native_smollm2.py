"""The native program on SmolLM2 in bfloat16: as near to float32 as torch is, and the same tokens however scheduled."""

import pytest
import torch
from engine_driver import greedy, run_all
from tokenizers import Tokenizer

from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.kernels import native, why_absent

pytestmark = [pytest.mark.system, pytest.mark.skipif(native is None, reason=why_absent)]

TEXT_TOKENS = 1200
# A lead of the likeliest token that bfloat16's rounding does not turn round, in any order of summation.
CLEAR_MARGIN = 1.0


def make_engine(folder, **changes):
    fields = {"max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, **changes}
    return Engine.from_config(EngineConfig(model=str(folder), **fields))


@pytest.fixture(scope="module")
def prompts(smollm2, shared):
    text = (shared / "data" / "text" / "alice29.txt").read_text(encoding="utf-8")[2000:12000]
    ids = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids[:TEXT_TOKENS]
    return [ids[:700], ids[700:1000], ids[1000:]]


def logits_of(folder, prompts, **changes):
    engine, seen = make_engine(folder, **changes), {}
    engine.observe_logits(lambda name, at, rows: seen.setdefault(name, []).append(rows.clone()))
    run_all(engine, prompts, greedy(0, prompt_logprobs=0))
    return torch.cat([torch.cat(seen[str(index)]) for index in range(len(prompts))]), engine.info.fingerprint


def test_logits_are_as_near_to_float32_as_torchs(smollm2, prompts):
    exact, _ = logits_of(smollm2, prompts, dtype="fp32", kernels="torch")
    by_torch, _ = logits_of(smollm2, prompts, dtype="bf16", kernels="torch")
    made, fingerprint = logits_of(smollm2, prompts, dtype="bf16", kernels="native")
    assert fingerprint["program"] == "native"
    errors = [float((one - exact).norm() / exact.norm()) for one in (made, by_torch)]
    assert errors[0] < 1.1 * errors[1] < 0.05
    first, second = exact.topk(2, dim=-1).values.unbind(-1)
    is_clear = first - second > CLEAR_MARGIN
    assert is_clear.sum() > 400
    assert torch.equal(made.argmax(-1)[is_clear], exact.argmax(-1)[is_clear])


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_scheduling_changes_no_token(smollm2, prompts, kv_dtype):
    """Together, alone, in small chunks, and from a warm prefix."""
    prompts = [prompt[:150] for prompt in prompts]
    expected = [one.token_ids for one in run_all(make_engine(smollm2, kv_dtype=kv_dtype), prompts, greedy(16))]
    for changes in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 16}, {"threads": 1}):
        engine = make_engine(smollm2, kv_dtype=kv_dtype, **changes)
        for _ in ("cold", "warm"):
            assert [one.token_ids for one in run_all(engine, prompts, greedy(16))] == expected
