"""Hub downloads against a local server, in processes of their own: the hub library reads its settings on import."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = "org/tiny"
FIND = """
import json, sys
from llmq.profiles.checkpoint import find_model, read_checkpoint
seen = []
def progress(stage, done, total, *, unit=""):
    seen.append((stage, done, total, unit))
path = find_model(sys.argv[1], config_only=sys.argv[2:] == ["config"], progress=progress)
print(json.dumps({"path": str(path), "progress": seen, "tensors": len(read_checkpoint(path).tensors)}))
"""


def tiny_repo(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    # What repositories also hold, and what must stay there.
    extra = {"README.md": b"# tiny", "consolidated.safetensors": b"x" * 999, "onnx/model.onnx": b"y" * 999}
    return {**files, **extra, "onnx/config.json": b"{}"}


def run(tmp_path: Path, hub_url: str, *args: str, **env: str) -> tuple[subprocess.CompletedProcess, float]:
    settings = {"HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path / "hf"), "LLMQ_CACHE": str(tmp_path / "llmq")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _WITH_EXIT_CODES, *args],
        env={**os.environ, **settings, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, time.monotonic() - started


_WITH_EXIT_CODES = f"""
import sys
try:
    exec({FIND!r})
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit(getattr(error, "exit_code", 70))
"""


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_downloads_a_whole_model_with_progress_and_reuses_it_offline(tmp_path, fake_hub, bf16_folder):
    source = bf16_folder
    fake_hub.repos[REPO] = tiny_repo(source)

    done, _ = run(tmp_path, fake_hub.url, REPO)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    path = Path(result["path"])
    assert {file.name for file in path.iterdir()} == {file.name for file in source.iterdir()}
    assert (path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    stage, last, total, unit = result["progress"][-1]
    assert stage == f"downloading {REPO}"
    assert unit == "B"
    assert last == total == sum(file.stat().st_size for file in source.iterdir())
    assert done.stderr == ""  # the hub library's own bars stay silent

    again, seconds = run(tmp_path, closed_port(), REPO)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["path"] == str(path)
    assert seconds < 10  # 2 s of waiting at most, on a busy machine


def test_config_only_reads_headers_and_downloads_no_weights(tmp_path, fake_hub, bf16_folder):
    fake_hub.repos[REPO] = tiny_repo(bf16_folder)
    weights = (bf16_folder / "model.safetensors").stat().st_size

    done, _ = run(tmp_path, fake_hub.url, REPO, "config")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tensors"] == 21  # 2 layers of 9, embedding, final norm, head
    assert not list(Path(result["path"]).glob("*.safetensors"))
    assert fake_hub.bytes_sent["model.safetensors"] == 100_001 < weights  # what the hub library reads at least

    # The headers stay: offline, the same answer.
    again, _ = run(tmp_path, closed_port(), REPO, "config")
    assert json.loads(again.stdout) == result


def test_a_headers_folder_measures_the_weights(tmp_path, fake_hub, bf16_folder):
    fake_hub.repos[REPO] = tiny_repo(bf16_folder)
    done, _ = run(tmp_path, fake_hub.url, REPO, "config")

    from llmq.profiles.checkpoint import read_checkpoint
    from llmq.profiles.weight_size import weight_size

    path = Path(json.loads(done.stdout)["path"])
    assert weight_size(path).num_bytes == read_checkpoint(bf16_folder).total_bytes
    assert weight_size(path).how == "as stored"


@pytest.mark.parametrize(
    ("refusal", "exit_code", "message"),
    [
        (None, 2, "has no model org/tiny that you may see"),
        ((403, "GatedRepo"), 2, "org/tiny is gated: accept its terms"),
        ((500, ""), 1, "500"),
    ],
)
def test_the_hub_s_refusals_are_answers(tmp_path, fake_hub, refusal, exit_code, message):
    if refusal:
        fake_hub.refusals[REPO] = refusal
    done, seconds = run(tmp_path, fake_hub.url, REPO, HF_TOKEN="")
    assert done.returncode == exit_code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert seconds < 10


def test_offline_and_not_cached_names_the_model_the_endpoint_and_the_cache(tmp_path):
    url = closed_port()
    done, seconds = run(tmp_path, url, REPO)
    assert done.returncode == 2
    assert f"{url} cannot be reached, and org/tiny is not in the cache ({tmp_path / 'hf' / 'hub'})" in done.stderr
    assert seconds < 10


def test_a_server_that_takes_no_connection_costs_two_seconds(tmp_path):
    # A listening socket whose backlog is full drops further connections: they hang, as behind a firewall.
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        done, seconds = run(tmp_path, f"http://127.0.0.1:{full.getsockname()[1]}", REPO)
    assert done.returncode == 2
    assert "cannot be reached" in done.stderr
    assert seconds < 10


def test_offline_mode_is_honoured_without_a_connection(tmp_path, fake_hub, bf16_folder):
    fake_hub.repos[REPO] = tiny_repo(bf16_folder)
    done, _ = run(tmp_path, fake_hub.url, REPO, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("HF_HUB_OFFLINE is set, and org/tiny is not in the cache")
    assert fake_hub.requests == []


def test_an_incomplete_cached_copy_is_not_used_and_its_gap_is_named(tmp_path, fake_hub, bf16_folder):
    fake_hub.repos[REPO] = tiny_repo(bf16_folder)
    done, _ = run(tmp_path, fake_hub.url, REPO)
    (Path(json.loads(done.stdout)["path"]) / "model.safetensors").unlink()

    again, _ = run(tmp_path, closed_port(), REPO)

    assert again.returncode == 2
    assert "the cached copy of org/tiny is incomplete: model.safetensors missing" in again.stderr


def test_a_repository_without_safetensors_says_so(tmp_path, fake_hub):
    fake_hub.repos[REPO] = {"config.json": b'{"model_type": "llama"}', "pytorch_model.bin": b"x"}
    done, _ = run(tmp_path, fake_hub.url, REPO)
    assert done.returncode == 2
    assert "org/tiny holds no model.safetensors: llmq reads safetensors" in done.stderr


def test_a_mistyped_path_never_asks_the_hub(tmp_path, fake_hub):
    (tmp_path / "smol").mkdir()
    done, _ = run(tmp_path, fake_hub.url, str(tmp_path / "smoll"))
    assert done.returncode == 2
    assert done.stderr.strip() == f"no such folder {tmp_path}/smoll (did you mean {tmp_path}/smol?)"
    assert fake_hub.requests == []
