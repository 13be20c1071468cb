"""Each script on so little that it takes a second (always), and as it is meant (`-m bench -s`)."""

import json

import bench_consumers
import bench_contention
import bench_decode
import bench_eval_speed
import bench_http_overhead
import bench_kv_dtypes
import bench_long_context
import bench_native_numerics
import bench_paging
import bench_prefix_cache
import bench_quantized_tasks
import bench_scheduler
import bench_slo
import bench_soak
import bench_speculative
import bench_start
import bench_static_batching
import bench_step
import pytest

from llmq.evals.samples import Sample
from llmq.profiles.slo import Slo
from llmq.runtime.kernels import native, why_absent


@pytest.fixture(autouse=True)
def traces(shared, monkeypatch):
    monkeypatch.setenv("LLMQ_SHARED", str(shared))


def test_paging_wastes_less_than_reserving():
    found = bench_paging.main(["--requests", "120", "--capacity-tokens", "32768"])["ways"]
    assert found["paged"]["waste"] < 0.04
    assert found["reserve the maximum"]["waste"] > 0.6
    assert found["paged"]["concurrent"] > 2 * found["reserve the maximum"]["concurrent"]


def test_an_unbounded_pool_finds_all_that_can_be_found():
    found = bench_prefix_cache.main(["--requests", "150"])
    for trace in found.values():
        assert trace["pools"]["1.0"]["ours"] == pytest.approx(trace["bound"])
        assert trace["pools"]["1.0"]["lru_by_request"] == pytest.approx(trace["bound"])
        assert trace["pools"]["0.01"]["ours"] < trace["bound"]


def test_lru_by_request_evicts_whole_requests():
    chains = [(1, 2, 3), (4, 5), (1, 2, 3), (6,), (4, 5)]
    assert bench_prefix_cache.lru_by_request(chains, 5) == 3 / 11  # room for (6,) is made of (4, 5)
    assert bench_prefix_cache.never_evicting(chains) == 5 / 11
    assert bench_prefix_cache.lru_by_block(chains, 5) == 4 / 11  # (4) stays of it
    # (6,) will not be asked for again: it takes the place of nobody.
    assert bench_prefix_cache.farthest_next_use(chains, 5) == 5 / 11
    assert bench_prefix_cache.farthest_next_use(chains, 3) == 3 / 11


def test_continuous_batching_beats_static_below_each_limit():
    found = bench_static_batching.main(["--requests", "60", "--batch-sizes", "8,16", "--budgets", "128,512"])
    *limited, unlimited = found["H100, 8B, simulated"]
    for pair in limited:
        assert pair["continuous"]["tpot_p99_s"] <= pair["static"]["tpot_p99_s"]
        assert pair["ratio"] > 1.1
    assert unlimited["ratio"] >= limited[-1]["ratio"]


def test_a_steps_cost_is_fitted_to_the_engines_own_steps(tiny_llama):
    options = ["--requests", "20", "--batch-sizes", "4", "--budgets", "128", "--real-requests", "4"]
    real = ["--model", str(tiny_llama()), "--real-batch-sizes", "2", "--real-budgets", "16", "--real-scale", "0.03"]
    found = bench_static_batching.main([*options, *real])
    fitted = found["fitted"]
    assert min(*fitted.pop("row_s"), *fitted.values()) >= 0


