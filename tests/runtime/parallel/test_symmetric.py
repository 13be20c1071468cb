"""All-reduce through symmetric memory: who is asked for what, with ranks that are threads and memory that they share
because they do. What torch's kernels make of it on NVLink is measured on GPUs."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from thread_ranks import on_ranks

from llmq.runtime.parallel.collectives import ProcessGroup
from llmq.runtime.parallel.symmetric import MULTICAST_BYTES, ONE_SHOT_BYTES, start_symmetric, why_no_peers

CPU = torch.device("cpu")
ROW = 512


class FakeMemory:
    """`empty` and `rendezvous` as torch's: buffers that all ranks have mapped, and operations that read them all."""

    def __init__(self, num_ranks, multicast_ptr=0, failing_rank=None):
        self.num_ranks, self.multicast_ptr, self.failing_rank = num_ranks, multicast_ptr, failing_rank
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.buffers = [None] * num_ranks
        self.groups = set()

    def of(self, rank):
        return SimpleNamespace(
            set_group_info=lambda name, own, count, store: self.groups.add((name, own, count)),
            empty=lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8, device=device),
            rendezvous=lambda buffer, name: self._rendezvous(rank, buffer),
            one_shot_all_reduce=lambda x, op, name: self._sum(rank, x, op, name),
            multimem_all_reduce_=lambda x, op, name: x.copy_(self._sum(rank, x, op, name)),
        )

    def _rendezvous(self, rank, buffer):
        if rank == self.failing_rank:
            raise RuntimeError("CUDA driver error: system not yet initialized\nand more")
        self.buffers[rank] = buffer
        return SimpleNamespace(multicast_ptr=self.multicast_ptr)

    def _sum(self, rank, x, op, name):
        assert op == "sum"
        assert (name, rank, self.num_ranks) in self.groups
        assert x.data_ptr() == self.buffers[rank].data_ptr()
        assert x.is_contiguous()
        assert x.nbytes % 16 == 0
        self.barrier.wait()  # as the kernels do: nobody reads before all have written
        total = sum(buffer[: x.nbytes].view(x.dtype).view(x.shape).double() for buffer in self.buffers).to(x.dtype)
        self.barrier.wait()  # and nobody writes again before all have read
        return total


class FakeNccl:
    """What a ProcessGroup asks of NCCL, over a rank that is a thread."""

    def __init__(self, rank):
        self.rank, self.num_calls = rank, 0

    def allreduce(self, tensors, options=None):
        (x,) = tensors
        parts = torch.stack(self.rank._exchange(x))
        if options is not None and options.reduceOp == dist.ReduceOp.MIN:
            x.copy_(parts.amin(dim=0))
        else:
            self.num_calls += 1
            x.copy_(parts.double().sum(dim=0).to(x.dtype))
        return SimpleNamespace(wait=lambda: None)


def group_over(rank, memory):
    group = ProcessGroup(rank.rank, rank.num_ranks)
    group._groups.append(FakeNccl(rank))
    group._map_peers("here", dist.HashStore(), CPU, memory.of(rank.rank))
    return group


