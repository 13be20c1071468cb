"""Engines that take turns on the peers' work: a peer of sleep and arithmetic beside our own engine on a tiny model."""

import json
import os
import shutil
import sys

import bench_peers
import numpy as np
import pytest
from gguf import GGUFWriter

from llmq.runtime.kernels import native, why_absent

PEER = """
import time
from workload import measure
import llama_cpp
llama_cpp.llama_init_from_model("model", llama_cpp.Params)
assert llama_cpp.Params.n_ctx == 16 * 1024

def generate(requests):
    tokens = sum(new for _, new in requests)
    time.sleep(1e-3 * tokens)
    return tokens

measure("peer", generate, (16,))
"""
LLAMA_CPP = """
class Params:
    n_ctx, n_seq_max = 512, 16
def llama_init_from_model(model, params):
    return model
"""


def write_gguf(path):
    """An embedding that is not the head: 1,000 bytes are read for a token."""
    writer = GGUFWriter(path, "llama")
    for name, num_bytes in (("token_embd.weight", 512), ("output.weight", 600), ("output_norm.weight", 400)):
        writer.add_tensor(name, np.zeros(num_bytes // 4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def bench(shared, tiny_llama, tmp_path, monkeypatch):
    """bench(*options) -> the figures by (row, engine)."""
    scripts, peers, work = (tmp_path / name for name in ("scripts", "peers", "work"))
    for folder in (scripts, peers / "llamacpp" / "bin", work):
        folder.mkdir(parents=True)
    shutil.copy(shared / "peers" / "workload.py", scripts)
    (scripts / "peer_llamacpp.py").write_text(PEER)
    (scripts / "llama_cpp.py").write_text(LLAMA_CPP)
    (peers / "llamacpp" / "bin" / "python").symlink_to(sys.executable)
    write_gguf(work / bench_peers.GGUF_NAME)
    (work / "llmq-int4").symlink_to(tiny_llama(max_position_embeddings=1024, dtype="bfloat16"))
    monkeypatch.setenv("PEER_VOCAB", "500")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*options: str) -> dict[tuple[str, str], dict]:
        folders = ["--scripts", str(scripts), "--peers", str(peers), "--work", str(work)]
        found = bench_peers.main([*folders, "--engines", "llmq,llamacpp,openvino-fp16", *options])
        assert found["left_out"] == ["openvino-fp16"]
        return {(one["work"], one["engine"]): one for one in found["measurements"]}

    run.work = work
    return run


@pytest.mark.skipif(native is None, reason=why_absent)
def test_engines_take_turns_and_each_turn_is_kept(bench):
    options = ["--rows", "start,decode,streams-16", "--turns", "2"]
    found = bench(*options)
    assert [one["turns"] for key, one in found.items() if key[1] == "llmq"] == [2, 2, 2]
    peer, ours = found["decode", "llamacpp"], found["decode", "llmq"]
    assert 300 < peer["median"] < 1300  # a token each millisecond, and what a busy machine takes beside
    assert ours["ratio"] == pytest.approx(ours["median"] / peer["median"])
    assert peer["weights_read_bytes"] == 1000
    assert 1e5 < ours["weights_read_bytes"] < 4e5
    assert ours["peak_bytes"] > 2**26
    start = found["start", "llmq"]
    assert start["ratio"] == pytest.approx(found["start", "llamacpp"]["median"] / start["median"])
    pieces = bench.work / "pieces"
    (pieces / "decode.llamacpp.1.json").write_text(json.dumps({"seconds": 1, "tokens": 1, "weights_read_bytes": None}))
    (pieces / "streams-16.llmq.0.json").unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in pieces.iterdir()}
    again = bench(*options)
    assert again["decode", "llamacpp"]["lowest"] == 1
    assert {path.name for path in pieces.iterdir() if kept.get(path.name) != path.stat().st_mtime_ns} == {
        "streams-16.llmq.0.json"
    }
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and b"peer_worker" in _command(pid)]


@pytest.mark.skipif(native is None, reason=why_absent)
def test_who_is_far_behind_at_16_streams_is_left_out_at_64(bench):
    pieces = bench.work / "pieces"
    pieces.mkdir()
    (pieces / "streams-16.llamacpp.0.json").write_text(json.dumps({"error": "it died"}))
    for row in ("streams-16", "streams-64"):
        (pieces / f"{row}.llmq.0.json").write_text(json.dumps({"seconds": 1.0, "tokens": 9, "peak_bytes": 2**20}))
    found = bench("--rows", "streams-16,streams-64", "--turns", "1")
    assert found["streams-16", "llamacpp"]["error"] == "it died"
    assert [key for key in found if key[0] == "streams-64"] == [("streams-64", "llmq")]


def test_a_peer_far_behind_has_one_turn():
    engines = [one for one in bench_peers.ENGINES if one.name in ("llmq", "llamacpp", "vllm", "transformers")]
    rows = {row.name: row for row in bench_peers.ROWS}
    made = {
        name: [{"seconds": seconds, "tokens": 100}]
        for name, seconds in {"llmq": 9, "llamacpp": 1, "vllm": 1.4, "transformers": 1.6}.items()
    }
    going = bench_peers.still_in_it(rows["decode"], engines, made, 1.5)
    assert [one.name for one in going] == ["llmq", "llamacpp", "vllm"]
    going = bench_peers.still_in_it(rows["start"], engines, made, 1.5)
    assert [one.name for one in going] == ["llmq", "llamacpp"]  # vLLM is started once
    made["llmq"] = [{"error": "it died"}]
    assert "llmq" not in [one.name for one in bench_peers.still_in_it(rows["decode"], engines, made, 2)]


def test_without_the_shared_scripts_it_says_so(tmp_path):
    with pytest.raises(SystemExit, match="LLMQ_SHARED"):
        bench_peers.main(["--scripts", str(tmp_path), "--work", str(tmp_path)])


def _command(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
