"""A decoder cut into stages computes what it computes whole: to the last bit; with ranks in each stage in float32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_cases import CASES
from native_decoder import make_step
from thread_ranks import QueueLink, ThreadRank, links, on_ranks
from tiny_model import save_tiny_model

from llmq.profiles.checkpoint import read_checkpoint
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.runtime.attention.sdpa import SdpaAttention
from llmq.runtime.kv_store import KVStore
from llmq.runtime.models.loader import make_loader
from llmq.runtime.parallel.stage_plan import stages_of
from llmq.runtime.programs.eager import EagerProgram
from llmq.runtime.programs.stage import StageProgram

PROMPTS = [[(7 * row + 11 * place) % 480 + 3 for place in range(9 + 14 * row)] for row in range(3)]
# Prompts in chunks, one token again; then the last rows alone are read.
STEPS = [([(0, 9), (0, 20), (0, 30)], None), ([(8, 9), (20, 23), (30, 37)], [0, 3, 10])]
CPU = torch.device("cpu")


def logits_of(folder: Path, num_stages: int, rank: ThreadRank | None = None) -> tuple[torch.Tensor, list[QueueLink]]:
    """Of the rows that are read of two steps, and how often stages sent and received."""
    checkpoint = read_checkpoint(folder)
    layout = KVCacheLayout.of(checkpoint.architecture, "fp32", tensor_parallel=1 if rank is None else rank.num_ranks)
    programs, between = [], links(num_stages)
    for stage, link in zip(stages_of(checkpoint, num_stages), between, strict=True):
        part = layout if num_stages == 1 else layout.of_layers(*stage.layers)
        decoder = make_loader(checkpoint, torch.float32, CPU, collectives=rank, stage=stage).load(256)
        program = EagerProgram(decoder, KVStore(part, 64, CPU), SdpaAttention())
        programs.append(StageProgram(program, link, checkpoint.architecture.hidden_size, torch.float32))
    made = []
    for spans, rows in STEPS:
        for program in programs:
            inputs = make_step(program._program.store, PROMPTS, spans)
            hidden = program.forward(replace(inputs, output_rows=None if rows is None else torch.tensor(rows)))
            logits = program.logits(hidden if rows is None else hidden[rows])
            assert (logits is None) == (program is not programs[-1] or (rank is not None and rank.rank > 0))
        made.append(logits)
    return (None if made[0] is None else torch.cat(made)), between


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=repr)
def test_every_family_in_two_stages(tmp_path, model_type, changes):
    folder = save_tiny_model(tmp_path, model_type, **changes)
    with torch.inference_mode():
        whole, _ = logits_of(folder, 1)
        made, between = logits_of(folder, 2)
    assert torch.equal(made, whole)
    # One message a step, from the first stage to the second.
    assert [link.counts for link in between] == [{"send": len(STEPS)}, {"receive": len(STEPS)}]


@pytest.mark.parametrize("tied", [True, False])
def test_five_layers_in_three_stages(tmp_path, tied):
    folder = save_tiny_model(tmp_path, "qwen3", num_hidden_layers=5, tie_word_embeddings=tied)
    with torch.inference_mode():
        whole, _ = logits_of(folder, 1)
        made, between = logits_of(folder, 3)
    assert torch.equal(made, whole)
    assert between[1].counts == {"send": len(STEPS), "receive": len(STEPS)}


def test_ranks_in_stages_sum_in_their_own_stage_only(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2", num_hidden_layers=4)
    with torch.inference_mode():
        whole, _ = logits_of(folder, 1)
    ranks: list[ThreadRank] = []

    def work(rank: ThreadRank):
        ranks.append(rank)
        return logits_of(folder, 2, rank)

    (made, between), (_, others) = on_ranks(2, work)
    assert float((made - whole).norm() / whole.norm()) < 2e-5
    assert torch.equal(made.argmax(-1), whole.argmax(-1))
    for rank in ranks:  # of both stages together: no more sums than of one
        assert rank.counts == {"all_reduce": len(STEPS) * (1 + 2 * 4), "gather": len(STEPS)}
    for link in (between[0], others[0]):  # each rank to its own peer
        assert link.counts == {"send": len(STEPS)}
