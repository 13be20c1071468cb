"""`llmq quantize` on SmolLM2: C06 (a tied head), C07 (what comes along) and C01 on the real shapes; kill -9."""

import json
import subprocess
import sys
import time

import httpx
import pytest
from safetensors import safe_open

from llmq.cli.local_server import serving
from llmq.quantize.preflight import work_path
from llmq.quantize.report import REPORT_FILE

pytestmark = pytest.mark.system

EMBEDDING_BYTES = 49152 * 576 * 2  # 54 MiB in bf16, stored once


def llmq(*arguments):
    command = [sys.executable, "-m", "llmq", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def rounded(smollm2, tmp_path_factory):
    out = tmp_path_factory.mktemp("smollm2") / "rtn"
    done = llmq("quantize", smollm2, "--rtn", "--json", "-o", out)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_group_size_128_is_refused_and_64_is_what_auto_takes(smollm2, rounded, tmp_path):
    done = llmq("quantize", smollm2, "--gptq", "--group-size", "128", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "576 inputs = 4·128 + 64" in done.stderr
    assert "--group-size 64" in done.stderr
    assert not (tmp_path / "out").exists()
    assert rounded[1]["group_size"]["value"] == 64


def test_the_file_holds_the_embedding_once(rounded):
    out, report = rounded
    packed = sum(entry["bytes_after"] for entry in report["linears"])
    norms = 61 * 576 * 2
    assert report["bytes_after"] == EMBEDDING_BYTES + packed + norms
    assert (out / "model.safetensors").stat().st_size < report["bytes_after"] * 1.001 + 100_000
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (no mapping)


def test_a_chat_is_the_same_31_tokens_in_the_tokenizer_and_served(rounded, smollm2):
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "Hi"}]
    ids = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for folder in (rounded[0], smollm2)
    ]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 31
    assert ids[0][:4] == [1, 9690, 198, 2683]
    assert json.loads((rounded[0] / "generation_config.json").read_text())["eos_token_id"] == 2
    with serving(rounded[0], "--max-model-len", "64", "--threads", "1") as url:
        body = {"model": rounded[0].name, "messages": chat, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]["prompt_tokens"] == 31


# q, k and v of three layers, on little text: what is looked at is what a kill leaves, not how good the weights are.
GPTQ = (
    *("--gptq", "--samples", "2", "--seq-len", "64", "--no-proof"),
    *("--ignore", r"re:.*layers\.([3-9]|[12]\d)\..*", "--ignore", "mlp", "--ignore", "o_proj"),
)


def test_after_kill_9_the_same_command_writes_the_same_bytes_and_another_is_refused(smollm2, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert llmq("quantize", smollm2, *GPTQ, "-o", whole).returncode == 0
    command = [sys.executable, "-m", "llmq", "quantize", str(smollm2), *GPTQ, "-o", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (work_path(out) / "layer-00001.safetensors").exists():
            time.sleep(0.005)
        process.kill()
    assert not out.exists()
    assert [path.name for path in sorted(work_path(out).glob("layer-*"))] == [
        f"layer-0000{n}.safetensors" for n in (0, 1)
    ]
    refused = llmq("quantize", smollm2, *GPTQ, "--damp", "0.02", "-o", out)
    assert refused.returncode == 2
    assert "2 finished layers" in refused.stderr
    assert "recipe: options.damp was null, is 0.02" in refused.stderr
    assert llmq("quantize", smollm2, *GPTQ, "-o", out).returncode == 0
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {REPORT_FILE, "quantization_report.html"}:  # which say how long it took
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    reports = [json.loads((folder / REPORT_FILE).read_text()) | {"duration_s": 0} for folder in (out, whole)]
    assert reports[0] == reports[1]
