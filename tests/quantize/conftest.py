"""Calibration text, and a quantization of a tiny model in one call."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

TEXTS = [
    "The ferry left the harbour at nine, and by noon the island was a grey line behind the rain.",
    "Copper conducts heat better than iron does; that is why the bottoms of good pans are made of it.",
    "She counted the steps to the tower twice, and came to two hundred and eleven both times.",
    "A contract that nobody has read binds people all the same, the judge said, and closed the folder.",
]


@pytest.fixture(scope="session")
def calibration_jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 texts of ordinary English, two of them empty."""
    path = tmp_path_factory.mktemp("calibration") / "cal.jsonl"
    texts = [" ".join(TEXTS[(i + k) % 4] for k in range(1 + i % 3)) for i in range(62)]
    lines = [json.dumps({"text": text}) for text in (*texts[:30], "", *texts[30:], "   ")]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def run_quantize() -> Callable:
    """run_quantize(source, out, method, calib=None, **recipe) -> report."""
    return quantize_in_one_call


def quantize_in_one_call(
    source: Path, out: Path, method: str, calib: Path | None = None, restart: bool = False, memory_bytes: int = 2**29,
    **recipe: object,
):  # fmt: skip
    from llmq.profiles.checkpoint import read_checkpoint
    from llmq.quantize.calibration import load_calibration, load_tokenizer
    from llmq.quantize.pipeline import quantize_model
    from llmq.quantize.preflight import preflight
    from llmq.quantize.recipe import Recipe

    chosen = Recipe.of(method, **recipe)
    plan = preflight(read_checkpoint(source), chosen, out)
    calibration = None
    if chosen.is_calibrated:
        calibration = load_calibration(str(calib), load_tokenizer(source), num_samples=16, seq_len=48)
    return quantize_model(plan, calibration, restart=restart, memory_bytes=memory_bytes)
