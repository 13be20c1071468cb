"""`llmq serve --tp --pp`: ranks as processes behind the real server."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from random_weights import make, quantize_folder
from served import Served
from tiny_model import save_tiny_model

pytestmark = pytest.mark.system

TEXT = "/v1/completions"


def rank_pids(server: Served) -> list[int]:
    engine = server.engine_pid()
    listed = [path.read_text().split() for path in Path(f"/proc/{engine}/task").glob("*/children")]
    return sorted(int(pid) for pids in listed for pid in pids)


def are_gone(pids: list[int], patience_s: float = 10) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_smollm2_on_three_ranks_says_what_one_says(smollm2: Path):
    body = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    flags = ("--dtype", "fp32", "--kv-cache-memory", "32MiB", "--max-model-len", "256")
    texts = []
    for tp in ("1", "3"):
        server = Served(smollm2, *flags, "--tp", tp)
        texts.append(server.complete(**body)["choices"][0]["text"])
        if tp == "3":
            assert "on 3 ranks of cpu" in server.stderr
            assert "tensor_parallel 3" in server.stderr
            assert "program torch" in server.stderr
            ranks = rank_pids(server)
            assert len(ranks) == 2
        assert server.stop() == 0, server.stderr
    assert texts[0] == texts[1]
    assert are_gone(ranks)


def test_smollm2_in_two_and_in_three_stages_says_what_one_says(smollm2: Path):
    """Of 30 layers and a tied embedding as large as eight of them, which both ends hold."""
    prompts = ["The capital of France is", "Water boils at", "Once upon a time"]
    body = {"prompt": prompts, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    flags = ("--dtype", "fp32", "--kv-cache-memory", "32MiB", "--max-model-len", "256")
    texts = []
    for pp in ("1", "2", "3"):
        server = Served(smollm2, *flags, "--pp", pp)
        texts.append([choice["text"] for choice in server.complete(**body)["choices"]])
        if pp != "1":
            assert f"on {pp} ranks in {pp} stages of cpu" in server.stderr
            assert "program torch" in server.stderr
            assert len(rank_pids(server)) == int(pp) - 1
        assert server.stop() == 0, server.stderr
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture
def tiny(tiny_llama) -> Path:
    return tiny_llama(model_type="qwen2")


@pytest.mark.parametrize("option", ["--tp", "--pp"])
def test_a_rank_killed_in_a_stream_ends_all_with_its_reason(tiny, option):
    server = Served(tiny, option, "2")
    engine, (victim,) = server.engine_pid(), rank_pids(server)
    events = []
    body = {"model": "smol", "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 240, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", TEXT, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 3:
                os.kill(victim, signal.SIGKILL)
    assert len(events) < 480
    assert f"rank 1 (pid {victim}) ended by signal 9" in json.loads(events[-1])["error"]["message"]
    assert server.wait(30) == 1
    assert f"rank 1 (pid {victim}) ended by signal 9" in server.stderr
    assert "Traceback" not in server.stderr
    assert are_gone([engine, victim])


@pytest.mark.parametrize("target", ["server", "engine", "rank at rest"])
def test_whoever_dies_takes_all_along(tiny, target):
    server = Served(tiny, "--tp", "2")
    engine, (rank,) = server.engine_pid(), rank_pids(server)
    os.kill({"server": server.process.pid, "engine": engine, "rank at rest": rank}[target], signal.SIGKILL)
    assert server.wait(30) == (-9 if target == "server" else 1)
    assert are_gone([engine, rank])


def test_ctrl_c_finishes_what_runs(tiny):
    server = Served(tiny, "--tp", "2")
    pids = [server.engine_pid(), *rank_pids(server)]
    # As a terminal does it: to every process of the group.
    for pid in [*pids, server.process.pid]:
        os.kill(pid, signal.SIGINT)
    assert server.wait(30) == 0, server.stderr
    assert "Traceback" not in server.stderr
    assert are_gone(pids)


def plain_qwen2(folder: Path) -> Path:
    return save_tiny_model(folder, "qwen2", dtype="bfloat16")


def mixture(folder: Path) -> Path:
    return save_tiny_model(folder, "mixtral", num_local_experts=4, num_experts_per_tok=2)


def gptq_in_activation_order(folder: Path) -> Path:
    source = save_tiny_model(folder / "source", "qwen2")
    return quantize_folder(
        source, folder, "gptq", lambda out, in_, seed: make("int", 4, "group", out, in_, seed, order=True)
    )


@pytest.mark.parametrize("make_model", [plain_qwen2, mixture, gptq_in_activation_order])
def test_tokens_over_http_are_those_of_one_rank(tmp_path, tiny_llama, make_model):
    (tmp_path / "model").mkdir()
    folder = make_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_llama() / name).read_bytes())
    body = {"prompt": [5, 6, 7], "max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answers = []
    for tp, pp in (("1", "1"), ("2", "1"), ("2", "2")):
        server = Served(folder, "--dtype", "fp32", "--tp", tp, "--pp", pp)
        answers.append(server.complete(**body)["choices"][0]["logprobs"])
        assert len(rank_pids(server)) == int(tp) * int(pp) - 1
        assert server.stop() == 0
    for answer in answers[1:]:
        assert answer["tokens"] == answers[0]["tokens"]
        assert answer["token_logprobs"] == pytest.approx(answers[0]["token_logprobs"], abs=1e-3)
