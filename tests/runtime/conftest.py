"""What tests of the batched runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Kernels of a few microseconds: a second thread only waits for a core that another test has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVGEN_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)
