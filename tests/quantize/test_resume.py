"""Killed at any moment, the same command goes on and writes the same bytes; from anything else it refuses to."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.errors import FailedError, InputError
from llmq.quantize.fingerprint import differences, fingerprint
from llmq.quantize.preflight import preflight, work_path
from llmq.quantize.recipe import Recipe
from llmq.quantize.report_html import REPORT_PAGE
from llmq.quantize.work_folder import work_folder

# One run that kills itself, as `kill -9` does, when the COUNTth layer is to be kept; with the threads of this process.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from conftest import quantize_in_one_call
from llmq.quantize.work_folder import WorkFolder

source, out, calib, kept, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
save, left = WorkFolder.save, [int(kept)]

def save_and_count(*args):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    save(*args)

WorkFolder.save = save_and_count
quantize_in_one_call(Path(source), Path(out), "awq", Path(calib), kv="fp8")
"""


@pytest.fixture(scope="module")
def source(tiny_llama):
    return tiny_llama(dtype="bfloat16", num_hidden_layers=4)


@pytest.fixture(scope="module")
def killed(source, calibration_jsonl, tmp_path_factory):
    """The folder `run` in which a run was killed after two of four layers, as it was left."""
    folder = tmp_path_factory.mktemp("killed")
    died = subprocess.run(
        [sys.executable, "-c", KILLED, source, folder / "out", calibration_jsonl, "2", str(torch.get_num_threads())],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    return folder


def files(folder):
    """Every file's bytes; of the report all but the time it took, which its page shows too."""
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    report = json.loads(found["quantization_report.json"])
    del report["duration_s"], found[REPORT_PAGE]
    return {**found, "quantization_report.json": report}


def test_a_killed_run_goes_on_to_the_same_bytes(killed, source, calibration_jsonl, run_quantize, tmp_path):
    run_quantize(source, tmp_path / "out", "awq", calibration_jsonl, kv="fp8")
    shutil.copytree(killed, tmp_path / "b")
    out = tmp_path / "b" / "out"
    assert not out.exists()
    kept = [path.name for path in sorted(work_path(out).glob("layer-*"))]
    assert kept == ["layer-00000.safetensors", "layer-00001.safetensors"]
    run_quantize(source, out, "awq", calibration_jsonl, kv="fp8")
    assert files(out) == files(tmp_path / "out")
    assert os.listdir(out.parent) == ["out"]


def test_what_changed_is_named_and_restart_begins_again(killed, source, calibration_jsonl, run_quantize, tmp_path):
    shutil.copytree(killed, tmp_path / "b")
    out, other = tmp_path / "b" / "out", {"group_size": "32", "ignore": ("layers.3",)}
    with pytest.raises(InputError) as refused:
        run_quantize(source, out, "awq", calibration_jsonl, **other)
    for words in (
        "2 finished layers of",
        "recipe: default.group_size was 64, is 32",
        'recipe: ignore was [], is ["layers.3"]',
        "recipe: kv was",
        "--restart",
    ):
        assert words in str(refused.value)
    assert not out.exists()
    report = run_quantize(source, out, "awq", calibration_jsonl, restart=True, **other)
    assert report.group_size["value"] == 32
    assert os.listdir(out.parent) == ["out"]


def stop_after_a_layer(out, fingerprint, error):
    with work_folder(out, fingerprint) as work:
        work.file(0).touch()
        raise error


def test_a_changed_model_or_other_text_is_named(tmp_path):
    old = {"model": {"model.safetensors": "1"}, "calibration": {"token ids": "a"}, "code": {"torch": "2.13"}}
    with pytest.raises(KeyboardInterrupt):
        stop_after_a_layer(tmp_path / "out", old, KeyboardInterrupt)
    for section, key, value in (
        ("model", "model.safetensors", "2"),
        ("calibration", "token ids", "b"),
        ("code", "torch", "2.14"),
    ):
        new = {**old, section: {key: value}}
        with pytest.raises(InputError, match=f"{section}: {key} was"), work_folder(tmp_path / "out", new):
            pass
    with work_folder(tmp_path / "out", old) as work:
        assert work.has(0)
    assert list(tmp_path.iterdir()) == []


def test_a_model_file_that_was_touched_is_another_model(source, tmp_path):
    shutil.copytree(source, tmp_path / "model")
    plan = preflight(read_checkpoint(tmp_path / "model"), Recipe.of("rtn"), tmp_path / "out")
    before = fingerprint(plan, None, torch.device("cpu"))
    assert differences(before, fingerprint(plan, None, torch.device("cpu"))) == []
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    (difference,) = differences(before, fingerprint(plan, None, torch.device("cpu")))
    assert difference.startswith("model: model.safetensors was ")


def test_two_at_once_is_refused(tmp_path):
    with (
        work_folder(tmp_path / "out", {}),
        pytest.raises(InputError, match="another llmq quantize"),
        work_folder(tmp_path / "out", {}),
    ):
        pass


def test_a_full_disk_is_said_in_words_and_keeps_what_is_done(tmp_path):
    error = RuntimeError(f"Error while serializing: {os.strerror(errno.ENOSPC)} (os error 28)")
    with pytest.raises(FailedError, match="is full; 1 finished layers are kept"):
        stop_after_a_layer(tmp_path / "out", {}, error)
    assert work_path(tmp_path / "out").is_dir()


def test_activations_beyond_the_memory_given_change_nothing(source, calibration_jsonl, run_quantize, tmp_path):
    held = run_quantize(source, tmp_path / "held", "awq", calibration_jsonl)
    spilled = run_quantize(source, tmp_path / "spilled", "awq", calibration_jsonl, memory_bytes=0)
    assert spilled.calibration == held.calibration
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "spilled" / name).read_bytes() == (tmp_path / "held" / name).read_bytes()
