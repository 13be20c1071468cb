"""The planner and the allocator agree to the block: `llmq kv-budget` against a running `llmq serve`, on real models."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import LLMQ, Served

pytestmark = pytest.mark.system


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """SmolLM2 is fetched where it is not; the others are used where they are."""
    if request.param == "smollm2-135m":
        return request.getfixturevalue("smollm2")
    return request.getfixturevalue("cached_model")(request.param)


@pytest.fixture
def serve() -> Iterator[list[Served]]:
    started: list[Served] = []
    yield started
    for server in started:
        assert server.stop() == 0


def budget(folder: Path, *flags: str) -> dict:
    done = subprocess.run(
        [LLMQ, "kv-budget", folder, "--json", *flags], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("folder", "kv_dtype", "memory", "blocks"),
    [
        # 30 layers × 2 × 3 heads × 64 × 2 B = 23,040 B a token
        ("smollm2-135m", "auto", "64MiB", 64 * 2**20 // (16 * 23_040)),
        # and with 4 bits and a bf16 scale a head: 30 × 2 × 3 × (32 + 2) B = 6,120 B a token
        ("smollm2-135m", "int4", "10MB", 10_000_000 // (16 * 6_120)),
        # Window layers have blocks of their own: the numbers are kv-budget's.
        ("gemma3-270m", "auto", "100MiB", None),
        ("gemma3-270m", "int8", "33MB", None),
        # 28 layers × 2 × 2 heads × 128 × 2 B = 28,672 B a token
        ("qwen2.5-coder-1.5b", "auto", "64MiB", 64 * 2**20 // (16 * 28_672)),
    ],
    indirect=["folder"],
)
def test_serve_allocates_the_blocks_that_kv_budget_prints(folder, kv_dtype, memory, blocks, serve):
    flags = ("--kv-dtype", kv_dtype, "--kv-cache-memory", memory)
    printed = budget(folder, *flags)  # without --ctx: of the model's own context
    planned = printed["memory"]
    assert blocks in (None, planned["num_blocks"])
    server = Served(folder, *flags, "--device", "cpu", "--max-model-len", "auto", start_timeout_s=300)
    serve.append(server)
    assert server.metric("llmq_kv_blocks_total") == planned["num_blocks"]
    model = server.http.get("/v1/models").json()["data"][0]
    assert model["max_model_len"] == min(planned["longest_sequence"], printed["num_tokens"])
