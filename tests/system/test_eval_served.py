"""`llmq eval URL`: through a running server what in-process evaluation gives, to the token."""

import json
import subprocess
from pathlib import Path

import pytest
from served import LLMQ, ONE_THREAD, Served

pytestmark = pytest.mark.system


def evaluate(model: object, *options: object) -> subprocess.CompletedProcess:
    return subprocess.run([LLMQ, "eval", str(model), *map(str, options)], capture_output=True, text=True, timeout=180)


def samples(saved: Path) -> list[dict]:
    lines = saved.with_name(f"{saved.stem}.samples.jsonl").read_text().splitlines()[1:]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    words = ["value", "object", "class", "import"]
    lines = {
        "choices": [
            {"query": f"the {words[i % 4]} of {i} {'and ' * (9 * i)}", "choices": ["is", "or", "value"], "gold": i % 3}
            for i in range(8)
        ],
        "answers": [{"prompt": f"the {words[i % 4]} {i}", "answer": "x", "max_tokens": 9 + i} for i in range(6)],
        "chat": [{"messages": [{"role": "user", "content": f"hi {i}"}], "answer": "x", "stop": "e"} for i in range(4)],
        "texts": [{"text": "the value of an expression " * (1 + 20 * i)} for i in range(3)],
    }
    for name, items in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, items)))
    return folder


def test_a_server_gives_the_same_ids_answers_and_scores(tiny_llama, sets, tmp_path):
    folder = tiny_llama()
    server = Served(folder, "--max-num-seqs", "4")
    for name in ("choices", "answers", "chat", "texts"):
        options = ["--data", sets / f"{name}.jsonl", *(["--apply-chat-template"] if name == "chat" else [])]
        here, there = tmp_path / f"{name}-here.json", tmp_path / f"{name}-there.json"
        assert evaluate(folder, *options, "-o", here, *ONE_THREAD).returncode == 0
        done = evaluate(server.url, *options, "-o", there)
        assert done.returncode == 0, done.stderr
        for ours, theirs in zip(samples(here), samples(there), strict=True):
            assert theirs["prompt_token_ids"] == ours["prompt_token_ids"]
            assert theirs["scores"] == pytest.approx(ours["scores"], abs=1e-5)
            if name in ("answers", "chat"):
                assert theirs["answers"] == ours["answers"]
        described = [json.loads(path.read_text())["model"] for path in (here, there)]
        for key in ("sha256", "tokenizer_sha256", "chat_template_sha256", "fingerprint", "max_model_len"):
            assert described[0][key] == described[1][key]
    text = tmp_path / "text.txt"
    text.write_text("The value of an expression, or of a class, is an object.\nimport returns it.\n" * 30)
    measured = []
    for target, options in ((folder, ONE_THREAD), (server.url, ())):
        done = evaluate(target, "--ppl", text, "--window", 64, "--json", *options)
        assert done.returncode == 0, done.stderr
        measured.append(json.loads(done.stdout)["text"])
        measured[-1]["perplexity"].pop("elapsed_s")
    here, there = measured
    assert there.pop("perplexity") == pytest.approx(here.pop("perplexity"), rel=1e-5)
    assert there == here
    assert server.metric("llmq_kv_blocks_used") == 0
    assert server.stop() == 0


def test_what_a_server_cannot_be_asked_is_refused(tiny_llama, sets, tmp_path):
    server = Served(tiny_llama(), "--api-key", "secret")
    data = ("--data", sets / "choices.jsonl")
    refusals = {
        "which a server does not give": (server.url, "--baseline", tiny_llama()),
        "computes as it was started": (server.url, *data, "--dtype", "fp32"),
        "wants a key": (server.url, *data),
        "nothing answers": ("http://127.0.0.1:9", *data),
        "evaluate it by itself": (tiny_llama(), *data, "--baseline", server.url),
        "the tokenizer of smol": (server.url, *data, "--api-key", "secret", "--tokenizer", tmp_path),
    }
    for message, arguments in refusals.items():
        refused = evaluate(*arguments)
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    assert server.stop() == 0
