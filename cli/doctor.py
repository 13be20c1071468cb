"""`llmq doctor`: what this machine has and lacks, what each lack means, and what to do about it."""

import os
import platform
import shutil
import sys
import sysconfig
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmq.cli import console
from llmq.profiles.units import format_bytes

app = typer.Typer(add_completion=False)

# What the fast paths of a CPU are built on, by what each one is good for. Linux's spelling.
_INSTRUCTIONS = {
    "avx2": "vectors of 256 bits",
    "avx512f": "vectors of 512 bits",
    "avx512_vnni": "INT8 products",
    "avx512_bf16": "bf16 products",
    "amx_int8": "INT8 matrix tiles",
    "amx_bf16": "bf16 matrix tiles",
}
_EXTRAS = {"quantize": ("transformers", "llmcompressor", "datasets"), "eval": ("transformers", "lm-eval", "datasets")}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `lack`: what its absence means and how to get it, empty where nothing is missing."""

    name: str
    state: Literal["ok", "absent", "problem"]
    found: str
    lack: str = ""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What this machine has and lacks for llmq, what each lack means, and what to do about it.

    Exit code 1 where something keeps llmq from working; what is merely absent is no problem.
    """
    findings = [
        *_system(),
        _memory(),
        *_gpus(),
        _torch(),
        _triton(),
        *_packages(),
        _cuda_path(),
        _kernels(),
        *_extras(),
        _cache(),
        _hub(),
    ]
    problems = [finding for finding in findings if finding.state == "problem"]
    if as_json:
        console.print_json({"findings": [asdict(finding) for finding in findings], "num_problems": len(problems)})
    else:
        marks = {"ok": "ok", "absent": "-", "problem": "!!"}
        console.print_table(None, ["", "", ""], [[marks[f.state], f.name, f.found] for f in findings])
        lacks = [f"{finding.name}: {finding.lack}" for finding in findings if finding.lack]
        console.print_text()
        console.print_notes(lacks or ["Nothing is missing."])
    if problems:
        raise typer.Exit(1)


def _system() -> list[Finding]:
    from llmq.profiles import machine

    version, supported = platform.python_version(), (3, 11) <= sys.version_info < (3, 14)
    flags = machine.cpu_flags()
    known = [name for name in _INSTRUCTIONS if name in flags]
    cores = machine.usable_cores()
    return [
        Finding("llmq", "ok", metadata.version("llmq-toolkit")),
        Finding(
            "Python",
            "ok" if supported else "problem",
            f"{version}, {platform.system()} {platform.machine()}",
            "" if supported else "llmq runs on Python 3.11 to 3.13: make a virtual environment with one of them.",
        ),
        Finding("CPU", "ok", f"{machine.cpu_name()}, {cores} core{'s' * (cores > 1)} for this process"),
        Finding(
            "instructions",
            "ok" if known else "absent",
            ", ".join(f"{name} ({_INSTRUCTIONS[name]})" for name in known) or "none known",
            ""
            if known
            else "the system does not list this CPU's instruction sets; torch picks its kernels all the same.",
        ),
    ]


def _memory() -> Finding:
    from llmq.profiles import machine

    available, total = machine.available_memory_bytes(), machine.total_memory_bytes()
    found = f"{format_bytes(available)} free of {format_bytes(total)}"
    if available < 2 * 2**30:
        return Finding("memory", "problem", found, "SmolLM2's whole loop wants 2 GiB free: close something.")
    return Finding("memory", "ok", found)


def _gpus() -> list[Finding]:
    from llmq.profiles import machine

    gpus = machine.gpus()
    if not gpus:
        lack = "no NVIDIA driver answers: the runtime computes on the CPU, which is right for small models."
        return [Finding("GPU", "absent", "none", lack)]
    return [
        Finding(
            f"GPU {index}", "ok", f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.memory_bytes)}"
        )
        for index, gpu in enumerate(gpus)
    ]


def _torch() -> Finding:
    from llmq.profiles import machine

    try:
        import torch
    except Exception as error:  # a broken installation raises whatever its loader meets
        lack = f"the runtime cannot start ({error}): pip install 'torch>=2.11,<2.15'"
        return Finding("torch", "problem", "cannot be imported", lack)
    threads = torch.get_num_threads()
    if torch.cuda.is_available():
        return Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}, {threads} threads")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    found = f"{torch.__version__}, {built}, {threads} threads"
    if machine.gpus():
        lack = "there is a GPU, and torch does not see it: install a CUDA build of torch that the driver supports."
        return Finding("torch", "problem", found, lack)
    return Finding("torch", "ok", found)


_TRITON = ">=3.6"
_OLDEST_CAPABILITY = (8, 0)  # products in bf16


def _triton() -> Finding:
    version = _version("triton")
    if version is None:
        lack = (
            "on a GPU the runtime would compute with torch alone, slower and without CUDA graphs: pip install "
            "'triton>=3.6' (torch for CUDA brings it)"
        )
        return Finding("Triton", "absent", "not installed", lack)
    if not _fits(version, _TRITON):
        return Finding("Triton", "absent", version, "the kernels are for 3.6 and later: pip install -U 'triton>=3.6'")
    return Finding("Triton", "ok", version)


