from collections.abc import Callable
from pathlib import Path

import pytest

from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine
from llmq.runtime.kernels import optional


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """make_engine(folder, **EngineConfig fields): float32, one thread (tiny models), integrity checked every step."""

    def make(folder: Path, **changes) -> Engine:
        fields = {"dtype": "fp32", "check_integrity": True, "device": "cpu", "threads": 1, **changes}
        return Engine.from_config(EngineConfig(model=str(folder), **fields))

    return make


@pytest.fixture
def installed(monkeypatch):
    """installed(version): of every package of others' kernels, as if pip had it; None: none."""

    def set_version(version):
        def of(distribution):
            if version is None:
                raise optional.metadata.PackageNotFoundError(distribution)
            return version

        monkeypatch.setattr(optional.metadata, "version", of)

    return set_version
