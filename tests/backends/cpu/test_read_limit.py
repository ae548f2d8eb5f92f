"""The read limit reads every byte (its checksum proves it), with every row, size and thread count."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.backends.cpu import isa, memory
from kvgen.backends.cpu.read_limit import ReadLimit, read_limit
from kvgen.errors import ArgumentError
from tests.support.guard import guarded_bytes, run_guarded

ROWS = [
    isa.ROWS["portable"],
    pytest.param(isa.ROWS["avx2"], marks=pytest.mark.isa("avx2")),
    pytest.param(isa.ROWS["avx512"], marks=pytest.mark.isa("avx512")),
]


def checksum(data: np.ndarray) -> int:
    padded = np.zeros(-(-data.nbytes // 8) * 8, np.uint8)
    padded[: data.nbytes] = data
    return int(np.bitwise_xor.reduce(padded.view("<u8")))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, 7, 8, 511, 512, 4096, 12_289, 1_000_003])
def test_every_byte_is_read_once(row: isa.IsaRow, threads: int, nbytes: int) -> None:
    """Read once: a byte read twice, or never, changes the exclusive or of random words."""
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    found = read_limit(data, threads, 1, row=row)
    # Threads start on 4 KB blocks, multiples of 8, so that words are the same words.
    assert found.checksum == checksum(data)
    assert (found.nbytes, found.threads, len(found.samples)) == (nbytes, threads, 1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nothing_beyond_the_buffer_is_read(row: isa.IsaRow) -> None:
    read_limit(np.ones(64, np.uint8), 1, 1, row=row)  # compile in this process, not in the child
    for nbytes in (1, 63, 100, 4096, 10_001):
        data = guarded_bytes(nbytes)
        data[...] = 3
        run = run_guarded(lambda data=data: read_limit(data, 2, 1, row=row).checksum)  # type: ignore[misc]
        assert run.check() == checksum(data)


def test_the_figure_is_possible() -> None:
    """Between a hundredth of and ten times what memory of this decade delivers: wrong units would fall out of
    it.
    """
    data = memory.allocate(64 << 20)
    data[...] = 1
    limit = read_limit(data, 1, 5)
    assert 3e8 < limit.bytes_per_s < 1e12
    assert "GB/s" in str(limit)


def test_the_median_is_reported_and_small_buffers_are_marked() -> None:
    limit = ReadLimit((1e9, 9e9, 2e9), 64, 1, 0, True)
    assert limit.bytes_per_s == 2e9
    assert str(limit) == "2.0 GB/s (1.0 to 9.0; 1 threads, 3 reads, may fit the cache)"


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        read_limit(np.zeros(0, np.uint8), 1)
    with pytest.raises(ArgumentError, match="at least 1"):
        read_limit(np.zeros(8, np.uint8), 1, 0)
    with pytest.raises(ArgumentError, match="threads"):
        read_limit(np.zeros(8, np.uint8), 0)