def test_the_scheduler_is_timed_in_both_cases(capsys):
    bench_scheduler.main(["--running", "8", "--steps", "5", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert all(case["median_s"] <= case["p99_s"] for case in found.values())
    assert len(found) == 2


def test_past_saturation_the_slo_is_kept_by_who_is_answered():
    found = bench_slo.main(["--requests", "120", "--loads", "0.5,2.5"])
    for machine in found.values():
        limits_s = Slo.parse(machine["slo"]).limits_s
        below, over = machine["loads"]
        assert below["with"]["shed_share"] == 0.0
        assert below["with"]["kept_of_answered"] > 0.98
        assert over["without"]["tpot_p99_s"] > limits_s["tpot"] >= over["with"]["tpot_p99_s"]
        assert over["with"]["ttft_p99_s"] <= limits_s["ttft"]
        assert over["without"]["kept_of_answered"] < 0.7
        assert over["with"]["kept_of_answered"] > 0.96
        assert over["with"]["goodput_tokens_per_s"] > 1.2 * over["without"]["goodput_tokens_per_s"]
    over = found["a CPU, 135M, simulated"]["loads"][1]  # where 120 requests are many
    assert over["without"]["kept_of_answered"] < 0.1
    assert 0.05 < over["with"]["shed_share"] < 0.6
    assert over["with"]["goodput_tokens_per_s"] > 10 * over["without"]["goodput_tokens_per_s"]


def test_the_real_server_is_swept_with_and_without_its_promise(tiny_llama):
    model = tiny_llama(max_position_embeddings=1024)
    options = ["--requests", "20", "--loads", "0.5", "--window-s", "1", "--server-loads", "0.5", "--threads", "1"]
    found = bench_slo.main(["--model", str(model), "--slo", "ttft=5s,tpot=5s", "--length-scale", "0.03", *options])
    (point,) = found[f"{model}, measured"]["loads"]
    for way in ("without", "with"):
        assert point[way]["requests"] >= bench_slo.CROWD_REQUESTS - bench_slo.WARM_UP_REQUESTS
        assert (point[way]["shed_share"], point[way]["other_errors"]) == (0.0, 0)


def test_contention_is_measured_step_by_step(tiny_llama):
    model = tiny_llama()
    options = ["--streams", "2", "--stream-tokens", "8", "--alone-steps", "3", "--prompt-tokens", "100"]
    found = bench_contention.main(["--model", str(model), *options, "--max-num-batched-tokens", "32", "--threads", "1"])
    assert found["alone"]["steps"] == 3
    assert found["chunk"]["steps"] == 4
    assert found["during"]["steps"] == 4  # 30 tokens a step are left to the prompt beside the two streams


def test_a_short_soak_answers_all_and_leaks_nothing(tiny_llama):
    model = tiny_llama(max_position_embeddings=1024)
    options = ["--duration-s", "2", "--rate", "80", "--leaving", "0.2", "--malformed", "0.2", "--length-scale", "0.03"]
    found = bench_soak.main(["--model", str(model), "--threads", "1", "--connections", "20", *options])
    assert found["errors"] == {}
    assert found["answered"] > 10
    assert found["left"] > 0
    assert found["malformed"] > 0
    assert found["malformed_not_refused"] == 0
    assert found["leaked_blocks"] == 0
    assert found["rss_end_bytes"] > 50 * 2**20


def test_kv_dtypes_are_told_apart(tiny_llama, tmp_path):
    (tmp_path / "text").write_text("It was the best of times, it was the worst of times. " * 12)
    options = ["--text", str(tmp_path / "text"), "--window", "64", "--windows", "2", "--dtype", "fp32"]
    found = bench_kv_dtypes.main(["--model", str(tiny_llama()), "--threads", "1", *options])
    assert set(found) == set(bench_kv_dtypes.KV_DTYPES)
    assert "mean_kl" not in found["fp32"]  # what auto is here, hence what the others are compared with
    assert 0 < found["fp16"]["mean_kl"] < found["bf16"]["mean_kl"] < found["int4"]["mean_kl"]
    assert found["fp16"]["mean_kl"] < found["int8"]["mean_kl"] < found["int4"]["mean_kl"]
    assert found["bf16"]["bytes_per_token"] == 256


@pytest.mark.skipif(native is None, reason=why_absent)
def test_numerics_of_native_kernels_are_held_against_exact_ones(shared, tmp_path):
    folder = shared / "interop" / "autogptq-w4g128-sym"
    (tmp_path / "text").write_text("It was the best of times, it was the worst of times. " * 12)
    options = ["--text", str(tmp_path / "text"), "--window", "64", "--windows", "2", "--threads", "1"]
    found = bench_native_numerics.main([str(folder), *options])
    kl = {way: one["mean_kl"] for way, one in found.items()}
    assert 0 < kl["head int8"] < kl["activations int8"]
    assert 0 < kl["torch"] < kl["both int8"]


def test_a_checkpoint_is_held_against_a_consumer_token_by_token(tiny_llama, tmp_path):
    options = ["--model", str(tiny_llama()), "--folder", str(tmp_path), "--tokens", "8"]
    found = bench_consumers.main([*options, "--recipes", "rtn w4 sym", "autoawq"])
    assert found["rtn w4 sym"]["transformers"]["leads"] == [{}] * 10
    assert "k_proj has 32 outputs" in found["autoawq"]["refused"]
    kept = tmp_path / "rtn-w4-sym.consumer_transformers.py.json"
    content = json.loads(kept.read_text())
    content["answer"][3][5] ^= 1  # another consumer, that went astray once
    kept.write_text(json.dumps(content))
    found = bench_consumers.main([*options, "--recipes", "rtn w4 sym"])["rtn w4 sym"]["transformers"]
    assert found["leads"][3][5] > 0.01
    assert "9 equal, 1 DIFFER" in found["verdict"]
    assert [number for number, leads in enumerate(found["leads"]) if leads] == [3]


@pytest.mark.bench
@pytest.mark.parametrize(
    "main",
    [
        bench_consumers.main,
        bench_paging.main,
        bench_prefix_cache.main,
        bench_scheduler.main,
        lambda _: bench_static_batching.main(["--model", "smollm2-135m"]),
        bench_contention.main,
        bench_decode.main,
        bench_http_overhead.main,
        bench_long_context.main,
        bench_start.main,
        bench_step.main,
        bench_soak.main,
        bench_kv_dtypes.main,
        bench_native_numerics.main,
        lambda _: bench_slo.main(["--model", "smollm2-135m"]),
    ],
    ids=[
        "consumers",
        "paging",
        "prefix cache",
        "scheduler",
        "static batching",
        "contention",
        "decode",
        "HTTP overhead",
        "long context",
        "start",
        "step",
        "soak",
        "kv dtypes",
        "native numerics",
        "slo",
    ],
)
def test_measure(main):
    main([])


@pytest.mark.skipif(native is None, reason=why_absent)
def test_programs_are_measured_by_turns(tiny_llama):
    options = ["--batch", "1,2", "--prefill", "40", "--context", "20", "--tokens", "6", "--turns", "1", "--cpu-time"]
    measured = bench_decode.main([str(tiny_llama(max_position_embeddings=128)), *options])["measurements"]
    assert [(one["work"], one["program"]) for one in measured[:2]] == [("decode 1", "torch"), ("decode 1", "native")]
    assert [one["work"] for one in measured[2::2]] == ["decode 2", "prefill 40"]
    # Layers and the tied head once, and the K and V of 23 tokens: what torch and native read alike.
    assert measured[0]["bytes_per_step"] == measured[1]["bytes_per_step"]


@pytest.mark.skipif(native is None, reason=why_absent)
@pytest.mark.parametrize("work", [["--batch", "2", "--tokens", "5"], ["--prefill", "90"]])
def test_the_parts_of_a_step_are_found(tiny_llama, work):
    found = bench_step.main([str(tiny_llama(max_position_embeddings=128)), "--context", "20", *work])
    parts = found["parts_s"]
    assert {"head", "sampler", "attention", "linear 128x64"} < set(parts)
    rest = parts.pop("the rest: scheduling, inputs, outputs")
    assert rest == pytest.approx(max(0, found["seconds"] - sum(parts.values())))
    assert found["steps"] >= 3
    assert min(parts.values()) > 0


def test_both_backends_of_lm_eval_predict_the_same_and_timings_are_kept(tiny_llama, shared, tmp_path, monkeypatch):
    model = tiny_llama(max_position_embeddings=4096)
    options = ["--model", str(model), "--batch-sizes", "1,4", "--probe", "2", "--limit", "3", "--work", str(tmp_path)]
    options += ["--tasks", "arc_easy,lambada_openai,gsm8k"]
    found = bench_eval_speed.main(options)
    assert set(found) == {"arc_easy", "lambada_openai", "gsm8k"}
    for of_task in found.values():
        assert (of_task["items"], of_task["different"]) == (3, [])
        assert of_task["hf_batch_size"] in (1, 4)
    (tmp_path / "gsm8k.ours.3-items.json").unlink()
    measured, timed = [], bench_eval_speed.timed
    monkeypatch.setattr(bench_eval_speed, "timed", lambda lm, **of: measured.append(of["task"]) or timed(lm, **of))
    again = bench_eval_speed.main(options)
    assert measured == ["gsm8k"]
    assert {**again, "gsm8k": 0} == {**found, "gsm8k": 0}
    with pytest.raises(SystemExit, match="other dtype"):
        bench_eval_speed.main([*options, "--dtype", "bf16"])


def test_a_difference_is_told_with_its_margins():
    def sample(answers):
        return Sample("task", 7, "", "", [], "", answers, {})

    apart = bench_eval_speed.difference(sample([[-1.0, True], [-1.5, False]]), sample([[-1.25, True], [-1.0, True]]))
    assert apart == {"doc_id": 7, "ours": 0, "hf": 1, "ours_margin_nats": 0.5, "hf_margin_nats": 0.25}
    assert bench_eval_speed.difference(sample(["abc"]), sample(["abd"]))["parted_at_character"] == 2
    assert bench_eval_speed.difference(sample([[-1.0, True]]), sample([[-1.1, False]]))["hf_nats"] == -1.1
    assert bench_eval_speed.difference(sample([[-1.0, True]]), sample([[-1.1, True]])) is None


def test_a_servers_cpu_time_is_told_from_a_steps(tiny_llama):
    model = str(tiny_llama(max_position_embeddings=128))
    found = bench_http_overhead.main([model, "--streams", "3", "--prompt", "10", "--tokens", "100", "--turns", "2"])
    assert found["steps"] == pytest.approx([97, 97], abs=15)
    assert found["tokens_a_step"] == pytest.approx(3, abs=0.2)
    assert found["step_us"] > 0
    assert found["scheduler_us"] > 0
    assert len(found["overheads"]) == 2


def test_a_start_is_told_by_its_phases(tiny_llama):
    turns = bench_start.main([str(tiny_llama(max_position_embeddings=256)), "--turns", "1"])["turns"]
    ends = list(turns["an engine"][0]["ends"].values())
    assert len(ends) == 5
    assert ends == sorted(ends)
    assert 0 < turns["llmq serve"][0]["ends"]["ready"] < turns["llmq serve"][0]["ends"]["first token"]
    assert turns["llmq serve"][0]["peak_bytes"] > turns["an engine"][0]["peak_bytes"] > 2**26


@pytest.mark.skipif(native is None, reason=why_absent)
def test_a_step_grows_by_the_kv_that_it_reads(tiny_llama):
    options = ["--contexts", "64,20000", "--turns", "2", "--cpu-time", "--kv-dtype", "int8"]
    found = bench_long_context.main([str(tiny_llama(dtype="bfloat16")), *options])
    short, long = found["measurements"]
    assert found["program"] == "native"
    assert long["kv_bytes"] == 20000 * 2 * 2 * 2 * (16 + 2)  # layers, K and V, heads, numbers and a scale
    assert short["step_s"] < long["step_s"]
    assert long["bytes_per_s"] == pytest.approx(
        (long["kv_bytes"] - short["kv_bytes"]) / (long["step_s"] - short["step_s"])
    )


def test_speculation_is_held_against_the_same_engine_without(tiny_llama, tmp_path):
    drafter = str(tiny_llama())
    methods = ["--methods", "ngram,draft,layers-1,auto-layers-1", "--drafter", drafter]
    sizes = ["--prompts", "2", "--tokens", "24", "--prompt-tokens", "100", "--repeats", "2", "--kv-mib", "8"]
    options = [drafter, *methods, *sizes, "--workloads", "code,chat", "--batch", "1,2", "--work", str(tmp_path)]
    found = bench_speculative.main(options)
    assert len(found) == 16
    assert all(row["ratio"] > 0 and row["tokens_per_pass"] >= 1 and row["rounds"] == 2 for row in found.values())
    assert 0 < found["chat.layers-1.batch-2"]["draft_s_share"] < 1
    assert bench_speculative.main([*options, "--minutes", "0"]) == found  # what was kept
    alone, together = found["chat.ngram.batch-1"], found["chat.ngram.batch-2"]
    assert (alone["pairs"], together["pairs"]) == (4, 2)
    assert alone["low"] < alone["high"]
    refilled = bench_speculative.main([*options[:-2], "--waves", "2", "--prompts", "4", "--repeats", "1"])
    assert all(row["ratio"] > 0 and row["tokens_per_pass"] >= 1 for row in refilled.values())
    assert (refilled["chat.ngram.batch-1"]["num_texts"], refilled["chat.ngram.batch-1"]["pairs"]) == (4, 2)
    assert (refilled["chat.ngram.batch-2"]["num_texts"], refilled["chat.ngram.batch-2"]["pairs"]) == (4, 1)
    # The same model guesses for itself; bfloat16's rounding by torch is not the same for other numbers of rows.
    assert found["code.draft.batch-1"]["accepted"] > 0.5 * found["code.draft.batch-1"]["draft_tokens"] > 0


def test_the_interval_of_paired_ratios_is_students():
    found = bench_speculative.interval([0.8, 1.0, 1.25])
    # Logarithms -0.2231, 0, 0.2231: deviation 0.2231, 4.303 · 0.2231 / √3 = 0.5543.
    assert (found["low"], found["high"]) == (pytest.approx(0.5745, abs=2e-4), pytest.approx(1.7407, abs=6e-4))
    assert found["verdict"] == "not slower"
    assert bench_speculative.interval([0.9, 0.91, 0.92])["verdict"] == "slower"
    assert bench_speculative.interval([1.1, 1.11, 1.12])["verdict"] == "faster"
    assert bench_speculative.interval([1.1])["verdict"] == ""


def test_quantized_checkpoints_are_held_against_their_original(tiny_llama, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_quantized_tasks, "WINDOW", 64)
    options = ["--methods", "fp8", "--limits", "arc_easy=3", "--windows", "2", "--work", str(tmp_path)]
    found = bench_quantized_tasks.main(["--model", str(tiny_llama()), *options])
    assert abs(found["parity"]["relative_difference"]) < 1e-3
    assert found["fp8"]["weight_bytes"] < found["original"]["weight_bytes"]
    assert found["fp8"]["divergence"]["mean_kl"] > 0
    assert [one["verdict"] for one in found["fp8"]["comparisons"]] == ["NOT ENOUGH ITEMS"]
    assert set(found["original"]["scores"]) == {"arc_easy"}
