"""The rows of the table, as data: who makes which scheme, by which driver, in which environment."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantize_peers import environments

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Method:
    """`driver`: drive_<driver>.py; `version`: of what it runs, for the row's key."""

    name: str
    driver: str
    schemes: tuple[str, ...]
    version: Callable[[], str]
    options: dict[str, Any] = field(default_factory=dict)
    python: Callable[[], Path] = lambda: Path(sys.executable)


def _own_version() -> str:
    """The last commit that touched what `llmq quantize` runs."""
    command = ["git", "-C", str(FOLDER), "log", "-1", "--format=%h", "--", ":/quantize", ":/cli/quantize.py"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _package(name: str) -> Callable[[], str]:
    return lambda: version(name)


WEIGHT_ONLY = ("w4-g64", "w3-g64")
# Tuning a block by 200 steps of 8 samples, auto-round's default, takes hours on two cores: its own light preset's
# number of steps and learning rate instead.
LIGHT = {"iters": 50, "lr": 5e-3}

METHODS = (
    Method("RTN", "rtn", (*WEIGHT_ONLY, "w8a8", "fp8"), lambda: "1", {}),
    Method("llmq GPTQ", "llmq", WEIGHT_ONLY, _own_version, {"method": "gptq"}),
    Method("llmq AWQ", "llmq", WEIGHT_ONLY, _own_version, {"method": "awq"}),
    Method("llmq SmoothQuant", "llmq", ("w8a8",), _own_version, {"method": "smoothquant"}),
    Method("llmq FP8", "llmq", ("fp8",), _own_version, {"method": "fp8", "is_calibrated": False}),
    Method("llm-compressor", "llmcompressor", (*WEIGHT_ONLY, "w8a8", "fp8"), _package("llmcompressor")),
    Method("llm-compressor AWQ", "llmcompressor", WEIGHT_ONLY, _package("llmcompressor"), {"method": "awq"}),
    Method("GPTQModel", "gptqmodel", WEIGHT_ONLY, lambda: "7.6.0", {}, environments.gptqmodel_python),
    Method("auto-round light", "autoround", WEIGHT_ONLY, _package("auto-round"), LIGHT),
)
