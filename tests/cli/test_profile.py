"""`llmq profile`: the floor by a datasheet from config.json alone, and a tiny model measured here."""

import json

import pytest
from published_configs import LLAMA_8B
from typer.testing import CliRunner

from llmq.cli.profile import app
from llmq.profiles.errors import InputError


@pytest.fixture
def llama_8b(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def profile(*args) -> str:
    done = CliRunner().invoke(app, [str(one) for one in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_floor_by_a_datasheet(llama_8b):
    found = json.loads(profile(llama_8b, "--gpu", "h100", "--batch", "1,256", "--ctx", "1k,2k", "--json"))
    assert [one["step"] for one in found["steps"]][:3] == [
        "decode, batch 1, 1,024 tokens",
        "decode, batch 256, 1,024 tokens",
        "prefill of 1,024 tokens",
    ]
    decode, prefill = found["steps"][0], found["steps"][2]
    # 7.5 B weights of 2 bytes and 1,024 tokens of 128 KiB, over 3,350 GB/s.
    assert decode["floor_s"] == pytest.approx((2 * 7_504_924_672 + 1024 * 131_072) / 3.35e12, rel=1e-4)
    assert decode["bound_by"] == "memory"
    assert decode["tokens_per_s_at_most"] == pytest.approx(1 / decode["floor_s"])
    assert prefill["bound_by"] == "compute"
    assert prefill["floor_s"] == pytest.approx(prefill["flops"] / 989e12)
    assert decode["measured_s"] is None


def test_fewer_bits_and_more_ranks_lower_the_floor(llama_8b):
    def floor(*args) -> dict:
        return json.loads(profile(llama_8b, "--gpu", "h100", "--batch", "1", *args, "--json"))

    plain, fp8, w4, tp = floor(), floor("--weights", "fp8"), floor("--weights", "w4"), floor("--tp", "2")
    floors = [one["steps"][0]["floor_s"] for one in (plain, fp8, w4, tp)]
    assert floors[0] > floors[1] > floors[2]
    assert floors[3] == pytest.approx(floors[0] / 2, rel=1e-6)
    assert (plain["flops_per_s"], fp8["flops_per_s"], w4["flops_per_s"]) == (989e12, 1979e12, 989e12)


def test_a_table_for_people(llama_8b):
    shown = profile(llama_8b, "--gpu", "h100", "--tp", "2")
    for words in ("3,350.0 GB/s", "32 × 512", "80 % within", "memory", "For one of 2 ranks", "bound by memory"):
        assert words in shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gpu", "h1000"], "did you mean"),
        (["--gpu", "h100", "--batch", "0"], "--batch 0"),
        (["--gpu", "h100", "--batch", "1,x"], "--batch x"),
        (["--gpu", "h100", "--ctx", "1m"], "own context is 131,072"),
        (["--gpu", "h100", "--tp", "3"], "8 KV heads and an MLP of 14336 features evenly; valid: 1, 2, 4"),
        (["--gpu", "h100", "--threads", "2"], "--threads is of this machine"),
        (["--tp", "2"], "--tp 2: of a --gpu"),
    ],
)
def test_wrong_usage_is_said(llama_8b, args, words):
    with pytest.raises(InputError, match=words):
        profile(llama_8b, *args)


def test_a_model_is_measured_on_this_machine(tiny_llama, capfd):
    found = json.loads(profile(tiny_llama(), "--batch", "1,3", "--ctx", "64", "--threads", "1", "--json"))
    assert found["bandwidth_bytes_per_s"] > 1e8
    assert found["flops_per_s"] > 1e8
    decode, _, prefill = found["steps"]
    assert 0 < decode["floor_s"] < decode["measured_s"]
    assert decode["floor_over_measured"] == pytest.approx(decode["floor_s"] / decode["measured_s"])
    shares = decode["operations"]
    assert "outside torch's operations" in shares
    assert any(name.startswith("aten::") for name in shares)
    assert sum(shares.values()) == pytest.approx(1, abs=0.02)
    assert prefill["measured_s"] > 0
    assert "USDT" not in capfd.readouterr().err
    shown = profile(tiny_llama(), "--batch", "1", "--ctx", "64", "--threads", "1")
    assert "floor / measured" in shown
    assert "Where the time of decode, batch 1, 64 tokens went" in shown


def test_what_an_engine_is_expected_to_take_beside_the_floor(llama_8b):
    found = json.loads(profile(llama_8b, "--gpu", "h100", "--batch", "1,64", "--ctx", "2k", "--json"))
    for step in found["steps"]:
        expected = step["expected_s"]
        assert step["floor_s"] < expected["low"] < expected["expected"] < expected["high"]
        assert step["experts_read"] is None


def test_experts_that_a_step_reads_by_its_batch(tmp_path):
    moe = {
        **LLAMA_8B,
        "model_type": "deepseek_v3",
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 512,
    }
    moe |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**moe, "n_shared_experts": 1}))
    found = json.loads(profile(tmp_path, "--gpu", "h100", "--batch", "1,16", "--json"))
    assert [step["experts_read"] for step in found["steps"][:2]] == pytest.approx([4 / 64, 1 - (1 - 4 / 64) ** 16])
    assert "4 of 64 experts a token" in profile(tmp_path, "--gpu", "h100")
