"""The store of activations: equal whether in memory or in a file, bounded, nothing left behind."""

import pytest
import torch

from llmq.quantize.activation_store import ActivationStore

SHAPES = [(1, 5, 8), (2, 3, 8), (1, 700, 8), (1, 1, 8)]


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("memory_bytes", [0, 400, 10**9])
def test_what_was_put_in_comes_out_and_can_be_replaced(tmp_path, memory_bytes):
    store = ActivationStore(tensors(), tmp_path / "spill", memory_bytes)
    assert all(map(torch.equal, store, tensors()))
    for index, tensor in enumerate(tensors(1)):
        store[index] = tensor
    assert all(map(torch.equal, store, tensors(1)))
    assert len(store) == 4
    held = sum(tensor.nbytes for tensor in store._held.values())
    assert held <= memory_bytes
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_mapped_tensors_lie_as_allocated_ones_do(tmp_path):
    store = ActivationStore(tensors(), tmp_path / "spill", 0)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in store)


def test_another_shape_or_dtype_is_refused(tmp_path):
    store = ActivationStore(tensors(), tmp_path / "spill")
    with pytest.raises(ValueError, match=r"\(1, 5, 8\)"):
        store[0] = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="float64"):
        store[0] = torch.zeros(1, 5, 8, dtype=torch.float64)


@pytest.mark.parametrize("memory_bytes", [0, 2**20])
def test_a_tensor_takes_the_place_of_the_one_before(tmp_path, memory_bytes):
    store = ActivationStore([torch.zeros(1, 4, 8) for _ in range(3)], tmp_path / "spill", memory_bytes)
    held = store[1]
    store[1] = torch.ones(1, 4, 8)
    assert held.equal(torch.ones(1, 4, 8))
    assert store[0].equal(store[2])