def _cuda_path() -> Finding:
    """Whether Triton kernels and CUDA graphs could run here. A problem where a start would try, and fail."""
    from llmq.profiles import machine

    try:
        import torch
    except Exception:  # `_torch` says why
        return Finding("CUDA path", "absent", "could not run here", "torch cannot be imported.")
    sees = torch.cuda.is_available()
    triton = _version("triton")
    lacks = []
    if not machine.gpus():
        lacks.append("no NVIDIA driver answers")
    if not sees:
        lacks.append("torch sees no GPU" if torch.version.cuda else "torch is built for the CPU")
    if triton is None or not _fits(triton, _TRITON):
        lacks.append("there is no Triton from 3.6 on")
    # Triton compiles what launches a kernel when it is first launched.
    broken = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        broken.append("there is no C compiler (gcc or clang, or $CC), with which Triton compiles its launchers")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        broken.append(f"there is no {sysconfig.get_path('include')}/Python.h, which they need (python3-dev)")
    if sees and (capability := torch.cuda.get_device_capability()) < _OLDEST_CAPABILITY:
        broken.append(f"the GPU has compute capability {'.'.join(map(str, capability))}, the kernels are for 8.0 up")
    if not lacks and not broken:
        return Finding("CUDA path", "ok", "Triton kernels and CUDA graphs could run")
    is_tried = not lacks  # a start looks for a GPU and Triton
    lack = f"{'; '.join([*lacks, *broken])}."
    if is_tried:
        lack += " Until then: --kernels torch."
    return Finding("CUDA path", "problem" if is_tried else "absent", "could not run here", lack)


def _kernels() -> Finding:
    from llmq.runtime.kernels import native, why_absent
    from llmq.runtime.layers.tile_check import settle_tiles

    if (wrong := settle_tiles()) is not None:
        lack = (
            f"tiles of AMX multiply {wrong} to other numbers than vectors do: vectors are used. Please report this CPU."
        )
        return Finding("CPU kernels", "problem", f"native, compiled for {native.isa()}", lack)
    if native is not None:
        return Finding("CPU kernels", "ok", f"native, compiled for {native.isa()}")
    if platform.machine() not in ("x86_64", "AMD64"):
        lack = f"they are for x86-64, and this is {platform.machine()}: the runtime computes with torch."
    else:
        lack = (
            f"the runtime computes with torch, slower: {why_absent}. Where a C++ compiler is installed (GCC 12, Clang "
            "15), pip builds them with llmq: pip install --force-reinstall --no-deps llmq-toolkit (or -e .)"
        )
    return Finding("CPU kernels", "absent", "torch's own", lack)


def _packages() -> list[Finding]:
    """Others' kernels, for GPUs: what is installed. An engine tries them on its GPU, and says what came of it."""
    from llmq.profiles import machine
    from llmq.runtime.kernels.optional import FLASHINFER, HUMMING

    if not machine.gpus():
        return []
    findings = []
    for name, package in (("FlashInfer", FLASHINFER), ("humming", HUMMING)):
        if (why_not := package.why_not()) is not None:
            fix = f"pip install '{package.distribution}{package.versions}'"
            lack = f"{package.what_for}: by Triton's kernels then, which need nothing more. To try it: {fix}"
            findings.append(Finding(name, "absent", why_not, lack))
        else:
            found = f"{package.version()}, for {package.what_for}; --kernels triton leaves it out"
            findings.append(Finding(name, "ok", found))
    return findings


def _extras() -> list[Finding]:
    pins = _pins()
    findings = []
    for extra, packages in _EXTRAS.items():
        installed = {package: _version(package) for package in packages}
        found = ", ".join(f"{package} {version or 'absent'}" for package, version in installed.items())
        wrong = [f"{p} {v} is not {pins[p]}" for p, v in installed.items() if v and not _fits(v, pins.get(p, ""))]
        fix = f"pip install 'llmq-toolkit[{extra}]'"
        if not all(installed.values()):
            findings.append(Finding(f"extra: {extra}", "absent", found, f"llmq {extra} needs it: {fix}"))
        elif wrong:
            lack = f"{'; '.join(wrong)}, with which llmq is tested: {fix}"
            findings.append(Finding(f"extra: {extra}", "problem", found, lack))
        else:
            findings.append(Finding(f"extra: {extra}", "ok", found))
    return findings


def _pins() -> dict[str, str]:
    """Package -> the versions that llmq's own metadata asks for (">=5.15,<5.18")."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in metadata.requires("llmq-toolkit") or []]
    return {requirement.name: str(requirement.specifier) for requirement in requirements}


def _fits(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cache() -> Finding:
    from llmq.profiles.cache import cache_dir

    folder = parent = cache_dir()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    found = f"{folder}, {format_bytes(free)} free"
    if free < 2 * 2**30:
        lack = "converted models go there, and SmolLM2's loop wants 2 GiB: set LLMQ_CACHE to a folder on a larger disk."
        return Finding("cache", "problem", found, lack)
    return Finding("cache", "ok", found)


def _hub() -> Finding:
    from huggingface_hub import constants

    from llmq.profiles import hub

    if hub.is_reachable():
        return Finding("model hub", "ok", constants.ENDPOINT)
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
    lack = "a hub id (org/name) works only where it is cached; folders, .gguf files and smollm2-135m work."
    return Finding("model hub", "absent", why, lack)
