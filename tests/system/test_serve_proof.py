"""`llmq serve --proof`: the gate before anything ships, on a tiny model as a program of its own."""

import json
import subprocess

import pytest
from served import LLMQ, ONE_THREAD, Served

pytestmark = pytest.mark.system


def llmq(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([LLMQ, *map(str, arguments)], capture_output=True, text=True, timeout=180)


def test_a_proven_model_is_served_and_nothing_else_is(tiny_llama, tmp_path):
    folder, proof, own_set = tiny_llama(), tmp_path / "proof.json", tmp_path / "mine.jsonl"
    items = [{"query": f"the value of {i}", "choices": ["is", "or"], "gold": i % 2} for i in range(20)]
    own_set.write_text("\n".join(map(json.dumps, items)))
    proven = llmq(
        *("eval", folder, "--data", own_set, "--baseline", folder, "--max-drop", "20%", "-o", proof, *ONE_THREAD)
    )
    assert proven.returncode == 0, proven.stderr

    server = Served(folder, "--proof", str(proof))
    assert server.complete(prompt="the", max_tokens=1)["usage"]["completion_tokens"] == 1
    assert server.stop() == 0

    refusals = {
        "kv_dtype was fp32, would be int8": [folder, "--kv-dtype", "int8"],
        "attention_kernel was": [folder, "--batch-invariant"],  # known only when the engine is there
        "is of another model": [tiny_llama(num_hidden_layers=1)],
    }
    for message, arguments in refusals.items():
        refused = llmq("serve", *arguments, "--proof", proof, "--port", "0", *ONE_THREAD)
        assert refused.returncode == 1
        assert message in refused.stderr
        assert "http://" not in refused.stderr
        assert "Traceback" not in refused.stderr
