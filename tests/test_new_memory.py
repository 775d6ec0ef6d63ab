"""Memory for what is joined from parts, and copying into it by several threads."""

from __future__ import annotations

import pytest
import torch

from everstep.memory import ALIGNMENT, NewMemory, copy_all, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64])
def test_new_memory_is_zero_aligned_and_of_nobody_else(dtype: torch.dtype) -> None:
    memory = NewMemory()
    shapes = [(3, 5), (), (0, 4), (7,), (1024, 1025), (1,), (40 << 20,) if dtype is torch.bool else (2, 2)]
    tensors = [memory.zeros(shape, dtype) for shape in shapes]
    for tensor, shape in zip(tensors, shapes, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "what is saved of a tensor is its storage"
        assert not tensor.any()
        tensor.fill_(1)
    assert all(bool(tensor.all()) for tensor in tensors)


def test_blocks_that_are_full_are_followed_by_others() -> None:
    memory = NewMemory()
    tensors = [memory.zeros((3 << 20,), torch.float32) for _ in range(7)]  # two a block
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert [int(tensor[0]) == int(tensor[-1]) == i for i, tensor in enumerate(tensors)] == [True] * 7


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3, 2048])
def test_copies_by_several_threads_are_those_of_one(num_workers: int, rows: int) -> None:
    threads = torch.get_num_threads()
    large, small = torch.randn(rows, 1500), torch.randn(7)
    into = torch.zeros(rows, 3000), torch.zeros(9), torch.zeros(())
    copies = [(into[0][:, 500:2000], large), (into[1][2:], small), (into[2], torch.tensor(5.0))]
    copy_all(copies, num_workers)
    assert same_bits(into[0][:, 500:2000].contiguous(), large)
    assert int(into[0][:, :500].count_nonzero()) == int(into[0][:, 2000:].count_nonzero()) == 0
    assert same_bits(into[1], torch.cat([torch.zeros(2), small])) and into[2] == 5
    assert torch.get_num_threads() == threads
