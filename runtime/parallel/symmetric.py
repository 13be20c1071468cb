"""All-reduce of small rows through memory that all ranks map: each reads the others' over NVLink, in one kernel.

A ring or a tree passes a row from rank to rank, and a row of a decode step is over long before its latency is: one
kernel that reads everybody's buffer once has that latency once (one-shot), and a switch that sums does the reading
(multicast, "NVLink SHARP"). torch's own kernels in torch.distributed._symmetric_memory, which is alpha there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# One-shot reads (ranks - 1) × bytes on each rank, where a ring of NCCL's moves 2 (ranks - 1) / ranks × bytes: latency
# wins below, bandwidth above. vLLM's one-shot kernel ends at 512 KiB on 4 ranks and at 256 KiB on 8 (its
# custom_all_reduce.cuh), which is 16 rows of 8192 numbers in bf16. Not measured by us.
ONE_SHOT_BYTES = 256 * 2**10
# The switch's sum moves 2 / ranks × bytes in and out of each rank, so that it stays ahead for longer. vLLM lets it take
# 32 MiB and more; what is beyond a few thousand rows is a prompt's, where the all-reduce is not what a step waits for.
MULTICAST_BYTES = 8 * 2**20
# Below this many ranks one read of the peer is as short as the way through the switch.
MULTICAST_RANKS = 4
DTYPES = (torch.bfloat16, torch.float32)  # that torch's kernels add
_ALIGNMENT = 16  # bytes, of their widest loads


class SymmetricMemory(Protocol):
    """What is used of torch.distributed._symmetric_memory and torch.ops.symm_mem."""

    def set_group_info(self, group_name: str, rank: int, num_ranks: int, store: dist.Store) -> None: ...
    def empty(self, num_bytes: int, device: torch.device) -> Tensor: ...
    def rendezvous(self, buffer: Tensor, group_name: str) -> Any:
        """Collective: map everybody's `buffer`. Has a `multicast_ptr`, 0 without a switch that sums."""
        ...

    def one_shot_all_reduce(self, x: Tensor, reduce_op: str, group_name: str) -> Tensor: ...
    def multimem_all_reduce_(self, x: Tensor, reduce_op: str, group_name: str) -> Tensor: ...


class TorchSymmetricMemory:
    def __init__(self) -> None:
        """Raises ImportError where this torch has none."""
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        self._module, operations = _symmetric_memory, torch.ops.symm_mem
        self.set_group_info = _SymmetricMemory.set_group_info
        self.one_shot_all_reduce = operations.one_shot_all_reduce
        self.multimem_all_reduce_ = operations.multimem_all_reduce_

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._module.empty(num_bytes, dtype=torch.uint8, device=device)

    def rendezvous(self, buffer: Tensor, group_name: str) -> Any:
        return self._module.rendezvous(buffer, group_name)


@dataclass(frozen=True)
class SymmetricAllReduce:
    """The same choice on every rank: it depends on shape and dtype alone."""

    memory: SymmetricMemory
    group_name: str
    buffer: Tensor  # [bytes] uint8, mapped by all ranks
    has_multicast: bool

    @property
    def name(self) -> str:
        return "multicast" if self.has_multicast else "one-shot"

    def takes(self, x: Tensor) -> bool:
        return x.dtype in DTYPES and 0 < x.nbytes <= len(self.buffer) and x.nbytes % _ALIGNMENT == 0

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of all ranks' contiguous x, the same bits on each. May be x itself."""
        view = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        view.copy_(x)
        if not self.has_multicast:
            return self.memory.one_shot_all_reduce(view, "sum", self.group_name)
        self.memory.multimem_all_reduce_(view, "sum", self.group_name)
        return x.copy_(view)


def start_symmetric(
    group_name: str,
    rank: int,
    num_ranks: int,
    store: dist.Store,
    device: torch.device,
    agree: Callable[[bool], bool],
    memory: SymmetricMemory | None = None,
    why_not: str | None = None,
) -> tuple[SymmetricAllReduce | None, str]:
    """(what reduces small rows, or None; why, for people). Collective: all ranks get it or none does.

    agree: whether all ranks say so, asked by all. why_not: what this rank knows to speak against it.
    """
    if why_not is None and memory is None:
        try:
            memory = TorchSymmetricMemory()
        except (ImportError, AttributeError) as error:
            why_not = f"this torch has no symmetric memory ({error})"
    if not agree(why_not is None):
        return None, why_not or "another rank cannot"
    made = None
    try:
        memory.set_group_info(group_name, rank, num_ranks, dist.PrefixStore("symmetric memory", store))
        buffer = memory.empty(MULTICAST_BYTES, device)
        handle = memory.rendezvous(buffer, group_name)
        has_multicast = num_ranks >= MULTICAST_RANKS and bool(handle.multicast_ptr)
        if not has_multicast:
            buffer = buffer[:ONE_SHOT_BYTES]
        made = SymmetricAllReduce(memory, group_name, buffer, has_multicast)
    except Exception as error:  # the driver's, the store's, an operation's: each has its own
        said = str(error) or repr(error)
        why_not = f"the ranks' memory cannot be mapped ({said.splitlines()[0]})"
    if not agree(made is not None):
        return None, why_not or "another rank cannot map the others' memory"
    if not agree(made.has_multicast):
        made = SymmetricAllReduce(memory, group_name, made.buffer[:ONE_SHOT_BYTES], has_multicast=False)
    return made, f"{made.name} through symmetric memory up to {len(made.buffer) // 2**10} KiB"


def why_no_peers(device: torch.device, rank: int, num_ranks: int) -> str | None:
    """What speaks against it on this machine, where ranks have devices that follow each other; None: nothing that can
    be seen from here."""
    first = device.index - rank
    for peer in range(first, first + num_ranks):
        if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
            return f"device {device.index} cannot read device {peer}'s memory"
    return None
