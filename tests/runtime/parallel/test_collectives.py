"""Collectives and links between real processes: what each rank gets, to the last bit."""

import subprocess
import sys
from pathlib import Path

import torch

RANK = """
import sys
from pathlib import Path
import torch
from llmq.runtime.parallel.collectives import LostPeerError, ProcessGroup

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
x = torch.randn(37, 91, generator=torch.Generator().manual_seed(rank))
made = {}
for in_order in (False, True):
    group = ProcessGroup(rank, 3, in_order=in_order)
    group.connect(folder / f"meeting {in_order}", torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made[in_order, dtype] = group.all_reduce(x.to(dtype).clone())  # which it may change
    made[in_order, "one row"] = group.all_reduce(x[5:6].bfloat16())
parts = group.gather(x)
assert (parts is None) == (rank > 0)
made["gathered"] = parts
assert group.counts == {"all_reduce": 4, "gather": 1}
torch.save((x, made), folder / f"{rank}.pt")
if rank == 1:
    sys.exit(0)  # whatever takes the group down does so before Python ends
try:
    group.all_reduce(x)
except LostPeerError as error:
    print(error)
"""


def test_three_processes(tmp_path: Path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), tmp_path], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert said[1] == ""
    for text in said[::2]:  # in gloo's words, without the file and the advice around them
        assert text.startswith("a collective of the ranks failed: "), text
        assert not any(noise in text for noise in (".cc", "GLHF", "Traceback")), text
    inputs, made = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(3)), strict=True)
    # Every rank decides by what it gets, as a router of experts does: they must not differ in the last bit.
    for key in made[0].keys() - {"gathered"}:
        assert torch.equal(made[0][key], made[1][key])
        assert torch.equal(made[0][key], made[2][key])
    exact = sum(x.double() for x in inputs)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        for in_order in (False, True):
            assert float((made[0][in_order, dtype] - exact).norm() / exact.norm()) < bound
        rounded = [x.to(dtype).float() for x in inputs]
        assert torch.equal(made[0][True, dtype], (rounded[0] + rounded[1] + rounded[2]).to(dtype))
    # In order: no number depends on where it lies.
    assert torch.equal(made[0][True, "one row"][0], made[0][True, torch.bfloat16][5])
    assert all(torch.equal(part, x) for part, x in zip(made[0]["gathered"], inputs, strict=True))


STAGE = """
import sys
from pathlib import Path
import torch
from llmq.runtime.parallel.collectives import LostPeerError
from llmq.runtime.parallel.stage_link import PeerLink

stage, folder = int(sys.argv[1]), Path(sys.argv[2])
link = PeerLink(stage, 2)
link.connect(folder / "link", torch.device("cpu"))
sizes = [(3, torch.float32), (1, torch.bfloat16), (5000, torch.float16), (2, torch.float32), (7, torch.bfloat16)]
steps = [torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype) for rows, dtype in sizes]
if stage == 0:
    for hidden in steps:
        link.send(hidden.T.contiguous().T)  # in whatever order it lies
        assert len(link._sent) <= 2  # of those that nobody has taken
    for work, _ in link._sent:
        work.wait()
else:
    for hidden in steps:
        assert torch.equal(link.receive(torch.empty_like(hidden)), hidden)
    try:
        link.receive(torch.empty(1, 64))  # from one that has ended
    except LostPeerError as error:
        print(error)
print(dict(link.counts))
"""


def test_two_stages(tmp_path: Path):
    stages = [
        subprocess.Popen([sys.executable, "-c", STAGE, str(stage), tmp_path], stdout=subprocess.PIPE, text=True)
        for stage in range(2)
    ]
    said = [stage.communicate(timeout=120)[0].splitlines() for stage in stages]
    assert [stage.returncode for stage in stages] == [0, 0]
    assert said[0] == ["{'send': 5}"]
    assert said[1][0].startswith("a collective of the ranks failed: ")
    assert said[1][1] == "{'receive': 6}"
