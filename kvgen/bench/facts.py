"""facts: the machine and the software under a report. Reports compare only where the machine is the same."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

from kvgen import __version__
from kvgen.backends.cpu import isa, machine
from kvgen.resolve import resolve_target
from kvgen.tune.device import device_name

PROTOCOL = 1
"""Raised whenever cases, contents or the way samples are taken change: figures do not compare then."""


@dataclass(frozen=True)
class Facts:
    """What figures depend on."""

    protocol: int
    cpu: str
    cores: int
    isa: str
    l3_bytes: int
    huge_pages: str
    """What the kernel gives pools: ``always``, ``madvise``, ``never`` or ``none``."""
    threads: int
    kvgen: str
    torch: str
    python: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def gather(threads: int) -> Facts:
    """The facts of this machine, now."""
    import torch

    found = machine.snapshot()
    return Facts(
        protocol=PROTOCOL,
        cpu=device_name(resolve_target("cpu")).rpartition(",")[0],
        cores=found.usable_cores,
        isa=isa.best_row().name,
        l3_bytes=found.l3_bytes,
        huge_pages=found.huge_page_mode,
        threads=threads,
        kvgen=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
    )
