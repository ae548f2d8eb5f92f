"""One number of threads for torch and for kvgen's kernels, for the length of a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from kvgen.backends.cpu import machine

VARIABLE = "KVGEN_NUM_THREADS"


@contextlib.contextmanager
def using_threads(requested: int | None) -> Iterator[int]:
    """Run the block with ``requested`` threads (default: all usable), and yield the number."""
    import torch

    count = machine.num_threads(requested)
    before, kept = torch.get_num_threads(), os.environ.get(VARIABLE)
    torch.set_num_threads(count)
    os.environ[VARIABLE] = str(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
        if kept is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = kept
