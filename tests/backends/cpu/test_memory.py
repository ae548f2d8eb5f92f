"""Pool memory: zeroed, aligned, on huge pages, gone when the last view is gone."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from kvgen.backends.cpu import machine, memory
from kvgen.errors import ArgumentError


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
@pytest.mark.parametrize("align", [1, 64, 4096, 8192, 2 << 20])
def test_memory_is_zeroed_and_aligned(nbytes: int, align: int) -> None:
    data = memory.allocate(nbytes, align)
    assert data.shape == (nbytes,)
    assert data.dtype == np.uint8
    assert data.ctypes.data % max(64, align) == 0 or nbytes == 0
    assert not data.any()
    data[...] = 255  # every byte is writable
    assert data.flags.writeable


def test_two_allocations_do_not_overlap() -> None:
    one, two = memory.allocate(100_000), memory.allocate(100_000)
    one[...] = 1
    assert not two.any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_goes_with_the_last_view_and_not_before() -> None:
    gc.collect()
    size = 1 << 30
    before = mapped_bytes()
    data = memory.allocate(size)
    view = data[100:200].view(np.float32)
    del data
    gc.collect()
    assert mapped_bytes() - before > size // 2
    view[...] = 3.0
    assert view.tolist() == [3.0] * 25
    del view
    gc.collect()
    assert mapped_bytes() - before < size // 2


def test_a_tensor_holds_its_memory() -> None:
    torch = pytest.importorskip("torch")
    size = 1 << 30
    before = mapped_bytes()
    tensor = memory.allocate_tensor(size, 4096)
    assert tensor.dtype == torch.uint8
    assert tensor.data_ptr() % 4096 == 0
    typed = tensor[: 64 * 1024].view(torch.bfloat16).reshape(8, -1)
    del tensor
    gc.collect()
    typed.fill_(1.5)
    assert typed.float().sum().item() == 1.5 * typed.numel()
    assert mapped_bytes() - before > size // 2
    del typed
    gc.collect()
    assert mapped_bytes() - before < size // 2


@pytest.mark.skipif(
    machine.huge_page_mode() not in ("madvise", "always"), reason="no transparent huge pages here"
)
def test_large_pools_get_huge_pages_and_only_when_asked() -> None:
    huge = machine.snapshot().huge_page_bytes
    data = memory.allocate(16 * huge + 5)  # an odd tail is on a huge page too
    assert data.ctypes.data % huge == 0
    data[...] = 1
    assert memory.huge_bytes(data) >= 8 * huge  # the kernel may decline some when memory is fragmented
    if machine.huge_page_mode() == "madvise":
        plain = memory.allocate(16 * huge, huge=False)
        plain[...] = 1
        assert memory.huge_bytes(plain) == 0


@pytest.mark.parametrize("align", [0, -64, 3, 96, 2 << 30])
def test_alignments_that_are_no_power_of_two_are_refused(align: int) -> None:
    with pytest.raises(ArgumentError, match="align"):
        memory.allocate(100, align)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match="nbytes = -1"):
        memory.allocate(-1)
    with pytest.raises(MemoryError, match=f"cannot reserve {1 << 60}"):
        memory.allocate(1 << 60, huge=False)


def test_bytes_of_arrays_and_tensors_are_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    array = np.zeros((3, 5), np.int16)
    memory.as_bytes(array)[...] = 255
    assert (array == -1).all()
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16, requires_grad=True)
    assert memory.as_bytes(tensor).ctypes.data == tensor.data_ptr()
    assert memory.as_bytes(tensor).nbytes == 48
    for wrong in (array[:, ::2], tensor[:, ::2], tensor.to("meta"), [1, 2]):
        with pytest.raises(ArgumentError, match="buffer:"):
            memory.as_bytes(wrong)
