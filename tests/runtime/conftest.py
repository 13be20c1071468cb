from collections.abc import Callable
from pathlib import Path

import pytest

from llmq.runtime.config import EngineConfig
from llmq.runtime.engine import Engine


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """make_engine(folder, **EngineConfig fields): float32, one thread (tiny models), integrity checked every step."""

    def make(folder: Path, **changes) -> Engine:
        fields = {"dtype": "fp32", "check_integrity": True, "device": "cpu", "threads": 1, **changes}
        return Engine.from_config(EngineConfig(model=str(folder), **fields))

    return make
