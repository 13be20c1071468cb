"""`llmq quantize` on SmolLM2: C06 (a tied head), C07 (what comes along) and C01 on the real shapes."""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

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


def test_a_chat_is_the_same_31_tokens(rounded, smollm2):
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
