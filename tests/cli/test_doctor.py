import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from llmq.cli import doctor
from llmq.profiles import hub, machine
from llmq.runtime import kernels
from llmq.runtime.kernels import optional
from llmq.runtime.layers import tile_check

GiB = 2**30


@pytest.fixture(autouse=True)
def machine_of_a_test(monkeypatch, tmp_path):
    """A CPU machine with memory and no hub, whatever runs this test."""
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8 * GiB)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path))


def report(exit_code: int = 0) -> dict[str, dict]:
    done = CliRunner().invoke(doctor.app, ["--json"], catch_exceptions=False)
    assert done.exit_code == exit_code
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_a_machine_without_gpu_and_hub_lacks_something_and_has_no_problem():
    findings = report()
    assert findings["GPU"]["state"] == "absent"
    assert "the runtime computes on the CPU" in findings["GPU"]["lack"]
    assert findings["model hub"]["state"] == "absent"
    assert findings["torch"]["state"] == "ok"
    assert findings["Python"]["lack"] == ""


def test_every_lack_is_told_in_words():
    done = CliRunner().invoke(doctor.app, [], catch_exceptions=False)
    for finding in report().values():
        assert finding["name"] in done.stdout
        assert finding["lack"] in done.stdout


def test_which_kernels_a_cpu_runs_is_told(monkeypatch):
    monkeypatch.setattr(kernels, "native", SimpleNamespace(isa=lambda: "avx512_bf16"))
    assert report()["CPU kernels"]["found"] == "native, compiled for avx512_bf16"
    monkeypatch.setattr(kernels, "native", None)
    monkeypatch.setattr(kernels, "why_absent", "not built when llmq was installed")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert "not built when llmq was installed" in report()["CPU kernels"]["lack"]
    monkeypatch.setattr(doctor.platform, "machine", lambda: "arm64")
    assert "for x86-64, and this is arm64" in report()["CPU kernels"]["lack"]


def test_tiles_that_multiply_wrongly_are_a_problem(monkeypatch):
    monkeypatch.setattr(tile_check, "settle_tiles", lambda: "native int4 × int8, amx")
    monkeypatch.setattr(kernels, "native", SimpleNamespace(isa=lambda: "avx512_bf16"))
    finding = report(exit_code=1)["CPU kernels"]
    assert (finding["state"], finding["found"]) == ("problem", "native, compiled for avx512_bf16")
    assert "int4 × int8" in finding["lack"]


def test_little_memory_is_a_problem(monkeypatch):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: GiB)
    assert report(exit_code=1)["memory"]["state"] == "problem"


def test_a_full_disk_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: doctor.shutil._ntuple_diskusage(1, 1, GiB))
    assert "set LLMQ_CACHE" in report(exit_code=1)["cache"]["lack"]


def test_a_gpu_that_torch_does_not_see_is_a_problem(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("NVIDIA H200", 140 * GiB, 139 * GiB)])
    findings = report(exit_code=1)
    assert findings["GPU 0"]["found"] == "NVIDIA H200, 139.0 GiB free of 140.0 GiB"
    assert "install a CUDA build of torch" in findings["torch"]["lack"]


def test_what_the_cuda_path_lacks_is_told(monkeypatch):
    torch = pytest.importorskip("torch")
    versions = {"triton": "3.9.0"}
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = report()
    assert findings["Triton"] == {"name": "Triton", "state": "ok", "found": "3.9.0", "lack": ""}
    assert (findings["CUDA path"]["state"], findings["CUDA path"]["found"]) == ("absent", "could not run here")
    assert findings["CUDA path"]["lack"].startswith("no NVIDIA driver answers; torch ")
    versions["triton"] = "3.5.1"
    assert "3.6 and later" in report()["Triton"]["lack"]
    del versions["triton"]
    findings = report()
    assert findings["Triton"]["found"] == "not installed"
    assert "pip install 'triton>=3.6'" in findings["Triton"]["lack"]
    assert "there is no Triton from 3.6 on" in findings["CUDA path"]["lack"]


def test_a_cuda_path_that_a_start_would_try_and_fail_is_a_problem(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(doctor, "_version", lambda package: {"triton": "3.9.0"}.get(package))
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("NVIDIA H200", 140 * GiB, 139 * GiB)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("CC", "cc")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    found = report()["CUDA path"]
    assert (found["state"], found["found"]) == ("ok", "Triton kernels and CUDA graphs could run")
    (tmp_path / "Python.h").unlink()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    found = report(exit_code=1)["CUDA path"]
    for words in ("no C compiler", "Python.h", "compute capability 7.5", "--kernels torch"):
        assert words in found["lack"]


def test_an_extra_that_is_not_installed_says_how_to(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    finding = report()["extra: quantize"]
    assert finding["state"] == "absent"
    assert finding["lack"] == "llmq quantize needs it: pip install 'llmq-toolkit[quantize]'"


def test_a_version_that_llmq_does_not_ask_for_is_a_problem(monkeypatch):
    versions = {"transformers": "4.30.0", "llmcompressor": "0.14.0.1", "datasets": "5.0", "lm-eval": "0.4.13"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    finding = report(exit_code=1)["extra: quantize"]
    assert "transformers 4.30.0 is not" in finding["lack"]


def test_others_kernels_are_named_where_there_is_a_gpu(monkeypatch):
    assert "FlashInfer" not in report()
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("NVIDIA H200", 140 * GiB, 139 * GiB)])
    monkeypatch.setattr(doctor, "_torch", lambda: doctor.Finding("torch", "ok", "that sees it"))
    absent = report()["FlashInfer"]
    assert (absent["state"], absent["found"]) == ("absent", "flashinfer-python is not installed")
    assert "pip install 'flashinfer-python>=0.3,<0.8'" in absent["lack"]
    monkeypatch.setattr(optional.KernelPackage, "version", lambda package: "0.6.3")
    assert report()["FlashInfer"]["found"].startswith("0.6.3, for attention of prompts")
    monkeypatch.setattr(optional.KernelPackage, "version", lambda package: "0.2.0")
    assert report()["FlashInfer"]["found"] == "flashinfer-python 0.2.0 is installed, and llmq calls >=0.3,<0.8"
