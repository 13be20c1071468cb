"""`llmq quantize`: its flags, its words, its exit codes."""

import json
import os
import subprocess
import sys
import time

import pytest

from llmq.cli.main import main


@pytest.fixture
def llmq(monkeypatch, capsys):
    """llmq("quantize", ...) -> (exit code, stdout, stderr), in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["llmq", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def calib(tmp_path):
    path = tmp_path / "cal.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Line {i} of a short text about ferries."}) for i in range(20)))
    return path


def test_without_a_method_it_takes_awq_on_a_cpu_and_says_so(llmq, tiny_llama, calib, tmp_path):
    code, out, err = llmq("quantize", tiny_llama(), "--calib", calib, "--device", "cpu", "-o", tmp_path / "q")
    assert code == 0
    assert "method      AWQ, 4 bits (the default here: no device that computes in FP8)" in err
    assert "group size  64 (auto: the largest of" in err
    assert "20 samples" in err
    assert "lm_head" in err
    assert "weights after" in out
    assert "rounding alone" in out
    assert (tmp_path / "q" / "quantization_report.json").is_file()


def test_json_is_one_object_on_stdout(llmq, tiny_llama, tmp_path):
    code, out, _ = llmq("quantize", tiny_llama(), "--rtn", "--group-size", "32", "--json", "-o", tmp_path / "q")
    assert code == 0
    report = json.loads(out)
    assert report["scheme"] == "int4 g32 asymmetric"
    assert report == json.loads((tmp_path / "q" / "quantization_report.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--awq", "--gptq"], "one method at a time: --awq and --gptq"),
        (["--fp8", "--group-size", "64"], "--group-size does not apply to --fp8"),
        (["--fp8", "--calib", "builtin", "--samples", "3"], "--calib and --samples with --fp8"),
        (["--rtn", "--seq-len", "3"], "--seq-len with --rtn"),
        (["--awq", "--bits", "5"], "--bits 5 is not supported"),
        (["--awq", "--group-size", "128"], "128 does not divide"),
        (["--awq", "--calib", "missing.txt"], "no such file"),
        (["--awq", "--seq-len", "4096"], "at most 256 tokens"),
        (["--awq", "--ignore", "lm_heads"], "'lm_heads'"),
        (["--awq", "--device", "tpu"], "--device tpu"),
        (["--rtn", "--dry-quant"], "not --rtn"),
        (["--awq", "--damp", "0.1"], "--damp is GPTQ's"),
        (["--gptq", "--alpha", "0.5"], "--alpha is SmoothQuant's"),
        (["--fp8", "--fp8-scheme", "blocks"], "dynamic, static, block"),
        (["--fp8", "--kv", "int4"], "--kv int4: fp8 or int8"),
        (["--rtn", "--kv", "int8", "--format", "awq"], "no place for scales of the KV-cache"),
        (
            ["--gptq", "--format", "gptq", "--asym"],
            "--format compressed-tensors, gptq_v2 or awq does. It stores integers",
        ),
        (["--fp8", "--format", "fp8"], "a scale a block, inputs in fp8 (--fp8-scheme block)"),
        (["--smoothquant", "--dry-quant", "--format", "gptq"], "leave --format gptq out"),
        (["--awq", "--format", "ggml"], "--format ggml: one of compressed-tensors"),
        (["--rtn", "--recipe", "none.toml"], "--recipe none.toml: no such file"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_any_work(llmq, tiny_llama, tmp_path, arguments, words):
    model = tiny_llama()
    started = time.monotonic()
    code, out, err = llmq("quantize", model, *arguments, "-o", tmp_path / "q")
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert out == ""
    assert os.listdir(tmp_path) == []
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gptq", "--group-size", "48"], "48 does not divide"),
        (["--awq", "--bits", "8", "--format", "awq"], "does not store int8 g64 asymmetric"),
        (["--rtn", "--format", "ggml"], "--format ggml: one of"),
        (["--awq", "--calib", "nowhere.txt"], "no such file"),
        (["--calib", "bad.jsonl"], "bad.jsonl, line 1: not JSON"),  # the default method and device too
        (["--awq", "--calib", "bad.txt"], "not UTF-8"),
        (["--target", "2bits"], "--target 2bits: these linears"),
        (["--target", "4.25bits", "--format", "awq"], "one scheme for all linears"),
        (["--awq", "--device", "cuda"], "this machine has no driver of a GPU"),
    ],
)
def test_a_refusal_does_not_wait_for_torch(tiny_llama, tmp_path, options, words):
    """C01 and its kind are answered in the first second: from the headers, by this process alone."""
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    arguments = ["llmq", "quantize", str(tiny_llama()), *options, "-o", str(tmp_path / "q")]
    script = (
        "import atexit, os, sys\nfrom llmq.cli.main import main\nfrom llmq.profiles import machine\n"
        "machine.may_have_gpu = lambda: False\n"  # on one that has, torch is asked
        f"os.chdir({str(tmp_path)!r})\n"
        "atexit.register(lambda: print('torch' in sys.modules or 'transformers' in sys.modules))\n"
        f"sys.argv = {arguments!r}\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == "False\n"


def test_a_result_is_not_quantized_again(llmq, tiny_llama, tmp_path):
    assert llmq("quantize", tiny_llama(), "--rtn", "-o", tmp_path / "q")[0] == 0
    code, _, err = llmq("quantize", tmp_path / "q", "--awq", "-o", tmp_path / "q2")
    assert code == 2
    assert "already quantized (compressed-tensors, 4-bit int weights)" in err
    assert not (tmp_path / "q2").exists()


def test_a_folder_that_holds_something_is_not_written_to(llmq, tiny_llama, tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine").touch()
    code, _, err = llmq("quantize", tiny_llama(), "--rtn", "-o", tmp_path / "q")
    assert code == 2
    assert "not empty" in err
    assert os.listdir(tmp_path / "q") == ["mine"]


def test_a_recipe_file_names_the_method_and_single_linears(llmq, tiny_llama, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('method = "rtn"\ngroup_size = 32\n[[layers]]\nmatch = "down_proj"\nbits = 8\n')
    code, out, err = llmq("quantize", tiny_llama(), "--recipe", recipe, "--json", "-o", tmp_path / "q")
    assert code == 0
    assert "(as the recipe says)" in err
    schemes = {entry["name"].rpartition(".")[2]: entry["scheme"] for entry in json.loads(out)["linears"]}
    assert schemes["down_proj"] == "int8 g32 asymmetric"
    assert schemes["up_proj"] == "int4 g32 asymmetric"


def test_a_dry_run_prints_what_was_skipped(llmq, tiny_llama, calib, tmp_path):
    model = tiny_llama(model_type="phi3")
    code, out, err = llmq("quantize", model, "--smoothquant", "--dry-quant", "--calib", calib, "-o", tmp_path / "q")
    assert code == 0
    assert "scales moved, nothing rounded, float32" in err
    assert "2 scale mappings skipped: v is inside self_attn.qkv_proj" in err
    assert "in the linears" not in out


def test_a_dry_run_is_held_against_the_original_in_float32(llmq, tiny_llama, calib, tmp_path):
    command = ["quantize", tiny_llama(dtype="bfloat16"), "--smoothquant", "--dry-quant", "--alpha", "0.5"]
    code, out, _ = llmq(*command, "--calib", calib, "--json", "-o", tmp_path / "q")
    assert code == 0
    proof = json.loads(out)["proof"]
    assert proof["num_positions"] > 100
    assert proof["mean_kl"] < 1e-6  # in bfloat16 the original itself is further than that from its float32


def test_an_interruption_says_what_is_kept(llmq, tiny_llama, calib, tmp_path, monkeypatch):
    from llmq.quantize.work_folder import WorkFolder

    save = WorkFolder.save

    def save_one(work, index, result):
        if index:
            raise KeyboardInterrupt
        save(work, index, result)

    monkeypatch.setattr(WorkFolder, "save", save_one)
    code, _, err = llmq("quantize", tiny_llama(), "--awq", "--calib", calib, "-o", tmp_path / "q")
    assert code == 130
    assert f"1 finished layers are kept in {tmp_path / 'q.work'}" in err
    monkeypatch.undo()
    code, _, err = llmq("quantize", tiny_llama(), "--awq", "--group-size", "32", "--calib", calib, "-o", tmp_path / "q")
    assert code == 2
    assert "default.group_size was 64, is 32" in err
