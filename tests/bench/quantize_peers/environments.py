"""Environments of peers that cannot share ours: made once with venv and pip, under llmq's cache."""

import subprocess
import sys
from pathlib import Path

from llmq.cli import console
from llmq.profiles.cache import cache_dir, locked

# 7.7 wants torch 2.14.1; torch and transformers are those of this environment, so that the arithmetic is the same.
GPTQMODEL = ("gptqmodel==7.6.0", "torch=={torch}", "transformers=={transformers}")


def python_of(name: str, requirements: tuple[str, ...]) -> Path:
    """The interpreter of environment `name`, which is made on first use. Raises CalledProcessError with pip's words."""
    folder = cache_dir() / "environments" / name
    python, complete = folder / "bin" / "python", folder / ".complete"
    with locked(folder):
        if not complete.exists():
            console.status(f"making {folder}: pip install {' '.join(requirements)}")
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True)
            complete.touch()
    return python


def gptqmodel_python() -> Path:
    return python_of("gptqmodel-7.6.0", _pinned(GPTQMODEL))


def transformers_python() -> Path:
    """transformers with what it loads the GPTQ and AWQ layouts by."""
    return python_of("transformers-gptqmodel-7.6.0", _pinned((*GPTQMODEL, "optimum==2.3.0", "accelerate")))


def _pinned(requirements: tuple[str, ...]) -> tuple[str, ...]:
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return tuple(text.format(**versions) for text in requirements)