def rows_of(rank, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("multicast_ptr", [0, 0xF00])
def test_small_rows_go_through_it_and_others_do_not(num_ranks, multicast_ptr):
    has_multicast = bool(multicast_ptr) and num_ranks >= 4
    limit = MULTICAST_BYTES if has_multicast else ONE_SHOT_BYTES
    # (shape, dtype) -> through NCCL
    cases = {
        ((1, ROW), torch.bfloat16): False,
        ((3, ROW), torch.float32): False,
        ((limit // 2 // ROW, ROW), torch.bfloat16): False,
        ((limit // 2 // ROW + 1, ROW), torch.bfloat16): True,
        ((1, ROW), torch.float16): True,  # torch's kernels add no float16
        ((1, 7), torch.bfloat16): True,  # 14 bytes: no whole 16
        ((0, ROW), torch.bfloat16): True,
    }
    memory = FakeMemory(num_ranks, multicast_ptr)

    def work(rank):
        group, made, through_nccl = group_over(rank, memory), [], []
        for shape, dtype in cases:
            before = group._groups[0].num_calls
            made.append(group.all_reduce(rows_of(rank.rank, shape, dtype)))
            through_nccl.append(group._groups[0].num_calls > before)
        return made, through_nccl, dict(group.counts), group.how

    results = on_ranks(num_ranks, work)
    for made, through_nccl, counts, how in results:
        assert through_nccl == list(cases.values())
        assert counts == {"all_reduce": len(cases)}  # one each, whichever way it went
        word = "multicast" if has_multicast else "one-shot"
        assert how == f"{word} through symmetric memory up to {limit // 1024} KiB, else NCCL"
        for (shape, dtype), total, first in zip(cases, made, results[0][0], strict=True):
            exact = sum(rows_of(rank, shape, dtype).double() for rank in range(num_ranks))
            assert total.shape == shape
            assert torch.equal(total, exact.to(dtype))
            assert torch.equal(total, first)


def test_a_result_is_not_what_the_next_sum_overwrites():
    for multicast_ptr in (0, 1):
        memory = FakeMemory(4, multicast_ptr)

        def work(rank, memory=memory):
            group = group_over(rank, memory)
            first = group.all_reduce(torch.full((1, ROW), 1.0))
            group.all_reduce(torch.full((1, ROW), 2.0))
            return first

        assert all(torch.equal(first, torch.full((1, ROW), 4.0)) for first in on_ranks(4, work))


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_cannot_map_leaves_all_to_nccl(failing_rank):
    memory = FakeMemory(2, failing_rank=failing_rank)

    def work(rank):
        group = group_over(rank, memory)
        return group.all_reduce(rows_of(rank.rank, (1, ROW), torch.bfloat16)), group._groups[0].num_calls, group.how

    for rank, (total, num_calls, how) in enumerate(on_ranks(2, work)):
        assert num_calls == 1
        exact = sum(rows_of(rank, (1, ROW), torch.bfloat16).double() for rank in range(2))
        assert torch.equal(total, exact.bfloat16())
        own = "the ranks' memory cannot be mapped (CUDA driver error: system not yet initialized)"
        others = "another rank cannot map the others' memory"
        assert how == f"NCCL ({own if rank == failing_rank else others})"


def test_what_speaks_against_it_on_one_rank_is_asked_before_anything_is_mapped():
    memory = FakeMemory(2)

    def work(rank):
        nccl = ProcessGroup(rank.rank, 2)
        nccl._groups.append(FakeNccl(rank))

        def agree(says_so):
            flag, options = torch.tensor([int(says_so)]), dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MIN
            nccl._groups[0].allreduce([flag], options)
            return bool(flag.item())

        why_not = "device 1 cannot read device 0's memory" if rank.rank else None
        store = dist.HashStore()
        return start_symmetric("here", rank.rank, 2, store, CPU, agree, memory.of(rank.rank), why_not)

    assert on_ranks(2, work) == [(None, "another rank cannot"), (None, "device 1 cannot read device 0's memory")]
    assert memory.buffers == [None, None]


def test_peers_are_asked_for_by_the_devices_of_the_group(monkeypatch):
    """Of two stages of two ranks the second one's have devices 2 and 3."""
    asked = []

    def can_access(device, peer):
        asked.append((device, peer))
        return peer < 3

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    assert why_no_peers(torch.device("cuda", 3), 1, 2) is None
    assert why_no_peers(torch.device("cuda", 2), 0, 2) == "device 2 cannot read device 3's memory"
    assert asked == [(3, 2), (2, 3)]


def test_torchs_names_are_there():
    from llmq.runtime.parallel.symmetric import TorchSymmetricMemory

    memory = TorchSymmetricMemory()
    assert callable(memory.set_group_info)
    schema = str(memory.one_shot_all_reduce.default._schema)
    assert schema == "symm_mem::one_shot_all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor"
    schema = str(memory.multimem_all_reduce_.default._schema)
    assert "Tensor(a!) input, str reduce_op, str group_name" in schema
